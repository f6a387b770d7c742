# SPDX-License-Identifier: Apache-2.0
"""A random walk of the very chain that `exact` solves, for chains too large to write down.

Many walks ("lanes") of many B advance side by side, one transition each per numpy step. Only which class a request
goes to is drawn; tokens count with their mean, as in the paper's formula of T(B), which leaves less to chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from python_backends.token_router.threshold.exact import advance
from python_backends.token_router.threshold.network import Floats, Ints, Network
from python_backends.token_router.threshold.steady import Steady

__all__ = ["Walk"]

_BITS = 16
_PARTS = 16  # of the lanes of a B, each further along than the one before
_TABLE_BYTES = 64 << 20  # beyond it, numpy's own binomial, which needs no table but ten times as long


class _Binomials:
    """Draws the classes that requests go to: one binomial for each class and each of its destinations but the last.

    Binomial(n, p) is looked up by 16 random bits: its quantiles, each probability rounded to 2^-16.
    """

    def __init__(self, network: Network, rng: np.random.Generator) -> None:
        self._rng = rng
        self.to: list[
            list[tuple[int, float]]
        ] = []  # of each class: destinations, and the chance of each but those before
        for row in network.routing:
            to = np.flatnonzero(row > 0)
            left = np.cumsum(row[to][::-1])[::-1]
            self.to.append([(int(j), float(row[j] / rest)) for j, rest in zip(to, left, strict=True)])
        chances = {p for to in self.to for _, p in to[:-1]}
        size = np.dtype(np.int16).itemsize << _BITS
        fits = len(chances) * (network.live + 1) * size <= _TABLE_BYTES
        self._tables = {p: _quantiles(network.live, p) for p in chances} if fits else {}

    def draw(self, n: Ints, p: float) -> Ints:
        if p not in self._tables:
            return self._rng.binomial(n, p)
        random = np.frombuffer(self._rng.bytes(2 * len(n)), dtype=np.uint16).astype(np.int64)
        random += n << _BITS
        return self._tables[p].take(random).astype(np.int64)


def _quantiles(live: int, p: float) -> NDArray[np.int16]:
    table = np.zeros((live + 1, 1 << _BITS), dtype=np.int16)
    pmf = np.zeros(live + 1)
    pmf[0] = 1
    for n in range(1, live + 1):
        pmf[1:] = pmf[1:] * (1 - p) + pmf[:-1] * p
        pmf[0] *= 1 - p
        ends = np.rint(np.cumsum(pmf[: n + 1]) * (1 << _BITS)).astype(np.int64)
        ends[-1] = 1 << _BITS
        table[n] = np.repeat(np.arange(n + 1), np.diff(ends, prepend=0))
    return table.ravel()


class Walk:
    """Walks of the chains of several B, `lanes` of each, from "every request waits for model 0".

    Each lane begins in a chain of its own and is independent of the others.
    """

    def __init__(self, network: Network, thresholds: Sequence[tuple[int, ...]], lanes: int, seed: int) -> None:
        self._net = network
        self._rng = np.random.default_rng(seed)
        self._binomials = _Binomials(network, self._rng)
        self.thresholds = tuple(thresholds)
        self.lanes = lanes
        count = len(self.thresholds) * lanes
        self._b_of = _by_lane(self.thresholds, lanes)
        self._k = np.zeros((network.classes, count), dtype=np.int64)
        self._k[0] = network.live
        self._b = np.zeros_like(self._k)
        self._r = np.zeros((network.models, count), dtype=np.int64)
        self._launch()
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        models, count = self._r.shape
        self.walked = 0
        self._time = np.zeros(count)
        self._tokens = np.zeros(count)
        self._requests, self._steps, self._waits, self._busy = (np.zeros((models, count)) for _ in range(4))

    def warm_up(self, transitions: int) -> None:
        """Walk without counting."""
        for _ in range(transitions):
            self._step()

    def stagger(self, transitions: int) -> None:
        """Walk some lanes of each B further than others, by up to this many transitions, without counting.

        Two busy models go through the same phases again and again, and the lanes, begun alike, would go through
        them in step: the mean of a short walk would be that of some phases, with an error that looks small.
        """
        part = np.arange(self._r.shape[1]) % self.lanes * _PARTS // self.lanes
        for i in range(1, _PARTS):
            at = np.flatnonzero(part >= i)
            ahead = self._copy(at)
            ahead.warm_up(max(1, transitions // _PARTS))
            self._k[:, at], self._b[:, at], self._r[:, at] = ahead._k, ahead._b, ahead._r

    def walk(self, transitions: int, rates_only: bool = False) -> None:
        """Every lane this many transitions further. rates_only: count what `throughput` needs and no more."""
        for _ in range(transitions):
            waiting, busy = self._k.copy(), self._r > 0
            time, done, finished = self._step()
            self._time += time
            for per_step, requests in zip(self._net.tokens, finished, strict=True):  # `@` would wake BLAS's threads
                self._tokens += per_step * requests
            if not rates_only:
                self._waits += self._by_model(waiting) * time
                self._busy += busy * time
                self._steps += done
                self._requests += self._by_model(finished)
        self.walked += transitions

    def _by_model(self, by_class: Ints) -> Ints:
        """Numbers of requests by class, (classes, lanes), as numbers by model."""
        if len(by_class) == self._net.models:
            return by_class
        return np.asarray(np.add.reduceat(by_class, self._net.entry, axis=0))

    def _step(self) -> tuple[Floats, NDArray[np.bool_], Ints]:
        """One transition: how long it took, ms; which models completed; the requests of each class that they had."""
        time, done, self._r = advance(self._net, self._r)
        finished = self._b * done[self._net.model_of]
        self._b -= finished
        self._route(finished)
        self._launch()
        return time, done, finished

    def _route(self, finished: Ints) -> None:
        for of_class, to in zip(finished, self._binomials.to, strict=True):
            left = of_class
            for j, p in to[:-1]:
                goes = self._binomials.draw(left, p)
                self._k[j] += goes
                left = left - goes
            self._k[to[-1][0]] += left

    def _launch(self) -> None:
        for i, of in enumerate(self._net.of_model):
            waiting = self._k[of].sum(axis=0)
            starts = np.flatnonzero((self._r[i] == 0) & (waiting >= self._b_of[i]))
            counts = self._k[of, starts]
            self._b[of, starts] = counts
            self._k[of, starts] = 0
            self._r[i, starts] = self._net.duration(i, waiting[starts], counts)

    def throughput(self) -> tuple[Floats, Floats]:
        """Tokens/s of each B, and the standard error (from the spread of its lanes)."""
        tokens, time = (x.reshape(len(self.thresholds), self.lanes) for x in (self._tokens, self._time))
        rate = tokens.sum(axis=1) / time.sum(axis=1)
        off = tokens - rate[:, None] * time
        error = np.sqrt((off**2).sum(axis=1) * self.lanes / max(1, self.lanes - 1)) / time.sum(axis=1)
        return rate * 1e3, error * 1e3

    def keep(self, which: Ints, lanes: int, thresholds: Sequence[tuple[int, ...]] | None = None) -> Walk:
        """A walk of only these B, with `lanes` of each: lanes go on from where they are, several from one place.
        thresholds: other B instead, one for each of `which`, from whose lanes they go on.

        Nothing is counted of what they walked before. Copies part by chance; stagger them before counting.
        """
        at = np.asarray(which)[:, None] * self.lanes + np.arange(lanes) % self.lanes
        kept = self._copy(at.ravel())
        kept.thresholds, kept.lanes = tuple(thresholds or [self.thresholds[i] for i in which]), lanes
        kept._b_of = _by_lane(kept.thresholds, lanes)
        kept._launch()
        return kept

    def _copy(self, at: Ints) -> Walk:
        copy = object.__new__(Walk)
        copy._net, copy._rng, copy._binomials = self._net, self._rng, self._binomials
        copy._b_of, copy._k, copy._b, copy._r = self._b_of[:, at], self._k[:, at], self._b[:, at], self._r[:, at]
        copy.forget()
        return copy

    def steady(self, which: int) -> Steady:
        """The steady state of one B, as walked."""
        at = slice(which * self.lanes, (which + 1) * self.lanes)
        rate, error = self.throughput()
        time = self._time[at].sum()
        requests, steps, waits, busy = (
            x[:, at].sum(axis=1) for x in (self._requests, self._steps, self._waits, self._busy)
        )
        return Steady(
            thresholds=self.thresholds[which],
            live=self._net.live,
            throughput=float(rate[which]),
            error=float(error[which]),
            batch=_ratio(requests, steps),
            delay_ms=_ratio(waits, requests),  # Little's law
            utilisation=tuple(float(x) for x in busy / time),
            steps_s=tuple(float(x) for x in steps / time * 1e3),
            method="sampled",
            states=self.walked * self.lanes,
            delta_ms=self._net.delta_ms,
            rounding=self._net.rounding,
            phase_distance=self._net.phase_distance,
        )


def _by_lane(thresholds: Sequence[tuple[int, ...]], lanes: int) -> Ints:
    return np.repeat(np.array(thresholds, dtype=np.int64).T, lanes, axis=1)


def _ratio(a: Floats, b: Floats) -> tuple[float, ...]:
    return tuple(float(x / y) if y else 0.0 for x, y in zip(a, b, strict=True))
