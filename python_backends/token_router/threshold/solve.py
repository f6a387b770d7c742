# SPDX-License-Identifier: Apache-2.0
"""The best thresholds B* for N live requests: argmax of the Markov model's T(B) (paper, appendix D).

Every feasible B is solved exactly where that is affordable. Otherwise all are walked at random for a short while,
the better ones for longer (successive halving), and the last few solved exactly if they can be.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from python_backends.token_router.threshold.exact import Chain, TooLarge
from python_backends.token_router.threshold.network import Floats, Network, check_thresholds, stationary
from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.sampled import Walk
from python_backends.token_router.threshold.steady import Method, Steady

__all__ = ["Choice", "Estimate", "Solution", "evaluate", "feasible_thresholds", "solve"]

Thresholds = tuple[int, ...]
Choice = Literal["auto", "exact", "sampled"]

# Transitions; a million take one to three seconds.
_AFFORDABLE = {"all": 300_000, "finalists": 300_000, "one": 500_000}
_EXACT = 20_000_000  # when asked for; about a gigabyte

_LANES = 8192  # of all B together in a round, and at least the next number of each
_FIRST_LANES = 4
_TRANSITIONS = 80  # of a lane in a round
_STAGGER = 128
_FINALISTS = 6
_ONE_LANES = 1024  # of the walk of a single B
_ONE_ERROR = 5e-4  # of T, aimed at
_ONE_WINDOWS = (320, 2560)  # transitions of its lanes: the first window, the longest
_FINAL_WINDOWS = (160, 320)  # of those of the finalists
_SIGMAS = 2.0  # two estimates further apart than this differ
_MOST_CANDIDATES = 4096  # beyond it, a coarse grid of B first
_MOST_ENUMERATED = 1_000_000  # B, when asked for all of them


@dataclass(frozen=True)
class Estimate:
    """T(B) in tokens/s, its standard error (0 = exact), and how it was found."""

    throughput: float
    error: float
    method: Method


@dataclass(frozen=True)
class Solution:
    """The best B for `live` requests. throughput: T of every B looked at; steady: of the best."""

    live: int
    best: Thresholds
    throughput: dict[Thresholds, Estimate]
    steady: Steady


def feasible_thresholds(models: int, live: int) -> list[Thresholds]:
    """Every B with 1 <= B_i <= N and sum(B_i - 1) < N."""
    return _feasible(live, [range(1, live + 1)] * models)


def evaluate(
    profile: Profile,
    live: int,
    thresholds: Sequence[int],
    *,
    delta_ms: float | None = None,
    method: Choice = "auto",
    seed: int = 0,
) -> Steady:
    """The steady state of one B.

    delta_ms: the grid of step times; None = as fine as they need (`Network.of`). method "auto": exact where that
    takes a second or less, else sampled to about 0.05 % of T. Raises ValueError when an argument is out of range or B
    not feasible, TooLarge when "exact" is asked for and hopeless.
    """
    _check_method(method)
    b = check_thresholds(thresholds, len(profile.models), live)
    network = Network.of(profile, live, delta_ms)
    if method != "sampled":
        try:
            return Chain.search(network, [b], _EXACT if method == "exact" else _AFFORDABLE["one"]).steady()[0]
        except TooLarge:
            if method == "exact":
                raise
    return _walk_on(_start(network, [b], _ONE_LANES, seed, 4), *_ONE_WINDOWS).steady(0)


def solve(
    profile: Profile,
    live: int,
    *,
    delta_ms: float | None = None,
    method: Choice = "auto",
    seed: int = 0,
    candidates: Sequence[Sequence[int]] | None = None,
) -> Solution:
    """B* for `live` requests, of `candidates` (every feasible B when None). The same for the same seed. delta_ms: the
    grid of step times; None = as fine as they need (`Network.of`).

    Of two B whose T can't be told apart, the one with the smaller sum wins: it delays less. Raises ValueError when
    an argument is out of range or a candidate not feasible, TooLarge when "exact" is asked for and hopeless.
    """
    _check_method(method)
    models = len(profile.models)
    network = Network.of(profile, live, delta_ms)
    grid = list(range(1, live + 1))
    if candidates is not None:
        chosen = [check_thresholds(b, models, live) for b in candidates]
        if not chosen:
            raise ValueError("candidates: must be one B or more")
    elif method == "exact":
        if (many := _count_feasible(live, grid, models)) > _MOST_ENUMERATED:
            raise TooLarge(f"there are {many} feasible B, more than {_MOST_ENUMERATED}")
        chosen = feasible_thresholds(models, live)
    else:
        grid = _grid(models, live)
        chosen = _feasible(live, [grid] * models)
    if method == "exact" or (method == "auto" and len(grid) == live):
        try:
            steady = Chain.search(network, chosen, _EXACT if method == "exact" else _AFFORDABLE["all"]).steady()
            return _solution(live, {s.thresholds: s for s in steady}, {})
        except TooLarge:
            if method == "exact":
                raise
    return _search(network, chosen, grid, seed, finish_exactly=method == "auto", others=candidates is None)


def _check_method(method: str) -> None:
    if method not in get_args(Choice):
        raise ValueError(f"method: {method!r} must be one of {', '.join(get_args(Choice))}")


def _feasible(live: int, values: Sequence[Sequence[int]]) -> list[Thresholds]:
    found: list[Thresholds] = [()]
    for of_model in values:
        found = [(*b, x) for b in found for x in of_model if sum(b) - len(b) + x - 1 < live]
    return found


def _count_feasible(live: int, values: Sequence[int], models: int) -> int:
    """How many B `_feasible` would give for these values of each model."""
    step = np.zeros(live)
    step[np.array(values) - 1] = 1
    ways = np.eye(1, live)[0]  # by sum(B_i - 1)
    for _ in range(models):
        ways = np.convolve(ways, step)[:live]
    return round(float(ways.sum()))


def _grid(models: int, live: int) -> list[int]:
    """The values of B to begin with: all, or, when that makes too many B, ever fewer of the large ones."""
    values = list(range(1, live + 1))
    ratio = 1.0
    while _count_feasible(live, values, models) > _MOST_CANDIDATES and len(values) > 2:
        ratio += 0.125
        values, x = [], 1.0
        while x <= live:
            if round(x) not in values:
                values.append(round(x))
            x = max(x * ratio, x + 1)
    return values


def _search(
    network: Network, candidates: list[Thresholds], grid: list[int], seed: int, finish_exactly: bool, others: bool
) -> Solution:
    """Successive halving over the sampled chain; then between the values of a coarse grid; then the finalists.

    others: whether it may be another B than the candidates.
    """
    rough: dict[Thresholds, Estimate] = {}
    walk = _halve(_start(network, candidates, _lanes(len(candidates)), seed), rough)
    step = max(b - a for a, b in itertools.pairwise([*grid, network.live + 1]))
    while step > 1:
        step = (step + 1) // 2
        moves = [range(-step, step + 1, step)] * network.models
        near = {
            tuple(b + d for b, d in zip(at, by, strict=True))
            for at in walk.thresholds
            for by in itertools.product(*moves)
        }
        near = {b for b in near if min(b) >= 1 and sum(x - 1 for x in b) < network.live}
        seed += 1
        walk = _halve(_start(network, sorted(near), _lanes(len(near)), seed), rough)
    final = _affordable(network, walk.thresholds) if finish_exactly else {}
    if not final:
        walk = _walk_on(_with_lower(walk) if others else walk, *_FINAL_WINDOWS)
        final = {b: walk.steady(i) for i, b in enumerate(walk.thresholds)}
    return _solution(network.live, final, rough)


def _with_lower(walk: Walk) -> Walk:
    """The finalists, and the best of them with some or all of its B lowered to 1: perhaps no worse, and simpler."""
    best = int(walk.throughput()[0].argmax())
    lower = {b for b in itertools.product(*((1, x) for x in walk.thresholds[best])) if b not in walk.thresholds}
    which = [*range(len(walk.thresholds)), *[best] * len(lower)]
    walk = walk.keep(np.array(which), _ONE_LANES, [*walk.thresholds, *sorted(lower)])
    walk.stagger(_STAGGER)
    return walk


def _start(network: Network, candidates: Sequence[Thresholds], lanes: int, seed: int, times: int = 1) -> Walk:
    walk = Walk(network, candidates, lanes, seed)
    visits = stationary(network.routing)
    rarest = min(v for v in np.add.reduceat(visits, network.entry) if v > 0)
    # Some rounds of each request through the model that it visits least.
    walk.warm_up(times * int(min(500, max(40, 8 / rarest))))
    walk.stagger(times * _STAGGER)
    return walk


def _lanes(candidates: int) -> int:
    return min(_ONE_LANES, max(_FIRST_LANES, _LANES // candidates))


def _halve(walk: Walk, rough: dict[Thresholds, Estimate]) -> Walk:
    """Down to the finalists: in each round a quarter of the B, with four times the lanes."""
    while True:
        walk.walk(_TRANSITIONS, rates_only=True)
        rate, error = walk.throughput()
        for b, t, e in zip(walk.thresholds, rate, error, strict=True):
            rough[b] = Estimate(float(t), float(e), "sampled")
        if len(rate) <= _FINALISTS:
            return walk
        best = int(rate.argmax())
        plausible = rate + _SIGMAS * error >= rate[best] - _SIGMAS * error[best]
        keep = max(_FINALISTS, -(-len(rate) // 4))
        which = [i for i in np.argsort(-rate, kind="stable")[:keep] if plausible[i]]
        lanes = min(_ONE_LANES, walk.lanes * len(rate) // len(which))
        walk = walk.keep(np.sort(which), lanes)
        walk.stagger(_STAGGER)


def _walk_on(walk: Walk, transitions: int, most: int) -> Walk:
    """In windows of `transitions`, twice as many, and so on up to `most`, until one has the error aimed at and agrees
    with the one before; what counts is the last.

    Requests that begin together can stay together for very long, which only shows in a drift of T.
    """
    before: Floats | None = None
    while True:
        walk.walk(transitions)
        rate, error = walk.throughput()
        steady = before is not None and bool((abs(rate - before) <= _SIGMAS * 2**0.5 * error).all())
        transitions *= 2
        if transitions > most or (steady and bool((error <= _ONE_ERROR * rate).all())):
            return walk
        before = rate
        walk.forget()


def _affordable(network: Network, finalists: Sequence[Thresholds]) -> dict[Thresholds, Steady]:
    """The exact steady states of the finalists, when all can be had."""
    try:
        return {s.thresholds: s for s in Chain.search(network, finalists, _AFFORDABLE["finalists"]).steady()}
    except TooLarge:
        return {}


def _solution(live: int, final: dict[Thresholds, Steady], rough: dict[Thresholds, Estimate]) -> Solution:
    top = max(final.values(), key=lambda s: s.throughput)
    # Exact values that differ in their last digits only are the same too.
    same = [
        s
        for s in final.values()
        if top.throughput - s.throughput <= _SIGMAS * (top.error**2 + s.error**2) ** 0.5 + 1e-9 * top.throughput
    ]
    best = min(same, key=lambda s: (sum(s.thresholds), -s.throughput, s.thresholds))
    estimates = rough | {b: Estimate(s.throughput, s.error, s.method) for b, s in final.items()}
    return Solution(live, best.thresholds, dict(sorted(estimates.items())), best)
