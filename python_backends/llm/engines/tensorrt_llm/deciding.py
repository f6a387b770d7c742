# SPDX-License-Identifier: Apache-2.0
"""A run inside TensorRT-LLM's executor: a logits processor that samples and routes, and forces the outcome."""

from __future__ import annotations

import threading

import torch

from python_backends.llm.engines.base import Decide, EngineError
from python_backends.llm.engines.tensorrt_llm.compute import Piece

__all__ = ["Deciding"]


class Deciding:
    """A LogitsProcessor of one request over several tokens: `decide` chooses each, or the request's end.

    The chosen token is the only one that it leaves a probability; where the session stops, that is end_id, whatever
    was sampled: the executor computes no KV for the last token of a request, so what it holds is the same.

    No race: the executor's one thread calls the processors of a pass one after the other, and the thread that sent the
    requests does nothing but wait for them until all have ended. Only where it gives up waiting (a failure) may a call
    still come, which `close` turns away. On a GPU all of it is work of the executor's stream, and done when `decide`
    returns: the token's number had to be read.

    end_id: the token that ends the request. Not an end-of-sequence token, which requests may ignore: the last one of
    most vocabularies is reserved, or there to make the number round, and never chosen. Where it is, the run is over.
    error: why the session failed. went_on: the tokens that the session went on with and whose KV the executor has.
    """

    def __init__(self, piece: Piece, decide: Decide, vocab_size: int) -> None:
        self.error: str | None = "tensorrt_llm finished a request without calling its logits processor"
        self.went_on: list[int] = []
        self.end_id = vocab_size - 1
        self._session = piece.session
        self._before = len(piece.token_ids)
        self._decide: Decide | None = decide
        self._vocab_size = vocab_size
        self._chosen: list[int] = []
        self._lock = threading.Lock()

    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """logits: [1, 1, padded vocabulary], the executor's own. token_ids: [the request's tokens, with its prompt]
        (both: _torch/pyexecutor/model_engine.py, 1.0 to 1.2)."""
        token = None
        with self._lock:
            if self._decide is not None:
                try:
                    token = self._next(self._decide, logits, token_ids[0][self._before :])
                    self.error = None
                except Exception as error:  # it must not end the executor's thread
                    self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        logits.fill_(-torch.inf)
        logits[..., self.end_id if token is None else token] = 0

    def _next(self, decide: Decide, logits: torch.Tensor, taken: list[int]) -> int | None:
        """taken: the tokens of this run. As many as before = the call before was for a chunk of the prompt only, and
        nothing of it was taken."""
        if taken != self._chosen[: len(taken)]:
            raise EngineError(f"tensorrt_llm took {taken} where {self._chosen} was chosen")
        self.went_on = taken
        # as outside of the executor, which is in inference mode: what `route` keeps must be usable in both
        with torch.inference_mode(False), torch.no_grad():
            row = logits.reshape(1, -1)[:, : self._vocab_size].to(torch.float32, copy=True)
            token = decide(self._session, len(taken), row)
        self._chosen = taken if token is None else [*taken, token]
        return token

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        """Nothing of it is in a pickle. The executor makes one of its new requests for the other ranks, even where
        there are none, and goes on with the originals (executor_request_queue.py and safe_broadcast in
        distributed/communicator.py, copies of 1.2's time)."""
        return object, ()

    def close(self) -> None:
        """`decide` isn't called any more; a call under way is waited for. The request ends with its next token."""
        with self._lock:
            self._decide = None
