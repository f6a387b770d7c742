# SPDX-License-Identifier: Apache-2.0
"""The random streams, and how requests move between the models.

Every purpose has a generator of its own, made from the seed and the purpose's name, and every request one
for its routing: what one purpose draws changes nothing of what another does, and a request meets the same
runs whatever the policy.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Sequence

__all__ = ["Routing", "stream"]


def stream(seed: int, purpose: str, rid: int | None = None) -> random.Random:
    """The generator of a purpose, or of that of one request."""
    return random.Random(f"{seed}/{purpose}" if rid is None else f"{seed}/{purpose}/{rid}")


class Routing:
    """Draws runs: how many steps a request stays at a model, and where it goes then.

    p: M x M. run_lengths: as in a profile. c: M x M, tokens of a step.
    memoryless: by model, whether its runs are geometric. mean_steps: of its runs, None = they never end.
    shares: M x M, of the runs that leave it, by peer.
    """

    def __init__(
        self, p: Sequence[Sequence[float]], c: Sequence[Sequence[float]], run_lengths: Sequence[list[float] | None]
    ) -> None:
        self._c = c
        self._run_lengths = run_lengths
        self.memoryless = [lengths is None for lengths in run_lengths]
        self.use(p)

    def use(self, p: Sequence[Sequence[float]]) -> None:
        """From now on p; for runs that have begun, see `memoryless`."""
        self._length = [self._lengths_of(i, row[i]) for i, row in enumerate(p)]
        self._leaving: list[tuple[list[float], list[int]]] = []
        self.mean_steps = [self._mean_of(i, row[i]) for i, row in enumerate(p)]
        self.shares: list[list[float]] = []
        for i, row in enumerate(p):
            peers = [j for j, x in enumerate(row) if j != i and x > 0]
            leaves = sum(row[j] for j in peers)
            self._leaving.append((list(itertools.accumulate(row[j] for j in peers)), peers or [i]))
            self.shares.append([x / leaves if j in peers else 0.0 for j, x in enumerate(row)])

    def run(self, model: int, rng: random.Random) -> tuple[float, int]:
        """A run that begins at `model`: its steps, perhaps infinite, and the model after it. Always draws two
        numbers, so that a request's stream doesn't shift when a probability is 0."""
        steps = self._length[model](rng.random())
        u = rng.random()
        cumulative, peers = self._leaving[model]
        if len(peers) == 1:
            return steps, peers[0]
        return steps, peers[min(bisect.bisect_right(cumulative, u * cumulative[-1]), len(peers) - 1)]

    def tokens(self, source: int, destination: int, rng: random.Random) -> int:
        """Of a step from `source` to `destination`: its mean, rounded up or down at random."""
        mean = self._c[source][destination]
        whole = math.floor(mean)
        return whole + (rng.random() < mean - whole) if whole != mean else whole

    def _lengths_of(self, model: int, stays: float) -> Callable[[float], float]:
        """From a uniform number to a run's length, where a request stays with this probability."""
        lengths = self._run_lengths[model]
        if lengths is not None:
            cumulative = list(itertools.accumulate(lengths))
            last = max(n for n, x in enumerate(lengths) if x > 0)
            return lambda u: 1 + min(bisect.bisect_right(cumulative, u * cumulative[-1]), last)
        if stays <= 0:
            return lambda u: 1
        if stays >= 1:
            return lambda u: math.inf
        scale = 1 / math.log(stays)
        return lambda u: 1 + int(math.log(1 - u) * scale)

    def _mean_of(self, model: int, stays: float) -> float | None:
        lengths = self._run_lengths[model]
        if lengths is not None:
            return sum(n * x for n, x in enumerate(lengths, 1)) / sum(lengths)
        return None if stays >= 1 else 1 / (1 - stays)
