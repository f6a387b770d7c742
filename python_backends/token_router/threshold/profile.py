# SPDX-License-Identifier: Apache-2.0
"""What the threshold theory knows of a deployment: how requests move between the models, and how long steps take.

`tokenrouter profile` measures one, the controller keeps one from live traffic, and the Markov model and the
simulator read it. With constant latencies and nothing else given, it is the paper's case (appendix D).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

__all__ = ["Profile", "StepLatency"]

_SUM_TOLERANCE = 1e-6


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StepLatency(_Config):
    """L(b, s): the time of one step, in ms.

    batch_ms: of a step whose sessions bring one token each, by the number of sessions b; linear between the
        numbers given, constant below the first and above the last. One entry = the paper's constant L.
    token_ms: added for every token of a session's suffix beyond its first.
    """

    batch_ms: dict[PositiveInt, PositiveFloat] = Field(min_length=1)
    token_ms: NonNegativeFloat = 0.0

    @classmethod
    def constant(cls, ms: float) -> StepLatency:
        """The paper's: the same whatever the batch."""
        return cls(batch_ms={1: ms})

    def ms(self, sessions: int, more_tokens: float = 0.0) -> float:
        """Of a step with this many sessions, whose suffixes have `more_tokens` beyond one each, together."""
        at = sorted(self.batch_ms)
        if sessions <= at[0]:
            base = self.batch_ms[at[0]]
        elif sessions >= at[-1]:
            base = self.batch_ms[at[-1]]
        else:
            above = next(b for b in at if b >= sessions)
            below = max(b for b in at if b <= sessions)
            share = (sessions - below) / (above - below) if above > below else 0.0
            base = self.batch_ms[below] + share * (self.batch_ms[above] - self.batch_ms[below])
        return base + self.token_ms * more_tokens


class Profile(_Config):
    """A deployment's traffic, for M models in the deployment's order.

    p: M x M. p[i][j] = probability that a request goes to model j after a step at model i; rows sum to 1.
    c: M x M. c[i][j] = tokens committed by such a step: 1 or 0, or their mean as measured.
    latency: M step latencies, each with its model alone on the device.
    run_lengths: for each model, None = geometric by p[i][i] (the paper's assumption), or the measured
        distribution of the number of steps that a request stays there: entry n - 1 = probability of n steps.
        Where a request then goes follows row i of p without its diagonal.
    slowdown: M x M, slowdown[i][j] = by how much model i's step is longer while model j is busy too (1 = not
        at all; 1 on the diagonal). With several busy the factors multiply. None = all 1.
    source: where the numbers come from; nothing is computed from it.
    """

    models: list[str] = Field(min_length=1)
    p: list[list[float]]
    c: list[list[float]]
    latency: list[StepLatency]
    run_lengths: list[list[float] | None] | None = None
    slowdown: list[list[float]] | None = None
    source: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Profile:
        n = len(self.models)
        for name, matrix in (("p", self.p), ("c", self.c), ("slowdown", self.slowdown)):
            if matrix is not None and (len(matrix) != n or any(len(row) != n for row in matrix)):
                raise ValueError(f"{name}: must be {n} x {n}, one row and one column for each model")
        for name, entries in (("latency", self.latency), ("run_lengths", self.run_lengths)):
            if entries is not None and len(entries) != n:
                raise ValueError(f"{name}: has {len(entries)} entries; must be one for each of {n} models")
        for i, row in enumerate(self.p):
            _check_distribution(f"p[{i}]", row)
        for i, row in enumerate(self.c):
            if any(x < 0 for x in row):
                raise ValueError(f"c[{i}]: {row} must be 0 or more tokens each")
        for i, lengths in enumerate(self.run_lengths or []):
            if lengths is not None:
                _check_distribution(f"run_lengths[{i}]", lengths)
                if self.p[i][i] >= 1:
                    raise ValueError(f"run_lengths[{i}]: given, but p[{i}][{i}] = 1 lets no run end")
        for i, row in enumerate(self.slowdown or []):
            if any(x < 1 for x in row) or row[i] != 1:
                raise ValueError(f"slowdown[{i}]: {row} must be 1 or more each, and 1 on the diagonal")
        return self

    def slowdown_of(self, model: int, busy: Sequence[int]) -> float:
        """The factor on model's step while the models of `busy` are busy too."""
        return math.prod(self.slowdown[model][j] for j in busy) if self.slowdown is not None else 1.0


def _check_distribution(name: str, row: Sequence[float]) -> None:
    if not row or any(not 0 <= x <= 1 for x in row) or not math.isclose(sum(row), 1, abs_tol=_SUM_TOLERANCE):
        raise ValueError(f"{name}: {list(row)} must be probabilities that sum to 1")
