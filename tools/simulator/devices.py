# SPDX-License-Identifier: Apache-2.0
"""How long the models' steps take, alone and beside each other."""

from __future__ import annotations

import functools
from collections.abc import Callable

from python_backends.token_router.threshold.profile import Profile
from tools.simulator.events import EventQueue, Priority, nanoseconds

__all__ = ["Devices"]


class Devices:
    """Runs the steps. completed: called with a model's number when its step has ended.

    busy, started (ns): by model. Where models slow each other, a step is work (ns alone) that progresses at
    1 / slowdown, and its end moves whenever another model starts or ends.
    """

    def __init__(self, profile: Profile, events: EventQueue, completed: Callable[[int], None]) -> None:
        models = range(len(profile.models))
        self._profile = profile
        self._events = events
        self._ends = [functools.partial(self._end, model) for model in models]
        self._completed = completed
        self._steps: list[dict[int, int]] = [{} for _ in models]
        self.busy = [False for _ in models]
        self.started = [0 for _ in models]
        self._shared = profile.slowdown is not None
        self._moved = False  # whether a model has started or ended since the last `settle`
        self._work = [0.0 for _ in models]  # left of each step at `_since`
        self._since = [0 for _ in models]
        self._factor: list[float | None] = [None for _ in models]
        self._event = [0 for _ in models]

    def start(self, model: int, sessions: int, more_tokens: int) -> None:
        """A step of `model`, whose suffixes have `more_tokens` beyond one each, together."""
        steps = self._steps[model]
        took = steps.get(sessions)
        if took is None:
            took = steps[sessions] = max(1, nanoseconds(self._profile.latency[model].ms(sessions)))
        if more_tokens:
            took += nanoseconds(self._profile.latency[model].token_ms * more_tokens)
        self.busy[model] = True
        self.started[model] = self._events.now
        if self._shared:
            self._moved = True
            self._work[model] = took
            self._since[model] = self._events.now
            self._factor[model] = None
        else:
            self._events.push(self._events.now + took, Priority.COMPLETION, self._ends[model])

    def settle(self) -> None:
        """Called when all launches of an instant are made: who is busy is known now."""
        if self._moved:
            self._moved = False
            self._repace()

    def _repace(self) -> None:
        now = self._events.now
        busy = [model for model, runs in enumerate(self.busy) if runs]
        for model in busy:
            factor, former = self._profile.slowdown_of(model, busy), self._factor[model]
            if factor == former:
                continue
            if former is not None:
                self._events.cancel(self._event[model])
                self._work[model] -= (now - self._since[model]) / former
            self._factor[model] = factor
            self._since[model] = now
            ends = now + max(1, round(self._work[model] * factor))
            self._event[model] = self._events.push(ends, Priority.COMPLETION, self._ends[model])

    def _end(self, model: int) -> None:
        self.busy[model] = False
        self._moved = self._shared
        self._completed(model)
