# SPDX-License-Identifier: Apache-2.0
"""A Profile as the arrays that the Markov chain runs on: classes of requests, their routing, step lengths on a grid.

A class belongs to one model. The paper's case (appendix D) has one class for each model; a run length that is
not geometric makes its model's requests pass through several classes, its phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from python_backends.token_router.threshold.profile import Profile

__all__ = [
    "MAX_MODELS",
    "MAX_PHASES",
    "PHASE_TOLERANCE",
    "Network",
    "Phases",
    "check_thresholds",
    "fit_phases",
    "stationary",
]

# What a few thousand measured runs can't tell apart anyway.
PHASE_TOLERANCE = 0.01
MAX_PHASES = 64

MAX_MODELS = 8  # the work grows with 3 to the power of it
_LONGEST = 1 << 40  # of a step, in units of the grid

_GRIDS_MS = tuple(1 / (n * 10.0**k) for k in range(6) for n in (10, 20, 50))  # 0.1, 0.05, 0.02, ... 2e-7
_ROUNDING = 0.005  # of a step time, at most

_SQUARINGS = 40

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Phases:
    """A run length as phases: the n-th step of a run is its last with probability hazards[n - 1], and in the
    last phase a request stays until it leaves. distance: total variation to the distribution given."""

    hazards: tuple[float, ...]
    distance: float


def fit_phases(lengths: Sequence[float], tolerance: float = PHASE_TOLERANCE, most: int = MAX_PHASES) -> Phases:
    """The fewest phases (at most `most`) within `tolerance` (total variation) of a run-length distribution.

    The first phases have the distribution's own hazards; the last one stands for the rest, with its mean. So the
    mean is kept exactly whatever the number of phases. lengths[n - 1] = probability of n steps.
    """
    pmf = np.trim_zeros(np.asarray(lengths, dtype=float), "b")
    pmf = pmf / pmf.sum()
    reaches = np.cumsum(pmf[::-1])[::-1]  # P(length >= n)
    more = np.cumsum(reaches[::-1])[::-1] / reaches  # mean steps left, this one included
    for n in range(1, min(len(pmf), most) + 1):
        last = min(1.0, 1 / more[n - 1])
        tail = reaches[n - 1] * last * (1 - last) ** np.arange(len(pmf) - n + 1)
        # Half of: the difference over the support, and the fit's mass past it.
        distance = (np.abs(tail - pmf[n - 1 :]).sum() + max(0.0, reaches[n - 1] - tail.sum())) / 2
        if distance <= tolerance or n == min(len(pmf), most):
            break
    hazards = [float(h) for h in pmf[: n - 1] / reaches[: n - 1]]
    return Phases((*hazards, float(last)), float(distance))


def check_thresholds(thresholds: Sequence[int], models: int, live: int) -> tuple[int, ...]:
    """The thresholds, if they are feasible: 1 <= B_i <= N and sum(B_i - 1) < N (paper, appendix D).

    Raises ValueError otherwise: all `live` requests could wait for ever.
    """
    if live < 1:
        raise ValueError(f"live: {live} must be 1 or more")
    b = tuple(int(x) for x in thresholds)
    if len(b) != models:
        raise ValueError(f"thresholds: {list(b)} has {len(b)} numbers; must be one for each of {models} models")
    if any(not 1 <= x <= live for x in b) or sum(x - 1 for x in b) >= live:
        raise ValueError(
            f"thresholds: {list(b)} must be from 1 to N = {live} each, and the sum of (B - 1) less than N,"
            " or all requests could wait for ever"
        )
    return b


@dataclass(frozen=True)
class Network:
    """C classes of requests over M models, N requests, step lengths in units of delta_ms.

    model_of: (C,), the class's model. entry: (M,), the class in which a request comes to a model.
    routing: (C, C), where a request of a class is after its step. tokens: (C,), committed by it, mean.
    base_ms: (M, N + 1), a step's length by its number of sessions, with one token each.
    extra_ms: (C,), what a session of the class adds for the suffix beyond its first token, on average.
    slowdown: (2^M, M), the factor on model i's step while the models of the bit mask are busy.
    rounding: the largest relative change of a step time by the grid.
    phase_distance: the largest total variation between a run-length distribution given and its phases.
    """

    models: int
    live: int
    delta_ms: float
    model_of: Ints
    entry: Ints
    routing: Floats
    tokens: Floats
    base_ms: Floats
    extra_ms: Floats
    slowdown: Floats
    rounding: float
    phase_distance: float

    @classmethod
    def of(cls, profile: Profile, live: int, delta_ms: float | None = None) -> Network:
        """delta_ms: None = the coarsest of 0.1, 0.05, 0.02, ... ms that changes no step time by more than 0.5 %.

        Raises ValueError when live or delta_ms is out of range, or there are too many models.
        """
        if live < 1:
            raise ValueError(f"live: {live} must be 1 or more")
        if delta_ms is not None and not (delta_ms > 0 and math.isfinite(delta_ms)):
            raise ValueError(f"delta_ms: {delta_ms} must be more than 0")
        models = len(profile.models)
        if models > MAX_MODELS:
            raise ValueError(f"models: {models} of them; the Markov model takes at most {MAX_MODELS}")
        phases = [
            fit_phases(lengths) if lengths is not None else Phases((1 - profile.p[i][i],), 0.0)
            for i, lengths in enumerate(profile.run_lengths or [None] * models)
        ]
        sizes = [len(x.hazards) for x in phases]
        entry = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        model_of = np.repeat(np.arange(models), sizes)
        routing, tokens = _routing(profile, phases, entry)
        base_ms = np.array([[lat.ms(b) for b in range(live + 1)] for lat in profile.latency])
        token_ms = np.array([lat.token_ms for lat in profile.latency])
        extra_ms = _extra_tokens(routing, tokens, model_of) * token_ms[model_of]
        longest_ms = float(base_ms.max()) + live * float(extra_ms.max())
        steps = _steps_of(base_ms, extra_ms, model_of)
        if delta_ms is None:
            delta_ms = _grid_for(steps, longest_ms)
        if longest_ms / delta_ms > _LONGEST:
            raise ValueError(f"delta_ms: {delta_ms:g} is too fine a grid for a step of {longest_ms:g} ms")
        return cls(
            models=models,
            live=live,
            delta_ms=delta_ms,
            model_of=model_of,
            entry=entry,
            routing=routing,
            tokens=tokens,
            base_ms=base_ms,
            extra_ms=extra_ms,
            slowdown=np.array(
                [
                    [
                        profile.slowdown_of(i, [j for j in range(models) if j != i and mask >> j & 1])
                        for i in range(models)
                    ]
                    for mask in range(1 << models)
                ]
            ),
            rounding=_rounding(steps, delta_ms),
            phase_distance=max(x.distance for x in phases),
        )

    @property
    def classes(self) -> int:
        return len(self.model_of)

    @cached_property
    def slows(self) -> bool:
        """Whether any model slows another."""
        return bool((self.slowdown != 1).any())

    @cached_property
    def of_model(self) -> list[slice]:
        """Each model's classes, which are neighbours."""
        ends = [*self.entry[1:], self.classes]
        return [slice(int(a), int(b)) for a, b in zip(self.entry, ends, strict=True)]

    @cached_property
    def _grid(self) -> Ints:
        return self._on_grid(self.base_ms)

    def duration(self, model: int, batch: Ints, counts: Ints) -> Ints:
        """A step's length on the grid, d_i (at least 1). batch: (n,), sessions; counts: (classes of the model, n)."""
        extra = self.extra_ms[self.of_model[model]]
        if not extra.any():
            return np.asarray(self._grid[model, batch])
        return self._on_grid(self.base_ms[model, batch] + (extra[:, None] * counts).sum(axis=0))

    def _on_grid(self, ms: Floats) -> Ints:
        return np.asarray(np.maximum(1, np.rint(ms / self.delta_ms)), dtype=np.int64)

    def longest(self) -> int:
        """No step is longer than this, on the grid."""
        extra = np.zeros(self.models)
        np.maximum.at(extra, self.model_of, self.extra_ms)
        return int(np.rint((self.base_ms.max(axis=1) + extra * self.live).max() / self.delta_ms)) + 1


def _steps_of(base_ms: Floats, extra_ms: Floats, model_of: Ints) -> list[tuple[Floats, bool]]:
    """Each model's step times by the batch, 1 to N, and whether there are no others: where classes bring suffixes of
    different lengths, they are the shortest."""
    batch = np.arange(1, base_ms.shape[1])
    found = []
    for i, base in enumerate(base_ms[:, 1:]):
        extra = extra_ms[model_of == i]
        found.append((base + batch * extra.min(), bool(extra.min() == extra.max())))
    return found


def _rounding(steps: list[tuple[Floats, bool]], delta_ms: float) -> float:
    """The largest relative change of a step time by the grid; the most that it can be where not all are known."""
    worst = 0.0
    for ms, all_of_them in steps:
        off = np.abs(np.maximum(1, np.rint(ms / delta_ms)) * delta_ms - ms)
        if not all_of_them:
            off = np.maximum(off, delta_ms / 2)
        worst = max(worst, float((off / ms).max()))
    return worst


def _grid_for(steps: list[tuple[Floats, bool]], longest_ms: float) -> float:
    """The coarsest grid that is fine enough; the finest that the longest step allows where none is. It may be as fine
    as it likes: that makes more states, but the search for the exact chain gives up at a number of transitions."""
    possible = [delta_ms for delta_ms in _GRIDS_MS if longest_ms / delta_ms <= _LONGEST]
    if not possible:
        return _GRIDS_MS[0]
    return next((delta_ms for delta_ms in possible if _rounding(steps, delta_ms) <= _ROUNDING), possible[-1])


def _routing(profile: Profile, phases: list[Phases], entry: Ints) -> tuple[Floats, Floats]:
    classes = sum(len(x.hazards) for x in phases)
    routing, tokens = np.zeros((classes, classes)), np.zeros(classes)
    for i, (p, c) in enumerate(zip(profile.p, profile.c, strict=True)):
        leaves = sum(x for j, x in enumerate(p) if j != i)
        for n, hazard in enumerate(phases[i].hazards):
            at = entry[i] + n
            stays_in = entry[i] + min(n + 1, len(phases[i].hazards) - 1)
            routing[at, stays_in] += 1 - hazard
            tokens[at] += (1 - hazard) * c[i]
            for j, x in enumerate(p):
                if j != i and leaves > 0:
                    routing[at, entry[j]] += hazard * x / leaves
                    tokens[at] += hazard * x / leaves * c[j]
    return routing / routing.sum(axis=1, keepdims=True), tokens


def _extra_tokens(routing: Floats, tokens: Floats, model_of: Ints) -> Floats:
    """The mean suffix of a class's session beyond its first token.

    Every committed token is fed to every model once. So the steps at model i bring, per request and unit of time,
    what all models commit; the rest over one token a step is brought by those who come from another model.
    """
    visits = stationary(routing)
    committed = float(visits @ tokens)
    from_elsewhere = np.where(model_of[:, None] != model_of[None, :], visits[:, None] * routing, 0).sum(axis=0)
    extra = np.zeros(len(model_of))
    for i in range(int(model_of.max()) + 1):
        mine = model_of == i
        comes = from_elsewhere[mine].sum()
        if comes > 0:
            share = max(0.0, committed - visits[mine].sum()) / comes
            extra[mine] = share * np.divide(
                from_elsewhere[mine], visits[mine], out=np.zeros(int(mine.sum())), where=visits[mine] > 0
            )
    return extra


def stationary(routing: Floats) -> Floats:
    """How a request's steps divide between the classes: v R = v, sum 1, starting from class 0."""
    n = len(routing)
    # A power of the lazy chain: right even when the chain is periodic or has classes that it leaves for ever.
    power = (routing + np.eye(n)) / 2
    for _ in range(_SQUARINGS):
        power = power @ power
        power /= power.sum(axis=1, keepdims=True)
    return np.asarray(power[0])
