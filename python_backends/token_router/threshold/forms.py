# SPDX-License-Identifier: Apache-2.0
"""P and C of each routing algorithm, as functions of its measured rates (paper, table 1 and appendix D).

P[i][j] = probability that a request goes to model j after a step at model i; C[i][j] = tokens that such a step
commits. Model 0 is the small one, where a request begins; model 1 the large one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["ALGORITHMS", "Form", "citer", "co_llm", "form", "me", "r2r", "random", "rstitch", "single"]


class Form(NamedTuple):
    """P and C, M x M."""

    p: list[list[float]]
    c: list[list[float]]


def r2r(p: float) -> Form:
    """The small model's token is dropped with probability p, and the large one makes one in its place."""
    _check_rate("p", p)
    return Form([[1 - p, p], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]])


def citer(p: float) -> Form:
    """As r2r: p = share of the small model's tokens with a confidence below tau."""
    return r2r(p)


def co_llm(p: float) -> Form:
    """As r2r: p = share of the small model's tokens whose deferral probability is above eta."""
    return r2r(p)


def random(p: float) -> Form:
    """As r2r, decided by a coin."""
    return r2r(p)


def rstitch(p: float, q: float) -> Form:
    """p = share of the small model's tokens that are dropped for their entropy; q = share of the large one's
    tokens after which it hands back. The large one keeps every token, the last of a run too.

    q is above 0, or a request would never come back.
    """
    _check_rate("p", p)
    _check_rate("q", q, above_zero=True)
    return Form([[1 - p, p], [q, 1 - q]], [[1.0, 0.0], [1.0, 1.0]])


def me(weights: Sequence[float]) -> Form:
    """After every token the next model is drawn by the ensemble's weights, which are scaled to sum 1; every token
    is kept. Two models or more."""
    if len(weights) < 2:
        raise ValueError(f"weights: {list(weights)} must be one for each model, of 2 or more")
    if any(not math.isfinite(w) or w < 0 for w in weights) or weights[0] == 0:
        raise ValueError(f"weights: {list(weights)} must be 0 or more each, and the first, of the entry model, above 0")
    largest = max(weights)  # their sum may be beyond what a float holds
    row = [w / largest for w in weights]
    row = [w / sum(row) for w in row]
    return Form([list(row) for _ in row], [[1.0] * len(row) for _ in row])


def single() -> Form:
    """One model, no routing."""
    return Form([[1.0]], [[1.0]])


# By name as in a deployment's `router.name`, with the rates that it takes.
ALGORITHMS: Mapping[str, tuple[Callable[..., Form], tuple[str, ...]]] = {
    "bild": (r2r, ("p",)),
    "citer": (citer, ("p",)),
    "co_llm": (co_llm, ("p",)),
    "glimp": (rstitch, ("p", "q")),
    "me": (me, ("weights",)),
    "r2r": (r2r, ("p",)),
    "random": (random, ("p",)),
    "rstitch": (rstitch, ("p", "q")),
    "single": (single, ()),
}


def form(algorithm: str, **rates: float | Sequence[float] | None) -> Form:
    """P and C of an algorithm by its name; a rate of None counts as not given.

    Raises ValueError when the name is unknown, or a rate is missing, not the algorithm's, or out of range.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: {algorithm!r} must be one of {', '.join(ALGORITHMS)}")
    make, takes = ALGORITHMS[algorithm]
    given = {name: value for name, value in rates.items() if value is not None}
    for name in takes:
        if name not in given:
            raise ValueError(f"{name}: not given; {algorithm} needs {' and '.join(takes)}")
    for name, value in given.items():
        if name not in takes:
            raise ValueError(f"{name}: {value} given, but {algorithm} takes {' and '.join(takes) or 'no rate'}")
    return make(**given)


def _check_rate(name: str, value: float, above_zero: bool = False) -> None:
    if not (0 <= value <= 1) or (above_zero and value == 0):
        raise ValueError(f"{name}: {value} must be {'above 0' if above_zero else 'from 0'} to 1")
