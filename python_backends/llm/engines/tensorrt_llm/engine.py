# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's PyTorch flow as an engine, through its Python LLM API."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import Capacity, Decide, Engine, EngineError, EngineOutput
from python_backends.llm.engines.config import TensorRTLLMConfig
from python_backends.llm.engines.step_check import check_open, check_step
from python_backends.llm.engines.tensorrt_llm.checkpoint import read_checkpoint
from python_backends.llm.engines.tensorrt_llm.compute import Compute, Piece
from python_backends.llm.engines.tensorrt_llm.contract import Contract, load_contract, mismatches, require
from python_backends.llm.engines.tensorrt_llm.kept import KeptSessions
from python_backends.llm.engines.tensorrt_llm.package import import_package
from python_backends.llm.engines.tensorrt_llm.reuse import BlockReuse
from python_backends.llm.engines.tensorrt_llm.settings import make_llm

__all__ = ["TensorRTLLMEngine"]

_log = logging.getLogger(__name__)


class TensorRTLLMEngine(Engine):
    """See the module, `reuse.py` and `kept.py` for the two ways to hold a session.

    Raises ValueError for what the configuration can't have, EngineError when the package isn't there, isn't one of the
    versions that this was written for, or can't load the weights.
    """

    name: ClassVar[str] = "tensorrt_llm"

    def __init__(self, config: TensorRTLLMConfig, hidden_states: bool = False) -> None:
        if hidden_states:
            raise ValueError(
                "engine: tensorrt_llm has no hidden states: the models of its PyTorch flow return logits only; use"
                " llama_cpp for a router that needs them"
            )
        if config.pending == "kept" and config.max_tokens is None:
            raise ValueError("engine: max_tokens: must be given with pending: kept, whose KV nothing can evict")
        checkpoint = read_checkpoint(config.weights)
        package = import_package(config.tensor_parallel, config.gpu_device_ids)
        contract = load_contract(package.__version__)
        require(contract.public, package.__version__)
        self.weights = Path(config.weights).name
        self._tokens: dict[int, list[int]] = {}
        self._llm = make_llm(package, config)
        self._compute = self._choose(config, package, contract, checkpoint.vocab_size, checkpoint.eos_token_ids[0])
        self.runs = self._compute.runs
        self._capacity = Capacity(
            max_sessions=config.max_sessions,
            context_tokens=config.context_tokens,
            prefill_chunk=config.prefill_chunk,
            vocab_size=checkpoint.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            provides=config.provides,
            kv_tokens=config.max_tokens,
            kv_block=config.tokens_per_block,
        )

    @property
    def pending(self) -> str:
        """How sessions are held: "kept" or "reuse", which is also what "kept" falls back to."""
        return "kept" if isinstance(self._compute, KeptSessions) else "reuse"

    def _choose(
        self, config: TensorRTLLMConfig, package: Any, contract: Contract, vocab_size: int, eos_token_id: int
    ) -> Compute:
        if config.pending == "kept":
            problems = mismatches(contract.kept)
            if config.tensor_parallel > 1:
                problems.append(f"tensor_parallel: got {config.tensor_parallel}; allowed with pending: kept: 1")
            if not problems:
                try:
                    return KeptSessions(self._llm, package, config, vocab_size)
                except (EngineError, AttributeError, TypeError) as error:
                    problems.append(str(error))
            what = "; ".join(problems)
            _log.warning("pending: reuse instead of kept with tensorrt_llm %s: %s", package.__version__, what)
        return BlockReuse(self._llm, package, config, vocab_size, eos_token_id)

    def capacity(self) -> Capacity:
        return self._capacity

    def open(self, session: SessionOpen) -> None:
        check_open(session, self._tokens, self._capacity)
        self._tokens[session.session] = []

    def step(self, batch: Sequence[SessionStep]) -> EngineOutput:
        pieces, errors = self._admit_all(batch)
        rows = self._compute.forward(pieces)
        return EngineOutput(rows.sessions, rows.logits, errors={**errors, **rows.errors})

    def run(self, batch: Sequence[SessionStep], steps: Sequence[int], decide: Decide) -> dict[int, str]:
        pieces, errors = self._admit_all(batch)
        allowed = {step.session: n for step, n in zip(batch, steps, strict=True)}
        room = self._capacity.context_tokens + 1  # the last token needs none in the KV
        limits = [1 if errors else min(allowed[p.session], room - len(p.token_ids)) for p in pieces]
        ran = self._compute.run(pieces, limits, decide)
        for session, token_ids in ran.went_on.items():
            self._tokens[session] += token_ids
        return {**errors, **ran.errors}

    def _admit_all(self, batch: Sequence[SessionStep]) -> tuple[list[Piece], dict[int, str]]:
        """Those that fit, and session -> why it doesn't."""
        pieces: list[Piece] = []
        errors: dict[int, str] = {}
        for step in batch:
            try:
                pieces.append(self._admit(step))
            except ValueError as error:
                errors[step.session] = str(error)
        return pieces, errors

    def _admit(self, step: SessionStep) -> Piece:
        """The session's sequence with the step's tokens, what was rejected dropped."""
        tokens = self._tokens.get(step.session)
        if tokens is None:
            raise ValueError(f"session {step.session} is not open")
        held = len(tokens)
        check_step(step, held, self._capacity)
        tokens[step.start :] = step.token_ids
        return Piece(step.session, tokens, step.start, held, step.sample)

    def free(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            if self._tokens.pop(session, None) is not None:
                self._compute.free(session)

    def close(self) -> None:
        self.free(list(self._tokens))
        self._llm.shutdown()
