# SPDX-License-Identifier: Apache-2.0
"""The Markov chain of delayed batching, solved exactly (paper, appendix D; generalised by classes: `network`).

A state is taken just after a batch's completion and the launches that follow it: k_c requests of class c wait,
b_c run, and model i has r_i left of its step, on the grid (0 = idle). The states of several B are searched in one
go, since numpy's cost per call would otherwise outweigh the work on each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from python_backends.token_router.threshold.network import Floats, Ints, Network
from python_backends.token_router.threshold.stationary import stationary_distribution
from python_backends.token_router.threshold.steady import Steady

__all__ = ["Chain", "TooLarge", "solve_exact"]

_KEY_LIMIT = 1 << 62


class TooLarge(Exception):
    """The chain has more states or transitions than allowed."""


def solve_exact(network: Network, thresholds: Sequence[tuple[int, ...]], most: int) -> list[Steady]:
    """The steady state of every B of `thresholds` (feasible ones).

    Raises TooLarge when the chains have more than `most` transitions together.
    """
    return Chain.search(network, thresholds, most).steady()


class _Splits:
    """The multinomial splits of n requests of one class, for every n up to N, one after the other."""

    def __init__(self, row: Floats, live: int) -> None:
        to = np.flatnonzero(row > 0)
        outcomes, chances, sizes = [], [], []
        for n in range(live + 1):
            some = np.array(list(_compositions(n, len(to))), dtype=np.int64).reshape(-1, len(to))
            log_n = np.array([math.lgamma(x + 1) for x in range(n + 1)])
            chances.append(np.exp(log_n[n] - log_n[some].sum(axis=1) + some @ np.log(row[to])))
            outcomes.append(some)
            sizes.append(len(some))
        self.size = np.array(sizes)
        self.first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.chance = np.concatenate(chances)
        self.to = to
        self.counts = np.concatenate(outcomes)


def _compositions(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (n,)
        return
    for x in range(n + 1):
        for rest in _compositions(n - x, parts - 1):
            yield (x, *rest)


@dataclass(frozen=True)
class Chain:
    """The reachable states of several B and the transitions between them.

    k, b: (classes, states). r: (models, states), grid units. of: (states,), which B a state belongs to.
    time_ms: (states,), holding time tau(s). done: (models, states), whether the model is in A(s).
    source, target, chance: the transitions.
    """

    network: Network
    thresholds: tuple[tuple[int, ...], ...]
    k: Ints
    b: Ints
    r: Ints
    of: Ints
    time_ms: Floats
    done: NDArray[np.bool_]
    begins: Ints
    source: Ints
    target: Ints
    chance: Floats

    @classmethod
    def search(cls, network: Network, thresholds: Sequence[tuple[int, ...]], most: int) -> Chain:
        """All states reachable from "every request waits for model 0", breadth first.

        Raises TooLarge when there are more than `most` transitions.
        """
        return _Search(network, thresholds, most).run()

    @cached_property
    def matrix(self) -> csr_array:
        """T, of all states."""
        return csr_array((self.chance, (self.source, self.target)), shape=(len(self.of),) * 2)

    @cached_property
    def pi(self) -> Floats:
        """The stationary distribution; sums to 1 over the states of each B."""
        # In the order of time, which the solver likes: through the slowest model's step, then through its wait.
        slowest = int(self.network.base_ms[:, -1].argmax())
        order = np.lexsort((self.k[self.network.of_model[slowest]].sum(axis=0), -self.r[slowest]))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return np.asarray(stationary_distribution(self.matrix[order][:, order], place[self.begins])[place])

    def steady(self) -> list[Steady]:
        """The steady state of every B."""
        net, weight = self.network, self.pi
        first = np.searchsorted(self.of, np.arange(len(self.thresholds)))

        def mean(values: Floats | Ints | NDArray[np.bool_]) -> Floats:  # over the states of each B: (rows, B)
            return np.asarray(np.add.reduceat(values * weight, first, axis=-1))

        finished = np.where(self.done[net.model_of], self.b, 0)
        waiting = np.add.reduceat(self.k, net.entry, axis=0)
        time = mean(self.time_ms)
        requests = mean(np.add.reduceat(finished, net.entry, axis=0))
        steps = mean(self.done)
        tokens = mean(net.tokens @ finished)
        batch, delay = _ratio(requests, steps), _ratio(mean(waiting * self.time_ms), requests)  # Little's law
        busy = mean((self.r > 0) * self.time_ms) / time
        states = np.diff(first, append=len(self.of))
        return [
            Steady(
                thresholds=b,
                live=net.live,
                throughput=float(tokens[i] / time[i] * 1e3),
                error=0.0,
                batch=_tuple(batch[:, i]),
                delay_ms=_tuple(delay[:, i]),
                utilisation=_tuple(busy[:, i]),
                steps_s=_tuple(steps[:, i] / time[i] * 1e3),
                method="exact",
                states=int(states[i]),
                delta_ms=net.delta_ms,
                rounding=net.rounding,
                phase_distance=net.phase_distance,
            )
            for i, b in enumerate(self.thresholds)
        ]


class _Search:
    def __init__(self, network: Network, thresholds: Sequence[tuple[int, ...]], most: int) -> None:
        self._net = network
        self._thresholds = tuple(thresholds)
        self._b_of = np.array(self._thresholds, dtype=np.int64).T  # (models, number of B)
        self._most = most
        n, longest = network.live + 1, network.longest() + 1
        radix = [len(thresholds)] + [n] * (2 * network.classes) + [longest] * network.models
        if math.prod(radix) >= _KEY_LIMIT:
            raise TooLarge(f"{network.classes} classes and {network.live} requests have too many states to number")
        self._weight = np.array([math.prod(radix[i + 1 :]) for i in range(len(radix))], dtype=np.int64)
        for row in network.routing:
            # The sum over n up to N of the splits of n requests; numbering them all must not take for ever.
            self._check(math.comb(network.live + int((row > 0).sum()), network.live))
        self._splits = [_Splits(row, network.live) for row in network.routing]

    def run(self) -> Chain:
        net, c = self._net, self._net.classes
        which = np.arange(len(self._thresholds))
        k = np.zeros((c, len(which)), dtype=np.int64)
        k[0] = net.live
        b, r = np.zeros_like(k), np.zeros((net.models, len(which)), dtype=np.int64)
        self._launch(which, k, b, r)
        states = np.vstack([which, k, b, r])
        begins = self._keys(states)
        known = np.sort(begins)
        found: list[Ints] = []
        steps: list[tuple[Floats, NDArray[np.bool_]]] = []
        edges: list[tuple[Ints, Ints, Floats]] = []
        count = 0
        while states.shape[1]:
            found.append(states)
            time_ms, done, source, after, chance = self._step(states)
            steps.append((time_ms, done))
            keys = self._keys(after)
            edges.append((self._keys(states)[source], keys, chance))
            count += len(keys)
            self._check(count)
            fresh, at = np.unique(keys, return_index=True)
            place = np.searchsorted(known, fresh)
            new = known[np.minimum(place, len(known) - 1)] != fresh
            known = np.insert(known, place[new], fresh[new])
            states = after[:, at[new]]
        every = np.hstack(found)
        keys = self._keys(every)
        order = np.argsort(keys)
        keys = keys[order]
        every = every[:, order]
        return Chain(
            network=net,
            thresholds=self._thresholds,
            of=every[0],
            k=every[1 : 1 + c],
            b=every[1 + c : 1 + 2 * c],
            r=every[1 + 2 * c :],
            time_ms=np.concatenate([t for t, _ in steps])[order],
            done=np.hstack([d for _, d in steps])[:, order],
            begins=np.searchsorted(keys, begins),
            source=np.searchsorted(keys, np.concatenate([s for s, _, _ in edges])),
            target=np.searchsorted(keys, np.concatenate([t for _, t, _ in edges])),
            chance=np.concatenate([p for _, _, p in edges]),
        )

    def _step(self, states: Ints) -> tuple[Floats, NDArray[np.bool_], Ints, Ints, Floats]:
        """One transition of each state: holding time, who completes, and (from, to, probability) of every outcome."""
        net, c = self._net, self._net.classes
        which, k, b, r = states[0], states[1 : 1 + c], states[1 + c : 1 + 2 * c], states[1 + 2 * c :]
        time_ms, done, r = advance(net, r)
        completed = np.where(done[net.model_of], b, 0)
        after = np.vstack([which, k, b - completed, r])
        source, chance = np.arange(states.shape[1]), np.ones(states.shape[1])
        for at, splits in enumerate(self._splits):
            left = completed[at][source]
            size = splits.size[left]
            self._check(int(size.sum()))
            # Every row so far times every split of its requests of this class.
            rows = np.repeat(np.arange(len(source)), size)
            ends = np.cumsum(size)
            outcome = np.repeat(splits.first[left] - ends + size, size) + np.arange(ends[-1])
            after, source, chance = after[:, rows], source[rows], chance[rows] * splits.chance[outcome]
            after[1 + splits.to] += splits.counts[outcome].T
        self._launch(after[0], after[1 : 1 + c], after[1 + c : 1 + 2 * c], after[1 + 2 * c :])
        return time_ms, done, source, after, chance

    def _keys(self, states: Ints) -> Ints:
        """A number for each state, in the order of their columns."""
        return np.asarray(self._weight @ states)

    def _check(self, transitions: int) -> None:
        if transitions > self._most:
            raise TooLarge(f"the chain has more than {self._most} transitions")

    def _launch(self, which: Ints, k: Ints, b: Ints, r: Ints) -> None:
        """Start every idle model with B requests or more waiting; changes k, b and r in place."""
        for i, of in enumerate(self._net.of_model):
            waiting = k[of].sum(axis=0)
            starts = np.flatnonzero((r[i] == 0) & (waiting >= self._b_of[i][which]))
            counts = k[of, starts]
            b[of, starts] = counts
            k[of, starts] = 0
            r[i, starts] = self._net.duration(i, waiting[starts], counts)


def advance(net: Network, r: Ints) -> tuple[Floats, NDArray[np.bool_], Ints]:
    """To the next completion: the time till then (ms), which models complete, what is left of the others' steps.

    r: (models, n), grid units of work left, 0 = idle. A model that others slow progresses at 1/slowdown; what is
    then left is rounded to the grid, and 0 left is complete.
    """
    busy = r > 0
    if not net.slows:
        left = np.where(busy, r, np.iinfo(np.int64).max)
        tau = left.min(axis=0)
        return tau * net.delta_ms, left == tau, r - np.where(busy, tau, 0)
    factor = net.slowdown[(1 << np.arange(net.models)) @ busy].T
    needs = np.where(busy, r * factor, np.inf)
    time = needs.min(axis=0)
    left = np.where(busy & (needs > time), np.rint(r - time / factor), 0).astype(np.int64)
    return time * net.delta_ms, busy & (left == 0), left


def _ratio(a: Floats, b: Floats) -> Floats:
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _tuple(values: Floats) -> tuple[float, ...]:
    return tuple(float(x) for x in values)
