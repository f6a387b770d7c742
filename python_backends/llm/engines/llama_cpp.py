# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as an engine: a session is one of its sequences, and keeps its KV until it is freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from python_backends.llm.catalog import locate_weights, weights_name
from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import Capacity, Engine, EngineError, EngineOutput
from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.engines.embedding_rows import EmbeddingRows
from python_backends.llm.engines.llama_calls import Call, Piece, deterministic_calls, mixed_calls
from python_backends.llm.engines.llama_context import LlamaContext
from python_backends.llm.engines.step_check import check_open, check_step

__all__ = ["LlamaCppEngine"]


@dataclass
class _Sequence:
    """A session's place in the KV. decode_from: the position of the prompt's last token, from which on
    tokens are decoded together with other sessions'."""

    slot: int
    decode_from: int
    held_tokens: int = 0


class LlamaCppEngine(Engine):
    """See the module.

    With `LlamaCppConfig.deterministic`, and weights in Q4_0 or Q8_0 on the CPU, a session's logits are the
    same bits whoever else is served (`llama_calls`). It costs nothing where every session brings one token,
    and up to a third more time where suffixes are of many lengths, because llama.cpp then computes tokens
    together only for sessions of equal lengths in neighbouring slots (docs/decisions/0003 has figures, and
    perf/determinism.py measures them). Without it, prompts and tokens are mixed freely.

    hidden_states: whether steps return them. The tokens whose hidden states are wanted then take a call of
    their own: no cost where every session brings one token.
    Raises WeightsError when the weights aren't there, EngineError when they can't be loaded.
    """

    name: ClassVar[str] = "llama_cpp"

    def __init__(self, config: LlamaCppConfig, hidden_states: bool = False) -> None:
        self._config = config
        self._hidden_states = hidden_states
        path = locate_weights(config.weights)
        self.weights = weights_name(config.weights)
        self._context = LlamaContext(path, config)
        self._embedding = EmbeddingRows(path)
        self._sequences: dict[int, _Sequence] = {}
        self._free_slots = list(range(config.max_sessions))[::-1]
        self._capacity = Capacity(
            max_sessions=config.max_sessions,
            context_tokens=config.context_tokens,
            prefill_chunk=config.prefill_chunk,
            vocab_size=self._context.vocab_size,
            eos_token_ids=self._context.eos_token_ids,
            provides=config.provides if hidden_states else config.provides - {"hidden_states"},
            hidden_size=self._context.hidden_size if hidden_states else None,
            kv_tokens=config.kv_tokens,
        )

    def capacity(self) -> Capacity:
        return self._capacity

    def open(self, session: SessionOpen) -> None:
        check_open(session, self._sequences, self._capacity)
        self._sequences[session.session] = _Sequence(self._free_slots.pop(), session.prompt_tokens - 1)

    def step(self, batch: Sequence[SessionStep]) -> EngineOutput:
        errors: dict[int, str] = {}
        suffixes = []
        for step in batch:
            try:
                suffixes.append(self._admit(step))
            except ValueError as error:
                errors[step.session] = str(error)
        # with a KV buffer for each session, llama.cpp batches only sequences of consecutive, rising numbers
        suffixes.sort(key=lambda s: s[0].slot)
        sessions = {self._sequences[s.session].slot: s.session for s in batch if s.session not in errors}
        return self._compute(self._plan(suffixes), sessions, errors)

    def _admit(self, step: SessionStep) -> tuple[Piece, int]:
        """The session's new tokens, its rejected ones dropped, and where its decode region begins."""
        sequence = self._sequences.get(step.session)
        if sequence is None:
            raise ValueError(f"session {step.session} is not open")
        check_step(step, sequence.held_tokens, self._capacity)
        if step.start < sequence.held_tokens:
            self._context.truncate(sequence.slot, step.start)
        sequence.held_tokens = step.start + len(step.token_ids)
        return Piece(sequence.slot, step.start, step.token_ids, step.sample), sequence.decode_from

    def _plan(self, suffixes: Sequence[tuple[Piece, int]]) -> list[Call]:
        if self._config.deterministic:
            return deterministic_calls(suffixes, self._config.prefill_chunk, self._hidden_states)
        return mixed_calls([piece for piece, _ in suffixes], self._hidden_states)

    def _compute(self, calls: Sequence[Call], sessions: dict[int, int], errors: dict[int, str]) -> EngineOutput:
        """Make the calls and gather their outputs. sessions: by slot. errors: those found already."""
        wanted = sum(piece.output for call in calls for piece in call.pieces)
        logits = torch.empty(wanted, self._context.vocab_size)
        hidden = torch.empty(wanted, self._context.hidden_size) if self._hidden_states else None
        done: list[int] = []
        for call in calls:
            pieces = [p for p in call.pieces if sessions[p.slot] not in errors]
            if not pieces:
                continue
            try:
                rows = self._context.decode(call._replace(pieces=pieces))
            except EngineError as error:
                errors.update({sessions[p.slot]: str(error) for p in pieces})
                continue
            for row, session in zip(rows, (sessions[p.slot] for p in pieces if p.output), strict=True):
                self._context.read_logits(row, logits[len(done)])
                if hidden is not None:
                    self._context.read_hidden_state(row, hidden[len(done)])
                done.append(session)
        return EngineOutput(done, logits[: len(done)], None if hidden is None else hidden[: len(done)], errors=errors)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(token_ids)

    def token_bytes(self, token: int) -> bytes:
        return self._context.token_bytes(token)

    def free(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            sequence = self._sequences.pop(session, None)
            if sequence is not None:
                self._context.truncate(sequence.slot, 0)
                self._free_slots.append(sequence.slot)

    def close(self) -> None:
        self._context.close()
