# SPDX-License-Identifier: Apache-2.0
"""What a model's steps cost beside its engine, measured all the time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from python_backends.llm.contract import StepStats

__all__ = ["StepClock", "overhead_ms"]

_KEPT = 2048  # calls
_RATIO = 1.02  # of neighbouring bins
_LEAST_MS = 0.001


class StepClock:
    """The runtime's part of each step: from the end of one call to the end of the next, less the engine's
    time, for each step of the call. A call before which the loop had nothing to do doesn't count.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: float | None = None
        self._overheads_ms: deque[float] = deque(maxlen=_KEPT)
        self._bins: Counter[int] = Counter()
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
            overhead_ms = ((now - self._ended) * 1000 - stats.engine_ms) / stats.steps
            self._overheads_ms.append(overhead_ms)
            self._bins[round(math.log(max(overhead_ms, _LEAST_MS), _RATIO))] += 1
        self._ended = now
        self.steps += stats.steps
        self.engine_ms += stats.engine_ms
        self.compute_ms += stats.compute_ms

    def summary(self) -> dict[str, Any]:
        """steps, engine_ms, compute_ms (sampling and routing included): since the start.
        overhead_ms_p50, _p95: of a step, over the last calls; None before there are enough. overhead_calls: since the
        start, how many calls by what a step of theirs cost, for `overhead_ms`."""
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
            "overhead_calls": {str(n): calls for n, calls in sorted(self._bins.items())},
        }


def overhead_ms(before: Mapping[str, int], after: Mapping[str, int], share: float) -> float | None:
    """The cost of a step, to 1 %, that this share of the calls between two summaries stayed within, by their
    `overhead_calls`; None = there were no two of them."""
    calls = {int(n): count - before.get(n, 0) for n, count in after.items()}
    total = sum(calls.values())
    if total < 2:
        return None
    bins = sorted(calls)
    within = itertools.accumulate(calls[n] for n in bins)
    return next(_RATIO**n for n, count in zip(bins, within, strict=True) if count >= share * total)
