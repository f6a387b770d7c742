# SPDX-License-Identifier: Apache-2.0
"""True pending: sessions as the PyTorch flow's own request objects, which hold their KV until they are freed.

All private names of TensorRT-LLM that we use are in this file, and in the list `kept` of `contracts/`; the engine comes
here only when the installed package meets it.

The executor that the public LLM made is left idle: nothing is ever sent to it, and its thread waits for its queue. We
make the steps of its loop ourselves, in our thread, over exactly the sessions of the step (PyExecutor._executor_loop:
prepare_resources, forward, the request's state, update_resources), without its scheduler and its sampler. A session
that is not in a step is a request that nobody looks at: it keeps its KV blocks and its slot.

Where all this was read, and of which version: `contracts/` and docs/tensorrt_llm.md. The hang detector that 1.2.0
probably has is paused while the executor waits for its queue.

A step that brings one token is a decode row, which CUDA graphs can run: no prefix is matched, nothing is allocated but
perhaps one block. Any other step (the first one, several tokens, or a rejected tail) gives the request back, which
leaves its blocks for reuse, and opens another over the whole sequence, which finds them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.config import TensorRTLLMConfig
from python_backends.llm.engines.tensorrt_llm.compute import Compute, Piece, Rows

__all__ = ["KeptSessions"]

_FIRST_ID = 1 << 32  # of our requests: the executor numbers its own from max_batch_size on


class KeptSessions(Compute):
    """See the module. One rank only: with more, every rank would have to make the same steps.

    Raises EngineError when the LLM isn't built as it was in the versions that were read.
    """

    def __init__(self, llm: Any, package: Any, config: TensorRTLLMConfig, vocab_size: int) -> None:
        # LLM._executor is a GenerationExecutorWorker in this process, its engine a PyExecutor (executor/worker.py)
        executor: Any = getattr(getattr(llm, "_executor", None), "engine", None)
        lacks = [name for name in ("model_engine", "resource_manager") if not hasattr(executor, name)]
        if lacks:
            raise EngineError(f"LLM._executor.engine: found a {type(executor).__name__} without {' and '.join(lacks)}")
        self._model_engine = executor.model_engine
        self._resources = executor.resource_manager
        self._stream: Any = getattr(executor, "execution_stream", None)  # 1.2 has one
        requests = importlib.import_module("tensorrt_llm._torch.pyexecutor.llm_request")
        scheduler = importlib.import_module("tensorrt_llm._torch.pyexecutor.scheduler")
        self._new_request = requests.LlmRequest
        self._new_batch = scheduler.ScheduledRequests
        self._decoding = requests.LlmRequestState.GENERATION_IN_PROGRESS
        # as KVCacheManager.add_dummy_requests makes it (resource_manager.py)
        self._sampling = requests.SamplingConfig(package.SamplingParams()._get_sampling_config())
        self._context_tokens = config.context_tokens
        self._max_step_tokens = config.max_step_tokens
        self._vocab_size = vocab_size
        self._ids = count(_FIRST_ID)
        self._requests: dict[int, Any] = {}

    def forward(self, pieces: Sequence[Piece]) -> Rows:
        sessions: list[int] = []
        logits: list[torch.Tensor] = []
        for group in self._groups(pieces):
            try:
                rows = self._forward(group)
            except Exception as error:  # no free blocks, or anything of the GPU
                for piece in pieces:
                    self.free(piece.session)
                raise EngineError(f"tensorrt_llm: {type(error).__name__}: {' '.join(str(error).split())}") from error
            wanted = [r for r, piece in enumerate(group) if piece.output]
            sessions += [group[r].session for r in wanted]
            logits.append(rows[wanted])
        return Rows(sessions, torch.cat(logits) if logits else torch.empty(0, self._vocab_size), {})

    def _groups(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """Batches within the model's limit of tokens. An opened request counts with its whole sequence: how much of it
        will be reused shows only when it is too late."""
        group: list[Piece] = []
        tokens = 0
        # context rows first: so are the rows of the logits (ScheduledRequests.all_requests)
        for piece in sorted(pieces, key=self._continues):
            more = 1 if self._continues(piece) else len(piece.token_ids)
            if group and tokens + more > self._max_step_tokens:
                yield group
                group, tokens = [], 0
            group.append(piece)
            tokens += more
        if group:
            yield group

    def _continues(self, piece: Piece) -> bool:
        """Whether it only adds one token to a request that is held: a decode row."""
        return piece.session in self._requests and piece.start == piece.held == len(piece.token_ids) - 1

    def _forward(self, group: Sequence[Piece]) -> torch.Tensor:
        """FP32 [n, vocabulary] of these, context rows first."""
        batch = self._new_batch()
        for piece in group:
            if self._continues(piece):
                request = self._requests[piece.session]
                request.add_new_token(piece.token_ids[-1], 0)
                batch.generation_requests.append(request)
            else:
                self.free(piece.session)
                batch.context_requests.append(self._open(piece))
        self._resources.prepare_resources(batch)  # sets context_current_position behind what is reused
        for request in batch.context_requests:
            request.context_chunk_size = request.prompt_len - request.context_current_position
        with self._executor_stream():
            outputs = self._model_engine.forward(
                scheduled_requests=batch,
                resource_manager=self._resources,
                new_tensors_device=None,  # the tokens are those of the requests
            )
        # a buffer of the CUDA graph, padded: ours are the first rows
        logits: torch.Tensor = outputs["logits"][: len(group), : self._vocab_size].to(torch.float32, copy=True)
        for request in batch.context_requests:
            request.move_to_next_context_chunk()
            request.state = self._decoding
        self._resources.update_resources(batch)
        return logits

    @contextmanager
    def _executor_stream(self) -> Iterator[None]:
        """Where PyExecutor._forward_step of 1.2 runs the model: KV blocks are copied (partial reuse, offloading) in the
        order of that stream, so a forward on another could read a block that isn't there yet."""
        if self._stream is None:
            yield
            return
        ours = torch.cuda.current_stream()
        self._stream.wait_stream(ours)
        with torch.cuda.stream(self._stream):
            yield
        ours.wait_stream(self._stream)

    def _open(self, piece: Piece) -> Any:
        request = self._new_request(
            request_id=next(self._ids),
            max_new_tokens=self._context_tokens,
            input_tokens=list(piece.token_ids),
            sampling_config=self._sampling,
            is_streaming=False,
        )
        self._requests[piece.session] = request
        return request

    def free(self, session: int) -> None:
        request = self._requests.pop(session, None)
        if request is not None:
            self._resources.free_resources(request)
