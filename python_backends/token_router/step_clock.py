# SPDX-License-Identifier: Apache-2.0
"""What a model's steps cost beside its engine, measured all the time."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from python_backends.llm.contract import StepStats

__all__ = ["StepClock"]

_KEPT = 2048  # calls


class StepClock:
    """The runtime's part of each step: from the end of one call to the end of the next, less the engine's
    time, for each step of the call. A call before which the loop had nothing to do doesn't count.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: float | None = None
        self._overheads_ms: deque[float] = deque(maxlen=_KEPT)
        self.steps = 0
        self.engine_ms = 0.0
        self.compute_ms = 0.0

    def idle(self) -> None:
        """The loop waits for work."""
        self._ended = None

    def called(self, stats: StepStats) -> None:
        """A call has ended."""
        now = self._clock()
        if self._ended is not None and stats.steps:
            self._overheads_ms.append(((now - self._ended) * 1000 - stats.engine_ms) / stats.steps)
        self._ended = now
        self.steps += stats.steps
        self.engine_ms += stats.engine_ms
        self.compute_ms += stats.compute_ms

    def summary(self) -> dict[str, float | int | None]:
        """steps, engine_ms, compute_ms (sampling and routing included): since the start.
        overhead_ms_p50, _p95: of a step, over the last calls; None before there are enough."""
        p50 = p95 = None
        if len(self._overheads_ms) > 1:
            p50 = statistics.median(self._overheads_ms)
            p95 = statistics.quantiles(self._overheads_ms, n=20)[-1]
        return {
            "steps": self.steps,
            "engine_ms": self.engine_ms,
            "compute_ms": self.compute_ms,
            "overhead_ms_p50": p50,
            "overhead_ms_p95": p95,
        }
