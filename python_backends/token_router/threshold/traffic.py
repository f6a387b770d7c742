# SPDX-License-Identifier: Apache-2.0
"""What the traffic is, learnt from it while it passes: a `Profile`, kept from the steps and moves of requests.

The runtime's loops call it, and so does the simulator. A call costs microseconds; the work is in `profile`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.routing_rates import RoutingRow, RunLengths
from python_backends.token_router.threshold.step_times import StepTimes

__all__ = ["Traffic"]

_ENOUGH_OUTCOMES = 40  # of each model
_ENOUGH_STEPS = 10


class Traffic:
    """models: their names. clock: seconds, monotonic.

    Latencies are in the engine's own time (StepStats.compute_ms), so that what the runtime adds doesn't count.
    Everything is forgotten by observations, not by time: an idle night changes nothing, and neither does a reader,
    however often it reads. See `RoutingRow`, `RunLengths` and `StepTimes`.
    """

    def __init__(self, models: Sequence[str], clock: Callable[[], float]) -> None:
        n = len(models)
        self._models = list(models)
        self._clock = clock
        self._rows = [RoutingRow(n) for _ in models]
        self._runs = [RunLengths() for _ in models]
        self._times = [StepTimes(n - 1) for _ in models]
        self._others = [[j for j in range(n) if j != i] for i in range(n)]
        self._stays: list[dict[int, int]] = [{} for _ in models]  # by rid: steps of the present run so far
        # For how long a model was busy while another ran: seconds busy, before the present call; when that began.
        self._busy_s = [0.0] * n
        self._since: list[float | None] = [None] * n
        self._before = [[0.0] * n for _ in models]
        self.calls = [0] * n
        self.steps = [0] * n
        self.sessions = [0] * n  # summed over steps

    # From the decoding loops

    def launched(self, model: int) -> None:
        """A call begins."""
        now = self._since[model] = self._clock()
        before = self._before[model]
        for other in self._others[model]:
            before[other] = self._busy(other, now)

    def called(self, model: int, session_steps: int, more_tokens: int, ms: float, steps: int, prefilled: bool) -> None:
        """It has ended.

        steps: forward steps that it made, the first with the suffixes, the others with one token each (run-ahead).
        session_steps: sessions in them, summed over the steps. more_tokens: of the suffixes, beyond one each.
        ms: that the model spent on it.
        prefilled: whether one of the sessions was being prefilled; the time of such a call says nothing of others.
        """
        began, now = self._since[model], self._clock()
        self.over(model)
        if began is None or not session_steps or not steps:
            return
        self.calls[model] += 1
        self.steps[model] += steps
        self.sessions[model] += session_steps
        if prefilled:
            return
        before = self._before[model]
        whole = max(now - began, 1e-9)
        busy = [min(1.0, (self._busy(j, now) - before[j]) / whole) for j in self._others[model]]
        self._times[model].observe(round(session_steps / steps), more_tokens / steps, ms / steps, busy)

    def over(self, model: int) -> None:
        """The call has ended, and there may be nothing to learn from it: it failed, or nobody was in it."""
        began = self._since[model]
        if began is not None:
            self._busy_s[model] += self._clock() - began
            self._since[model] = None

    def stayed(self, model: int, rid: int, steps: int = 1) -> None:
        """Request `rid` has made this many steps at `model`, one token committed by each, and stays."""
        if not steps:
            return
        self._led(model, model, steps, steps)
        stays, runs = self._stays[model], self._runs[model]
        before = stays.get(rid, 0)
        stays[rid] = before + steps
        for step in range(before + 1, before + steps + 1):
            runs.observe(step, left=False)

    def left(self, model: int, rid: int, to: int, committed: int) -> None:
        """After one more step, request `rid` goes from `model` to model `to`, with `committed` tokens kept."""
        self._led(model, to, committed, 1)
        self._runs[model].observe(self._stays[model].pop(rid, 0) + 1, left=True)

    def finished(self, rid: int) -> None:
        """Request `rid` has ended, wherever it was."""
        for stays in self._stays:
            stays.pop(rid, None)

    # What is known

    def profile(self, largest: int) -> Profile | None:
        """What the traffic is now; None while a model has made too few steps to say. Reads only.

        largest: the number of requests that a batch may hold.
        """
        if any(row.observed < _ENOUGH_OUTCOMES for row in self._rows):
            return None
        if any(times.observed < _ENOUGH_STEPS for times in self._times):
            return None
        fits = [fit for times in self._times if (fit := times.fit(largest)) is not None]
        p = [row.p() for row in self._rows]
        lengths = [runs.distribution(1 / (1 - p[i][i])) if p[i][i] < 1 else None for i, runs in enumerate(self._runs)]
        slowdown = [[1.0] * len(p) for _ in p]
        for i, fit in enumerate(fits):
            for j, factor in zip(self._others[i], fit.slowdown, strict=True):
                slowdown[i][j] = factor
        return Profile(
            models=self._models,
            p=p,
            c=[row.c() for row in self._rows],
            latency=[fit.latency for fit in fits],
            run_lengths=lengths if any(lengths) else None,
            slowdown=slowdown if any(x > 1 for row in slowdown for x in row) else None,
            source={"measured": "live traffic", "outcomes": [round(row.observed) for row in self._rows]},
        )

    def moves(self) -> list[list[int]]:
        """Since the start: [i][j] = steps at model i after which a request was at model j."""
        return [list(row.outcomes) for row in self._rows]

    def counts(self) -> dict[str, Any]:
        """Since the start, nothing forgotten. outcomes[i][j]: steps at model i after which a request was at
        model j; tokens[i][j]: committed by them. calls, steps; sessions: summed over the steps."""
        return {
            "outcomes": self.moves(),
            "tokens": [list(row.tokens) for row in self._rows],
            "calls": list(self.calls),
            "steps": list(self.steps),
            "sessions": list(self.sessions),
        }

    def _led(self, model: int, to: int, committed: int, steps: int) -> None:
        """So many steps, after which a request is at model `to`."""
        if self._rows[model].observe(to, committed, steps):
            self._runs[model].forget()

    def _busy(self, model: int, now: float) -> float:
        since = self._since[model]
        return self._busy_s[model] + (now - since if since is not None else 0.0)
