# SPDX-License-Identifier: Apache-2.0
"""How long one model's steps take, L(b, s), learnt from the steps that it makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from python_backends.token_router.threshold.profile import StepLatency

__all__ = ["StepTimes", "TimesFit"]

_MEMORY = 100.0  # steps of each batch size
_PRIOR = 3.0  # steps: the weight of the line through all batch sizes in each one's own estimate
_SIGNIFICANT = 3.0  # standard errors
_LEAST_SLOWDOWN = 0.05  # a smaller one is noise, and makes the chain larger for nothing
_ROUNDS = 4

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TimesFit:
    """latency: with the model alone on the device. slowdown: by the other models' places, 1 = none."""

    latency: StepLatency
    slowdown: tuple[float, ...]


class StepTimes:
    """Weighted sums by batch size, from which `fit` takes a regression: ms of a step with b sessions
    = a_b (1 + sum over the others j of g_j o_j) + t x, with x the tokens beyond one for each session and o_j
    the share of the step during which model j was busy too.

    A batch size forgets exponentially as its own steps are observed (memory: 100 of them), so that what was
    learnt of a size lasts while another is in use. others: how many models there are beside this one.
    """

    def __init__(self, others: int) -> None:
        self._others = others
        size = others + 3  # 1, x, o_1 ... o_k, ms
        self._pairs = [(i, j) for i in range(size) for j in range(i, size)]
        self._cells: dict[int, list[float]] = {}
        self._count: dict[int, int] = {}
        self.observed = 0

    def observe(self, sessions: int, more_tokens: float, ms: float, busy: Sequence[float]) -> None:
        """One step, or the mean of one call's. busy: the others' o_j. Takes a few microseconds."""
        v = (1.0, more_tokens, *busy, ms)
        cell = self._cells.get(sessions)
        if cell is None:
            cell = self._cells[sessions] = [0.0] * len(self._pairs)
            self._count[sessions] = 0
        count = self._count[sessions] = self._count[sessions] + 1
        keep = 1 - 1 / min(count, _MEMORY)  # a plain mean at first
        take = 1 - keep
        self._cells[sessions] = [keep * s + take * v[i] * v[j] for s, (i, j) in zip(cell, self._pairs, strict=True)]
        self.observed += 1

    def fit(self, largest: int) -> TimesFit | None:
        """None before there is a step. largest: the batch size up to which the table is continued by the line
        through what was observed, where there are two sizes to draw it through; but to twice the largest at most.
        """
        if not self._cells:
            return None
        sizes = np.array(sorted(self._cells))
        means, spreads = self._moments(sizes)
        weights = np.array([min(self._count[int(b)], _MEMORY) for b in sizes], dtype=np.float64)
        alone, token_ms, factors = self._regress(means, spreads, weights)
        table = _smooth(sizes.astype(np.float64), alone, weights)
        end = min(largest, 2 * int(sizes[-1]))
        if len(sizes) > 1 and end > sizes[-1]:
            intercept, slope = _line(sizes.astype(np.float64), alone, weights)
            sizes = np.append(sizes, end)
            table = np.append(table, max(table[-1], intercept + slope * end))
        batch_ms = {int(b): max(float(ms), 1e-6) for b, ms in zip(sizes, table, strict=True)}
        return TimesFit(StepLatency(batch_ms=batch_ms, token_ms=token_ms), tuple(1 + g for g in factors))

    def _moments(self, sizes: NDArray[np.int64]) -> tuple[Array, Array]:
        """By batch size: the means of x, o_1 ... o_k, ms, and their covariances."""
        size = self._others + 3
        full = np.zeros((len(sizes), size, size))
        rows, columns = np.array(self._pairs).T
        for c, b in enumerate(sizes):
            full[c, rows, columns] = full[c, columns, rows] = self._cells[int(b)]
        means = full[:, 0, 1:]
        return means, full[:, 1:, 1:] - means[:, :, None] * means[:, None, :]

    def _regress(self, means: Array, spreads: Array, weights: Array) -> tuple[Array, float, Array]:
        """a_b, t and g. What isn't clearly above 0 is 0."""
        features = self._others + 1
        chosen = np.zeros(features)
        alone = means[:, -1]
        steps = float(weights.sum())
        for _ in range(_ROUNDS):
            scale = np.ones((len(alone), features))
            scale[:, 1:] = alone[:, None]
            xx = np.einsum("c,cij,ci,cj->ij", weights, spreads[:, :-1, :-1], scale, scale)
            xy = np.einsum("c,ci,ci->i", weights, spreads[:, :-1, -1], scale)
            yy = float(weights @ spreads[:, -1, -1])
            before, chosen = chosen, _significant(xx, xy, yy, steps)
            chosen[1:][chosen[1:] < _LEAST_SLOWDOWN] = 0.0
            if np.allclose(chosen, before, rtol=1e-3):
                break
            alone = (means[:, -1] - chosen[0] * means[:, 0]) / (1 + means[:, 1:-1] @ chosen[1:])
        return alone, float(chosen[0]), chosen[1:]


def _significant(xx: Array, xy: Array, yy: float, steps: float) -> Array:
    """Least squares from centred sums, without the features whose coefficient isn't clearly positive."""
    kept = [i for i in range(len(xy)) if xx[i, i] > 1e-9 * steps]
    while kept:
        inverse = np.linalg.pinv(xx[np.ix_(kept, kept)])
        found = inverse @ xy[kept]
        left_over = max(yy - float(found @ xy[kept]), 0.0) / max(steps - len(kept) - 1, 1.0)
        ratio = found / np.sqrt(np.maximum(left_over * np.diag(inverse), 1e-18))
        worst = int(ratio.argmin())
        if ratio[worst] >= _SIGNIFICANT:
            result = np.zeros(len(xy))
            result[kept] = found
            return result
        del kept[worst]
    return np.zeros(len(xy))


def _line(x: Array, y: Array, weights: Array) -> tuple[float, float]:
    """Intercept and slope (0 or more) of the weighted line."""
    total = weights.sum()
    mx, my = (weights @ x) / total, (weights @ y) / total
    spread = float(weights @ (x - mx) ** 2)
    slope = max(0.0, float(weights @ ((x - mx) * (y - my))) / spread) if spread > 0 else 0.0
    return float(my - slope * mx), slope


def _smooth(x: Array, y: Array, weights: Array) -> Array:
    """Each value drawn towards the line through all of them, the more the fewer steps it rests on; then
    never falling (pool adjacent violators): a larger batch takes no less time."""
    intercept, slope = _line(x, y, weights)
    shrunk = (weights * y + _PRIOR * (intercept + slope * x)) / (weights + _PRIOR)
    blocks: list[tuple[float, float, int]] = []  # value, weight, sizes
    for value, weight in zip(shrunk.tolist(), weights.tolist(), strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            v, w, n = blocks.pop()
            block = (math.fsum((v * w, block[0] * block[1])) / (w + block[1]), w + block[1], n + block[2])
        blocks.append(block)
    return np.array([v for v, _, n in blocks for _ in range(n)])
