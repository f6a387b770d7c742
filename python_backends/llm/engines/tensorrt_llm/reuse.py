# SPDX-License-Identifier: Apache-2.0
"""Sessions through TensorRT-LLM's public API: every step is a request of one token over the whole sequence; a run of
steps is a request of as many.

Its KV comes from the blocks that the session's last request left behind (block and partial reuse), so only what is new
is computed. A session between two steps is nothing but those blocks: they are evicted when memory is short, by
priority, and then computed again.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from python_backends.llm.engines.base import Decide, EngineError
from python_backends.llm.engines.config import TensorRTLLMConfig
from python_backends.llm.engines.tensorrt_llm.compute import Compute, Piece, Ran, Rows
from python_backends.llm.engines.tensorrt_llm.deciding import Deciding
from python_backends.llm.engines.tensorrt_llm.settings import make_retention

__all__ = ["BlockReuse"]


class _LastLogits:
    """A LogitsProcessor of one request that keeps the raw logits of its last position where they were computed.

    The PyTorch flow calls it with stream_ptr and client_id None, in the executor's thread and on its current stream
    (_torch/pyexecutor/model_engine.py, 1.0 to 1.2); once for each chunk of a prefill, of which the last one counts.
    """

    def __init__(self) -> None:
        self._row: torch.Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        self._row = logits.reshape(-1).to(torch.float32, copy=True)  # what we were given is a buffer of the next step
        if logits.is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def row(self) -> torch.Tensor:
        """FP32 [vocabulary], usable on the caller's stream. Raises EngineError when there is none."""
        if self._row is None:
            raise EngineError("tensorrt_llm finished a request without calling its logits processor")
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
        return self._row


class _Refused:
    """In the place of a request that the executor didn't take: it has ended, with this error."""

    finished = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> None:
        raise self._error


class BlockReuse(Compute):
    """See the module.

    With one rank the logits stay on the GPU, and runs are made inside the executor. With more, the ranks are processes
    of their own: they send the logits, and each token's row crosses to this process's memory.
    """

    def __init__(self, llm: Any, package: Any, config: TensorRTLLMConfig, vocab_size: int, eos_token_id: int) -> None:
        self._llm = llm
        self._sampling_params = package.SamplingParams
        self._request_error: type[Exception] = importlib.import_module("tensorrt_llm.executor.utils").RequestError
        self._retention = make_retention(package, config.retention_priority)
        self._vocab_size = vocab_size
        self._eos = eos_token_id
        self.runs = self._in_process = config.tensor_parallel == 1

    def forward(self, pieces: Sequence[Piece]) -> Rows:
        processors = [_LastLogits() if p.output and self._in_process else None for p in pieces]
        sessions: list[int] = []
        rows: list[torch.Tensor] = []
        errors: dict[int, str] = {}
        with self._requests() as requests:
            for piece, processor in zip(pieces, processors, strict=True):
                requests.append(self._send(piece, processor))
            for piece, processor, request in zip(pieces, processors, requests, strict=True):
                if (error := self._wait(request)) is not None:
                    errors[piece.session] = error
                elif piece.output:
                    sessions.append(piece.session)
                    rows.append(_sent_logits(request) if processor is None else processor.row())
        logits = torch.stack(rows)[:, : self._vocab_size] if rows else torch.empty(0, self._vocab_size)
        return Rows(sessions, logits, errors)

    def run(self, pieces: Sequence[Piece], steps: Sequence[int], decide: Decide) -> Ran:
        processors = [Deciding(piece, decide, self._vocab_size) for piece in pieces]
        went_on: dict[int, list[int]] = {}
        errors: dict[int, str] = {}
        try:
            with self._requests() as requests:
                for piece, processor, most in zip(pieces, processors, steps, strict=True):
                    requests.append(self._send(piece, processor, most))
                for piece, processor, request in zip(pieces, processors, requests, strict=True):
                    error = self._wait(request) or processor.error
                    if error is not None:
                        errors[piece.session] = error
                    went_on[piece.session] = processor.went_on
        finally:
            for processor in processors:
                processor.close()
        return Ran(went_on, errors)

    @contextmanager
    def _requests(self) -> Iterator[list[Any]]:
        """The requests of a step. All are sent before the first is waited for: what the executor finds in its queue it
        computes together. After a failure none goes on."""
        requests: list[Any] = []
        try:
            yield requests
        except Exception as error:
            for request in requests:
                if not request.finished:
                    request.abort()
            raise EngineError(f"tensorrt_llm: {type(error).__name__}: {' '.join(str(error).split())}") from error

    def _send(self, piece: Piece, processor: _LastLogits | Deciding | None, max_tokens: int = 1) -> Any:
        end_id = processor.end_id if isinstance(processor, Deciding) else None
        params = self._sampling_params(
            end_id=self._eos if end_id is None else end_id,  # no tokenizer is loaded that would know one
            pad_id=self._eos,
            ignore_eos=end_id is None,
            max_tokens=max_tokens,
            top_k=1,  # the token that a processor has left, or one that nobody looks at
            logits_processor=processor,
            return_generation_logits=piece.output and processor is None,
            detokenize=False,
        )
        try:
            return self._llm.generate_async(
                inputs={"prompt_token_ids": list(piece.token_ids)},
                sampling_params=params,
                streaming=False,
                kv_cache_retention_config=self._retention,
            )
        except self._request_error as error:
            # An executor in this process looks at a request at once (executor/base_worker.py of 1.1's time: longer than
            # its max_seq_len, say, which small KV lowers); one in others, later. Either way it's this session's error.
            return _Refused(error)

    def _wait(self, request: Any) -> str | None:
        """Until it has ended. Returns why it was refused."""
        try:
            request.result()
        except self._request_error as error:
            return str(error)
        return None

    def free(self, session: int) -> None:
        """Nothing: the blocks are the pool's, which takes them when it needs them."""


def _sent_logits(request: Any) -> torch.Tensor:
    """FP32 [vocabulary], in this process's memory. Raises EngineError when they weren't sent."""
    logits = request.outputs[0].generation_logits
    if logits is None:
        raise EngineError("tensorrt_llm returned no generation logits")
    row: torch.Tensor = logits.reshape(-1, logits.shape[-1])[-1]
    return row.to("cpu", torch.float32)
