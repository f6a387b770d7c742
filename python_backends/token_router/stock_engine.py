# SPDX-License-Identifier: Apache-2.0
"""A stock `tensorrtllm` model as an engine: every session's step is one request that brings its whole prefix.

The model keeps no sessions. What it does keep is the KV of prefixes, in blocks; a request computes what no block
holds, and always its last token. Read from TensorRT-LLM 1.0 to 1.2 (model_instance_state.cc, utils.cc, and
kvCacheManager.cpp); no GPU was there to run it on, so `probe` checks at start what can be checked.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import Capacity, Engine, EngineError, EngineOutput
from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from python_backends.llm.engines.step_check import check_open, check_step
from python_backends.llm.engines.stock_facts import StockFacts, stock_facts

__all__ = ["Infer", "StockEngine", "Tensors"]

Tensors = Mapping[str, NDArray[Any]]

_TOKENS = ["output_ids", "sequence_length"]  # the backend fails a request that doesn't want them
_LOGITS = "generation_logits"
_REUSED, _NEW = "kv_cache_reused_blocks", "kv_cache_alloc_new_blocks"
_ONE = np.array([[1]], np.int32)
_TRUE = np.array([[True]])
_NO_END = -1  # of a retention range: up to the prompt's last token
_log = logging.getLogger("token_router")


class Infer(Protocol):
    """One request to the model and its one response. Raises RuntimeError with the server's message."""

    def __call__(self, request_id: str, inputs: Tensors, outputs: Sequence[str]) -> Tensors: ...


class _Answer(NamedTuple):
    """token_ids: what the model's own greedy decoding made. logits: FP32 [vocabulary], of the first of them."""

    token_ids: list[int]
    logits: torch.Tensor | None
    reused_blocks: int
    new_blocks: int


@dataclass(slots=True)
class _Session:
    """tokens: the sequence. ahead: what the model made of it in its last request and nobody has taken yet."""

    limit: int
    tokens: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)


class StockEngine(Engine):
    """See the module. infer: called from several threads at once.

    With return_logits the tokens are sampled from the model's raw logits by `LLMRunner`, as with any engine: the
    model's own sampling, its penalties and its seeds are never used, and end_id is left out so that nothing ends
    early. Without, the tokens are the model's own greedy ones.

    A prefill is a request too, whose token is thrown away: it fills the blocks that the session's next request
    finds, and costs no decoding step, for that token comes out of the prefill.

    reused_blocks, new_blocks: of the KV, over all requests so far.
    Raises ValueError when neither the configuration nor the engine's files say what must be known.
    """

    name: ClassVar[str] = "tensorrtllm"

    def __init__(self, config: TensorRTLLMBackendConfig, infer: Infer, facts: StockFacts | None = None) -> None:
        self._config = config
        self._infer = infer
        facts = facts or stock_facts(config)
        self._capacity = Capacity(
            max_sessions=config.max_sessions,
            context_tokens=facts.context_tokens,
            prefill_chunk=config.prefill_chunk,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            provides=config.provides if config.return_logits else frozenset(),
            kv_tokens=config.max_tokens,
            kv_block=config.tokens_per_block,
        )
        self._sessions: dict[int, _Session] = {}
        self._running: dict[str, None] = {}  # request ids
        self._tag = f"{os.getpid()}-{os.urandom(4).hex()}"  # other routers may use the model too
        self._numbers = itertools.count(1)  # of its requests
        self._pool = ThreadPoolExecutor(config.calls_at_once, thread_name_prefix="stock")
        self._retention = _retention(config)
        self.reused_blocks = 0
        self.new_blocks = 0

    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def running(self) -> frozenset[str]:
        """The ids of the requests under way. Any thread may ask."""
        return frozenset(self._running.copy())

    def open(self, session: SessionOpen) -> None:
        check_open(session, self._sessions, self._capacity)
        self._sessions[session.session] = _Session(session.limit)

    def step(self, batch: Sequence[SessionStep]) -> EngineOutput:
        errors: dict[int, str] = {}
        to_ask: list[SessionStep] = []
        for step in batch:
            try:
                session = self._take(step)
            except ValueError as error:
                errors[step.session] = str(error)
                continue
            if not (step.sample and session.ahead):
                to_ask.append(step)
        answers = self._ask_all(to_ask, errors)
        done = [step for step in batch if step.sample and step.session not in errors]
        sessions = [step.session for step in done]
        if not self._config.return_logits:
            return EngineOutput(sessions, next_token_ids=[self._sessions[s].ahead[0] for s in sessions], errors=errors)
        rows = [answers[s].logits for s in sessions]
        logits = torch.stack(rows) if rows else torch.empty(0, self._capacity.vocab_size)  # type: ignore[arg-type]
        return EngineOutput(sessions, logits, errors=errors)

    def free(self, sessions: Sequence[int]) -> None:
        """The blocks stay, until others need them: nothing of the stock model takes them back."""
        for session in sessions:
            self._sessions.pop(session, None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """End every request under way: its session fails. Blocks for as long as the server takes to hear of it; any
        thread may call it."""
        for request_id in self.running:
            try:
                self._infer(request_id, {"stop": _TRUE, "input_lengths": _ONE, "request_output_len": _ONE}, _TOKENS)
            except RuntimeError as error:
                _log.error("request %s could not be stopped: %s", request_id, error)

    def probe(self) -> None:
        """Two requests that check what the files can't: what the model returns, and that it reuses KV.

        Raises EngineError when it returns something else than the configuration says; only warns of no reuse.
        """
        block = self._config.tokens_per_block
        length = min(2 * block + 1, self._capacity.context_tokens - 1)
        prefix = [1 + i % (self._capacity.vocab_size - 1) for i in range(length)]
        for _ in range(2):
            answer = self._ask("probe", prefix, 1, self._config.return_logits)
        if length > block and not answer.reused_blocks:
            _log.warning(
                "the tensorrtllm model reused no KV blocks of a prompt that it had just had: every step computes the"
                " whole prefix again; see enable_kv_cache_reuse, and build the engine with --use_paged_context_fmha"
            )

    # One step

    def _take(self, step: SessionStep) -> _Session:
        """The step's tokens into the session's sequence. Raises ValueError."""
        session = self._sessions.get(step.session)
        if session is None:
            raise ValueError(f"session {step.session} is not open")
        check_step(step, len(session.tokens), self._capacity)
        count = len(step.token_ids)
        as_foreseen = step.start == len(session.tokens) and session.ahead[:count] == step.token_ids
        session.tokens[step.start :] = step.token_ids
        session.ahead = session.ahead[count:] if as_foreseen else []
        return session

    def _ask_all(self, steps: Sequence[SessionStep], errors: dict[int, str]) -> dict[int, _Answer]:
        """A request for each, all together. errors: gets those that fail."""
        together = map if len(steps) == 1 else self._pool.map  # a lone one needs no other thread
        answers: dict[int, _Answer] = {}
        for step, answer in zip(steps, together(self._try, steps), strict=True):
            if isinstance(answer, EngineError):
                errors[step.session] = str(answer)
                continue
            answers[step.session] = answer
            self._sessions[step.session].ahead = answer.token_ids if step.sample else []
            self.reused_blocks += answer.reused_blocks
            self.new_blocks += answer.new_blocks
        return answers

    def _try(self, step: SessionStep) -> _Answer | EngineError:
        session = self._sessions[step.session]
        run = min(self._config.run_tokens, max(1, session.limit - len(session.tokens))) if step.sample else 1
        wants_logits = step.sample and self._config.return_logits
        try:
            return self._ask(str(step.session), session.tokens, run, wants_logits)
        except EngineError as error:
            return error
        except Exception as error:  # an answer of another shape: no reason to leave the others unawaited
            return EngineError(f"the model's answer can't be read: {type(error).__name__}: {error}")

    def _ask(self, purpose: str, prefix: Sequence[int], run: int, wants_logits: bool) -> _Answer:
        """One request, under an id that no other has. Raises EngineError when the model refuses it, or its answer isn't
        one."""
        request_id = f"{self._tag}:{purpose}:{next(self._numbers)}"
        inputs = {
            "input_ids": np.array([prefix], np.int32),
            "input_lengths": np.array([[len(prefix)]], np.int32),
            "request_output_len": np.array([[run]], np.int32),
            "runtime_top_k": _ONE,  # greedy, whatever the model's default
            "exclude_input_in_output": _TRUE,
            "return_perf_metrics": _TRUE,  # without it there are no counts of blocks
            **self._retention,
        }
        outputs = [*_TOKENS, _REUSED, _NEW]
        if wants_logits:
            inputs["return_generation_logits"] = _TRUE
            outputs.append(_LOGITS)
        self._running[request_id] = None
        try:
            response = self._infer(request_id, inputs, outputs)
        except RuntimeError as error:
            raise EngineError(_readable(str(error))) from error
        finally:
            del self._running[request_id]
        return self._answer(response, wants_logits)

    def _answer(self, response: Tensors, wants_logits: bool) -> _Answer:
        """What came back: output_ids [1, beams, tokens], sequence_length [1, beams], generation_logits [1, beams,
        tokens, vocabulary], of which the padding of a tensor-parallel engine is cut off."""
        if missing := [name for name in _TOKENS if name not in response]:
            raise EngineError(f"the model's answer lacks {' and '.join(missing)}")
        count = int(response["sequence_length"].reshape(-1)[0])
        token_ids = response["output_ids"].reshape(-1)[:count].tolist()
        if not token_ids:
            raise EngineError("it was stopped before it made a token: a step may take limits.step_timeout_s")
        logits = None
        if wants_logits:
            if _LOGITS not in response or not response[_LOGITS].size:
                raise EngineError(
                    f"the model returns no {_LOGITS}: its engine was built without --gather_generation_logits;"
                    " build it with that, or set return_logits: false"
                )
            row = response[_LOGITS].reshape(-1, response[_LOGITS].shape[-1])[0]
            if row.size < self._capacity.vocab_size:
                raise EngineError(f"vocab_size: {self._capacity.vocab_size}, but the model's logits have {row.size}")
            logits = torch.from_numpy(row[: self._capacity.vocab_size].astype(np.float32))
        reused, new = (int(response[name].reshape(-1)[0]) if name in response else 0 for name in (_REUSED, _NEW))
        return _Answer(token_ids, logits, reused, new)


def _retention(config: TensorRTLLMBackendConfig) -> dict[str, NDArray[Any]]:
    """The inputs that say how long the blocks of a request should stay."""
    values = {
        "retention_token_range_starts": 0,
        "retention_token_range_ends": _NO_END,
        "retention_token_range_priorities": config.retention_priority,
        "retention_decode_priority": config.retention_priority,
    }
    if config.retention_ms is not None:
        for blocks in ("token_range_durations", "decode_duration"):
            values[f"retention_{blocks}_ms"] = config.retention_ms
    return {name: np.array([[value]], np.int32) for name, value in values.items()}


def _readable(message: str) -> str:
    """The backend's errors have a place in its source, and a stack trace, on the lines after the first."""
    first, *_ = message.strip().splitlines() or ["no reason given"]
    return re.sub(r"^\[TensorRT-LLM\]\[ERROR\] |( \([^()]*\.(cpp|cc|h):\d+\))$", "", first)
