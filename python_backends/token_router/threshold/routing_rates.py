# SPDX-License-Identifier: Apache-2.0
"""Where requests go after a step at one model, and after how many steps they leave it, learnt from what they do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["RoutingRow", "RunLengths", "length_distribution"]

_SLOW, _FAST = 1000.0, 60.0  # outcomes remembered
_LARGEST_WEIGHT = 1e100
_AFTER_CHANGE = 0.25  # of the short memory is what the long one begins with
_CHANGED = 3.0  # times what is usual between the two memories, ...
_PERSISTS = 4  # ... in so many comparisons in a row: the traffic is another now, and this is no burst
_SPREAD_MEMORY = 100.0  # comparisons
_SPREAD_PRIOR = 10.0  # comparisons in which chance alone was at work, to begin with
_LONGEST = 24  # steps of a run that are told apart; the rest are as the last
_CUT = 7  # times the mean of a geometric tail: a thousandth of it is longer
_MOST_ENTRIES = 2048  # of a distribution
_HAZARD_MEMORY = 500.0
_PRIOR = 10.0  # outcomes: the weight of the mean rate in the rate at each step of a run
# A run is the paper's geometric one unless it deviates by more than chance, and by enough to matter for B: a
# distribution makes the chain many times larger.
_BY_CHANCE = 6.0  # standard deviations of chi squared
_MATTERS = 0.05  # total variation


class _Memory:
    """Outcomes by destination, and the tokens committed by them, forgotten exponentially: instead of all sums
    shrinking with each outcome, the outcomes weigh more and more.

    size: outcomes remembered.
    """

    __slots__ = ("_growth", "outcomes", "tokens", "weight")

    def __init__(self, size: float, models: int) -> None:
        self._growth = size / (size - 1)
        self.weight = 1.0
        self.outcomes = [0.0] * models
        self.tokens = [0.0] * models

    def add(self, to: int, committed: int, count: int) -> None:
        self.weight *= self._growth if count == 1 else self._growth**count
        self.outcomes[to] += self.weight * count
        self.tokens[to] += self.weight * committed
        if self.weight > _LARGEST_WEIGHT:
            self.become(self, 1.0)

    def total(self) -> float:
        """Outcomes remembered."""
        return sum(self.outcomes) / self.weight

    def become(self, other: _Memory, share: float) -> None:
        """Remember this share of what `other` does."""
        self.outcomes = [share * x / other.weight for x in other.outcomes]
        self.tokens = [share * x / other.weight for x in other.tokens]
        self.weight = 1.0


class RoutingRow:
    """Row i of P and of C.

    Forgets exponentially by outcomes, with two memories: 1000 outcomes to know well, 60 to notice a change. When they
    differ by more than they usually do, and go on doing so, `observe` drops what the long one remembers. Requests may
    leave in bursts, which are far beyond chance and no change; how far is learnt, as the spread of the differences.
    """

    def __init__(self, models: int) -> None:
        self._slow = _Memory(_SLOW, models)
        self._fast = _Memory(_FAST, models)
        self.outcomes = [0] * models
        self.tokens = [0] * models
        self._uncompared = 0  # outcomes since the two memories were compared
        self._spread = 1.0  # the mean square of their difference, in standard errors; 1 = chance alone
        self._compared = 0
        self._apart = 0  # comparisons in a row in which they were too far apart

    def observe(self, to: int, committed: int, count: int = 1) -> bool:
        """`count` steps after which a request was at model `to`, and `committed` tokens in all by them. Returns whether
        the traffic is found to have changed, which is looked at every now and then."""
        self._slow.add(to, committed, count)
        self._fast.add(to, committed, count)
        self.outcomes[to] += count
        self.tokens[to] += committed
        self._uncompared += count
        if self._uncompared < _FAST / 2:
            return False
        self._uncompared = 0
        return self._settle()

    @property
    def observed(self) -> float:
        """Outcomes that the estimate rests on."""
        return self._slow.total()

    def _settle(self) -> bool:
        """Where the memories stay apart, the long one goes on from the short one. Returns whether it does."""
        n_slow, n_fast = self._slow.total(), self._fast.total()
        if n_slow < 2 * n_fast or n_fast < _FAST / 4:
            return False
        far = self._distance(n_slow, n_fast)
        bound = _CHANGED**2 * max(1.0, self._spread)
        if far <= bound:
            for _ in range(self._apart):  # those before were a burst
                self._spreads(bound)
            self._spreads(far)
            self._apart = 0
            return False
        self._apart += 1
        if self._apart < _PERSISTS:
            return False
        self._apart = 0
        # part of what the short one has is from before the change, too: let what comes soon outweigh it
        self._slow.become(self._fast, _AFTER_CHANGE)
        return True

    def _spreads(self, far: float) -> None:
        """A comparison without a change: learn how far apart they may be."""
        self._compared += 1
        weight = max(1 / _SPREAD_MEMORY, 1 / (self._compared + _SPREAD_PRIOR))
        self._spread += weight * (far - self._spread)

    def _distance(self, n_slow: float, n_fast: float) -> float:
        """The square of how far the memories are apart, in standard errors: of the destination where that is most."""
        farthest = 0.0
        for slow, fast in zip(self._slow.outcomes, self._fast.outcomes, strict=True):
            p_slow, p_fast = slow / self._slow.weight / n_slow, fast / self._fast.weight / n_fast
            p = (p_slow * n_slow + p_fast * n_fast + 1) / (n_slow + n_fast + 2)
            # an exponential memory of weight n is worth 2 n plain observations
            error2 = p * (1 - p) * (0.5 / n_slow + 0.5 / n_fast)
            farthest = max(farthest, (p_slow - p_fast) ** 2 / error2)
        return farthest

    def p(self) -> list[float]:
        """Probabilities by destination, that sum to 1. Not before there is an outcome."""
        total = sum(self._slow.outcomes)
        row = [x / total for x in self._slow.outcomes]
        row[row.index(max(row))] += 1 - sum(row)
        return row

    def c(self) -> list[float]:
        """Mean tokens committed by destination; 0 where nobody went."""
        return [round(t / x, 9) if x > 0 else 0.0 for t, x in zip(self._slow.tokens, self._slow.outcomes, strict=True)]


class RunLengths:
    """How many steps requests stay at one model: the rate of leaving at the n-th step of a run.

    The rates take the runs right that a request's end has cut off: their steps count, their ends don't. Each
    forgets exponentially by its own outcomes (memory: 500).
    """

    def __init__(self) -> None:
        self._steps = [0.0] * _LONGEST
        self._left = [0.0] * _LONGEST

    def observe(self, step: int, left: bool) -> None:
        """A request has made its `step`-th step in a row here (from 1), and left or stayed."""
        n = min(step, _LONGEST) - 1
        keep = 1 - 1 / _HAZARD_MEMORY
        self._steps[n] = keep * self._steps[n] + 1
        self._left[n] = keep * self._left[n] + left

    def forget(self) -> None:
        """The traffic has changed."""
        self._steps = [0.0] * _LONGEST
        self._left = [0.0] * _LONGEST

    def distribution(self, mean: float) -> list[float] | None:
        """Entry n - 1 = probability of a run of n steps; None = geometric, as far as can be told, or too long for
        `length_distribution`.

        mean: of the runs, as `RoutingRow` has it: the steps for each time that a request left. The first steps of a
        run, as few as tell it from a geometric one, have the rates that were seen here; rates of later ones are too
        noisy to be worth a phase each.
        """
        steps, left = sum(self._steps), sum(self._left)
        if not 0 < left < steps:
            return None
        rates = [(x + _PRIOR * left / steps) / (s + _PRIOR) for s, x in zip(self._steps, self._left, strict=True)]
        chances = length_distribution(rates[: self._told_apart()], mean)
        if chances is None:
            return None
        apart = sum(abs(x - (1 - 1 / mean) ** n / mean) for n, x in enumerate(chances)) / 2
        return chances if apart > _MATTERS else None

    def _told_apart(self) -> int:
        """After how many steps of a run the rate stays what it is, as far as can be told."""
        pairs = zip(self._steps, self._left, strict=True)
        seen = list(itertools.takewhile(lambda pair: pair[0] >= 2 * _PRIOR, pairs))
        return next((n for n in range(len(seen)) if _of_one_rate(seen[n:])), len(seen))


def length_distribution(rates: Sequence[float], mean: float) -> list[float] | None:
    """Run lengths with this mean (1 or more, exact) of which a share of rates[n - 1] (below 1) end at the n-th step;
    after these steps they are geometric, with what the mean leaves for them. Entry n - 1 = probability of n steps.

    None = with more than 2048 entries; hardly anyone is away from that model.
    """
    chances: list[float] = []
    reach, more = 1.0, mean  # who is still there; their steps on average, the next one included
    for rate in rates:
        after = (more - 1) / (1 - rate)
        if after < 1:  # no whole step is left for those who stay: fewer do, for one step
            return [*chances, reach * (2 - more), reach * (more - 1)]
        chances.append(reach * rate)
        reach, more = reach * (1 - rate), after
    entries = math.ceil(_CUT * more)
    if len(chances) + entries > _MOST_ENTRIES:
        return None
    rate = 1 / more
    for _ in range(3):  # the last entry stands for all longer runs, which the others make up for
        rate = (1 - (1 - rate) ** entries) / more
    tail = [reach * rate * (1 - rate) ** n for n in range(entries - 1)]
    return [*chances, *tail, max(0.0, reach - sum(tail))]


def _of_one_rate(seen: Sequence[tuple[float, float]]) -> bool:
    """Whether chance explains how the rates differ. seen: for each step, how often it was made, and as the last."""
    mean = sum(x for _, x in seen) / sum(s for s, _ in seen)
    if not 0 < mean < 1:
        return True
    chi2 = sum(s * (x / s - mean) ** 2 for s, x in seen) / (mean * (1 - mean))
    freedom = len(seen) - 1
    return chi2 <= freedom + _BY_CHANCE * math.sqrt(2 * freedom)
