# SPDX-License-Identifier: Apache-2.0
"""What every engine checks of a new session, and of one session's part of a step, before it touches any KV."""

from __future__ import annotations

from collections.abc import Collection

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import Capacity, EngineError

__all__ = ["check_open", "check_step"]


def check_open(opened: SessionOpen, held: Collection[int], capacity: Capacity) -> None:
    """held: the sessions open now. Raises as `Engine.open`."""
    if opened.session in held:
        raise ValueError(f"session {opened.session} is open already")
    if len(held) >= capacity.max_sessions:
        raise EngineError(f"max_sessions = {capacity.max_sessions} sessions are held already")


def check_step(step: SessionStep, held_tokens: int, capacity: Capacity) -> None:
    """Raises ValueError naming the field when the step doesn't fit a session that holds `held_tokens`."""
    token_ids = step.token_ids
    if not token_ids:
        raise ValueError("token_ids: is empty; a step brings at least one token")
    if not 0 <= step.start <= held_tokens:
        raise ValueError(f"start: {step.start} is not a position of the session; allowed: 0 to {held_tokens}")
    if min(token_ids) < 0 or max(token_ids) >= capacity.vocab_size:
        wrong = next(t for t in token_ids if not 0 <= t < capacity.vocab_size)
        raise ValueError(f"token_ids: {wrong} is not a token; allowed: 0 to {capacity.vocab_size - 1}")
    if (length := step.start + len(token_ids)) > capacity.context_tokens:
        raise ValueError(f"token_ids: would make the sequence {length} tokens long; at most {capacity.context_tokens}")
