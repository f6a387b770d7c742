# SPDX-License-Identifier: Apache-2.0
"""`batching: auto`, the decisions: what to solve when, and which B to apply. It has no clock and starts nothing,
so the simulator runs it as the runtime does."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from python_backends.token_router.delayed_batching import feasible
from python_backends.token_router.threshold.profile import Profile

__all__ = ["Answer", "Question", "ThresholdController"]

_log = logging.getLogger("token_router.auto")

_GAIN = 0.01  # of throughput, predicted: a smaller one doesn't change B
_LATENCY_MOVED = 0.05
_TOKENS_MOVED = 0.05
_RUNS_MOVED = 0.1
_REMEMBERED = 8  # values of N that are kept up to date, besides the present one


@dataclass(frozen=True)
class Question:
    """Which B is best for `live` requests under this traffic? applied: the present one, to compare it with."""

    live: int
    profile: Profile
    applied: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """best: B by model. throughput: tokens/s by B, of the one applied and of every other that was
    looked at. method: how it was found."""

    best: tuple[int, ...]
    throughput: Mapping[tuple[int, ...], float]
    method: str = ""


@dataclass
class _Solved:
    """What is applied for one N, and what that rests on. throughput: predicted, with the B applied."""

    profile: Profile
    thresholds: tuple[int, ...]
    throughput: float = 0.0
    method: str = ""


@dataclass
class ThresholdController:
    """B by N (`at`), as the last solutions say.

    models: how many. An N without a solution has B = 1 everywhere. B changes only when the solution predicts a gain
    of more than 1 % over the B applied, so that noise in the estimates doesn't make it flap; and never to one that
    could leave every request waiting (`feasible`).
    """

    models: int
    solves: int = 0
    failures: int = 0
    changes: int = 0
    _solved: dict[int, _Solved] = field(default_factory=dict)
    _seen: dict[int, None] = field(default_factory=dict)  # values of N, the latest last

    def at(self, live: int) -> tuple[int, ...]:
        """B of every model for `live` requests (scheduling.ThresholdTable)."""
        if live:
            self._seen.pop(live, None)
            self._seen[live] = None
        return self._applied(live)

    def question(self, profile: Profile) -> Question | None:
        """What is to be solved next: an N that never was, then one whose traffic has moved, the latest first; None =
        all that matters has been solved, for this traffic."""
        recent = list(self._seen)[: -_REMEMBERED - 2 : -1]
        unsolved = [live for live in recent if live not in self._solved]
        moved = (live for live in recent if live in self._solved and _moved(self._solved[live].profile, profile, live))
        for live in (*unsolved, *moved):
            return Question(live, profile, self._applied(live))
        return None

    def answered(self, question: Question, answer: Answer) -> bool:
        """Take a solution. Whether it changed B."""
        self.solves += 1
        live = question.live
        old = self._applied(live)
        if feasible(answer.best, live) != answer.best:
            _log.error("N = %d: the solver's B = %s is infeasible; B stays %s", live, answer.best, old)
            self._solved[live] = _Solved(question.profile, old)
            return False
        best, applied = answer.throughput[answer.best], answer.throughput.get(old, 0.0)
        better = best > (1 + _GAIN) * applied
        new = answer.best if better else old
        self._solved[live] = _Solved(question.profile, new, answer.throughput[new], answer.method)
        if new == old:
            return False
        self.changes += 1
        gain = f"{best / applied - 1:+.1%}" if applied > 0 else "unknown"
        _log.info(
            "N = %d: B %s -> %s, predicted %.1f tokens/s (%s) for %s",
            live,
            _commas(old),
            _commas(new),
            best,
            gain,
            _describe(question.profile, live),
        )
        return True

    def failed(self) -> None:
        """A question got no answer; it is asked again."""
        self.failures += 1

    def predicted(self, live: int) -> float | None:
        """Tokens/s for `live` requests with the B applied; None = not solved."""
        solved = self._solved.get(live)
        return solved.throughput if solved is not None else None

    def _applied(self, live: int) -> tuple[int, ...]:
        solved = self._solved.get(live)
        return solved.thresholds if solved is not None else (1,) * self.models

    def status(self) -> dict[str, Any]:
        """thresholds: by N, what is applied; predicted: tokens/s with it; method: of the solution."""
        rows = sorted(self._solved.items())
        return {
            "solves": self.solves,
            "failures": self.failures,
            "changes": self.changes,
            "thresholds": {str(n): list(s.thresholds) for n, s in rows},
            "predicted": {str(n): s.throughput for n, s in rows},
            "method": {str(n): s.method for n, s in rows},
        }


def _moved(old: Profile, new: Profile, live: int) -> bool:
    """Whether the traffic has changed so much that B may be another."""
    pairs = [(i, j) for i in range(len(old.models)) for j in range(len(old.models))]
    if any(_apart_rates(old.p[i][j], new.p[i][j]) for i, j in pairs):
        return True
    # tokens count by how often the way is taken
    if any(abs(old.c[i][j] - new.c[i][j]) * new.p[i][j] > _TOKENS_MOVED for i, j in pairs):
        return True
    for a, b in zip(old.latency, new.latency, strict=True):
        sizes = {1, (1 + live) // 2, live}
        if any(_apart(a.ms(n), b.ms(n)) or _apart(a.ms(n, n), b.ms(n, n)) for n in sizes):
            return True
    if any(_apart(old.slowdown_of(i, [j]), new.slowdown_of(i, [j])) for i, j in pairs):
        return True
    lengths = [profile.run_lengths or [None] * len(profile.models) for profile in (old, new)]
    return any(_apart_runs(a, b) for a, b in zip(*lengths, strict=True))


def _apart_rates(a: float, b: float) -> bool:
    """In units of what one outcome tells, so that rare moves count too."""
    return abs(a - b) > 0.002 + 0.08 * math.sqrt(a * (1 - a))


def _apart(a: float, b: float) -> bool:
    return abs(a - b) > _LATENCY_MOVED * a


def _apart_runs(a: list[float] | None, b: list[float] | None) -> bool:
    if a is None or b is None:
        return a is not b
    longest = max(len(a), len(b))
    a, b = (x + [0.0] * (longest - len(x)) for x in (a, b))
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2 > _RUNS_MOVED


def _commas(thresholds: tuple[int, ...]) -> str:
    return ",".join(map(str, thresholds))


def _describe(profile: Profile, live: int) -> str:
    rows = "; ".join(" ".join(f"{x:.3f}" for x in row) for row in profile.p)
    times = ", ".join(f"{latency.ms(1):.2f} to {latency.ms(live):.2f}" for latency in profile.latency)
    return f"P = {rows}; L = {times} ms (1 to {live} requests)"
