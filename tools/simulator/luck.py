# SPDX-License-Identifier: Apache-2.0
"""What of a simulation's throughput was luck: control variates.

Most of the noise comes from the runs that were drawn: somewhat longer ones than their mean, somewhat more requests
sent to one peer than its share. Both are known exactly, and both are 0 on average, so what the throughput owes to
them can be estimated by regression over the parts of the run, and taken off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tools.simulator.routing import Routing

__all__ = ["Luck", "estimate"]

_Z = 1.959964  # 97.5 % quantile of the normal distribution: a 95 % interval


class Luck:
    """Counts how far the runs drawn are from what was to be expected."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        models = len(routing.mean_steps)
        self._steps = [0.0] * models
        self._runs = [[0] * models for _ in range(models)]

    def drew(self, model: int, steps: float, to: int) -> None:
        """A run at `model` of so many steps, which then goes `to`."""
        mean = self._routing.mean_steps[model]
        if mean is not None:
            self._steps[model] += steps - mean
            self._runs[model][to] += 1

    def cut(self) -> list[float]:
        """The surplus of steps at each model, and of runs between each two, since the last cut."""
        surplus = list(self._steps)
        for runs, shares in zip(self._runs, self._routing.shares, strict=True):
            total = sum(runs)
            surplus += [n - total * share for n, share in zip(runs, shares, strict=True)]
            runs[:] = [0] * len(runs)
        self._steps[:] = [0.0] * len(self._steps)
        return surplus


def estimate(values: Sequence[float], luck: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean of the values (one for each part) without luck (a row for each part), and the half width of its 95 %
    confidence interval."""
    y, x = np.asarray(values, dtype=float), np.asarray(luck, dtype=float).reshape(len(values), -1)
    # In the directions in which the parts differ, most first: at most half as many as there are parts, or with many
    # models they would explain any values.
    parts, sizes, directions = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    rank = min(int((sizes > 1e-9 * sizes.max(initial=0.0)).sum()), len(y) // 2)
    parts = parts[:, :rank]
    off = x.mean(axis=0) @ directions[:rank].T / sizes[:rank]
    slopes = (y - y.mean()) @ parts
    left = y - y.mean() - parts @ slopes
    freedom = len(y) - 1 - rank
    deviation = math.sqrt(float(left @ left) / freedom * (1 / len(y) + float(off @ off)))
    student = _Z + (_Z**3 + _Z) / (4 * freedom)  # its first-order expansion: 0.1 % off at 30 degrees of freedom
    return float(y.mean() - off @ slopes), student * deviation
