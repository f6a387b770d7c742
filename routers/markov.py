# SPDX-License-Identifier: Apache-2.0
"""A synthetic load between any number of models: the paper's P and C matrices, drawn (appendix D).

After each token at model i the request goes to model j with probability p[i][j]; the token is kept where
c[i][j] is 1 and dropped where it is 0. It measures the runtime against the Markov model, whose
assumptions it meets exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from routers.base import (
    Algorithm,
    BaseRouter,
    PeerReq,
    RoutedRequest,
    RouterParams,
    StepResult,
    peer_request,
    peer_to_model,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MARKOV", "MarkovParams", "MarkovRouter"]


class MarkovParams(RouterParams):
    """p: transition probabilities, one row per model in the deployment's order, each summing to 1.
    c: 1 where the token is kept when the request goes from row to column, 0 where it is dropped."""

    p: list[list[float]] = Field(description="one row per model; each row sums to 1")
    c: list[list[int]] = Field(description="one row per model; 0 or 1")

    @model_validator(mode="after")
    def _check(self) -> MarkovParams:
        n = len(self.p)
        for name, matrix in (("p", self.p), ("c", self.c)):
            if len(matrix) != n or any(len(row) != n for row in matrix):
                raise ValueError(f"{name} must be a square matrix of the size of p ({n} x {n})")
        for i, row in enumerate(self.p):
            if any(not 0 <= x <= 1 for x in row) or not math.isclose(sum(row), 1, abs_tol=1e-9):
                raise ValueError(f"p[{i}] = {row} must be probabilities that sum to 1")
        for i, keeps in enumerate(self.c):
            if any(k not in (0, 1) for k in keeps) or keeps[i] != 1:
                raise ValueError(f"c[{i}] = {keeps} must be 0 or 1, and 1 on the diagonal")
        drops = {i: [j for j in range(n) if self.p[i][j] > 0 and self.c[i][j] == 0] for i in range(n)}
        if _has_cycle(drops):
            raise ValueError("c drops the token all the way round a cycle of models: no progress would be made")
        return self

    def check_models(self, models: Sequence[str]) -> None:
        if len(self.p) != len(models):
            raise ValueError(f"router 'markov': p has {len(self.p)} rows; the deployment has {len(models)} models")


def _has_cycle(edges: dict[int, list[int]]) -> bool:
    """Whether a directed graph has a cycle: strip the nodes without outgoing edges until none is left."""
    left = dict(edges)
    while ends := [i for i, out in left.items() if not any(j in left for j in out)]:
        for i in ends:
            del left[i]
    return bool(left)


class MarkovRouter(BaseRouter[MarkovParams]):
    """The same beside every model."""

    needs_logits = False

    def __init__(self, params: MarkovParams, models: Sequence[str], index: int) -> None:
        super().__init__(params, models, index)
        order = [peer_to_model(index, j) for j in range(len(models))]  # own column first, then the peers'
        self._keep = [bool(params.c[index][m]) for m in order]
        total, self._cumulative = 0.0, []
        for m in order[:-1]:
            total += params.p[index][m]
            self._cumulative.append(total)

    def route(self, result: StepResult) -> list[int]:
        return [bisect_right(self._cumulative, result.draw(row)) for row in range(len(result.rids))]

    def send(self, req: RoutedRequest) -> PeerReq:
        return peer_request(req, dropped=0 if self._keep[req.destination] else 1)


MARKOV = Algorithm(
    name="markov", params=MarkovParams, entry=MarkovRouter, peer=MarkovRouter, min_models=1, max_models=None
)
