# SPDX-License-Identifier: Apache-2.0
"""An engine and a router whose every answer a test writes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import Capacity, Engine, EngineError, EngineOutput
from routers import BaseRouter, RouterParams, StepResult

VOCAB = 16
EOS = 15


class FakeEngine(Engine):
    """The next token is the last one + 1 (EOS after 14), with one-hot logits; faults by the last token.

    steps: every batch it was given. freed: every session.
    """

    name = "fake"

    def __init__(self, provides: Sequence[str] = ("logits", "sampling"), max_sessions: int = 8) -> None:
        self.steps: list[list[SessionStep]] = []
        self.freed: list[int] = []
        self.nan_after: set[int] = set()
        self.error_after: set[int] = set()
        self.fail = False
        self._capacity = Capacity(max_sessions, 1000, 64, VOCAB, (EOS,), frozenset(provides))
        self._open: set[int] = set()

    def capacity(self) -> Capacity:
        return self._capacity

    def open(self, session: SessionOpen) -> None:
        if len(self._open) >= self._capacity.max_sessions:
            raise EngineError("full")
        self._open.add(session.session)

    def step(self, batch: Sequence[SessionStep]) -> EngineOutput:
        self.steps.append(list(batch))
        if self.fail:
            raise EngineError("the engine broke")
        errors = {s.session: "the session broke" for s in batch if s.token_ids[-1] in self.error_after}
        rows = [s for s in batch if s.sample and s.session not in errors]
        rows.reverse()  # an engine may order its rows as it likes
        logits = torch.zeros(len(rows), VOCAB)
        for r, step in enumerate(rows):
            logits[r, min(step.token_ids[-1] + 1, EOS)] = 9.0
            if step.token_ids[-1] in self.nan_after:
                logits[r, 0] = torch.nan
        return EngineOutput([s.session for s in rows], logits, errors=errors)

    def free(self, sessions: Sequence[int]) -> None:
        self.freed += sessions
        self._open -= set(sessions)

    def close(self) -> None:
        pass


class FakeParams(RouterParams):
    """leave_at: the token with which a request leaves."""

    per_request = frozenset({"leave_at"})

    leave_at: int = 99


class FakeRouter(BaseRouter[FakeParams]):
    """Leaves with `leave_at`, or does what `override` says. seen: every StepResult it got."""

    override: Callable[[StepResult], Any] | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[StepResult] = []

    def route(self, result: StepResult) -> torch.Tensor | list[int]:
        self.seen.append(result)
        for fields, token in zip(result.fields, result.token_ids, strict=True):
            fields["token"] = token
        if self.override is not None:
            answer: torch.Tensor | list[int] = self.override(result)
            return answer
        return (result.next_token_ids == result.param("leave_at")).long()
