# SPDX-License-Identifier: Apache-2.0
"""ME, the mixture-model-like ensemble (arXiv 2605.00419): the next token's model is drawn by fixed weights.

P(x) = sum_i w_i M_i(x): to draw model i with probability w_i and then a token from M_i is to draw from the
averaged distribution of all models, and costs one model's step. So it holds of sampled tokens only, and of the
models' distributions as the request's temperature, top-k and top-p leave them. Every token is kept, but for an
answer's first: the entry model makes it, whoever it belongs to.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from routers.base import (
    Algorithm,
    BaseRouter,
    PeerReq,
    RoutedRequest,
    RouterParams,
    StepResult,
    model_to_peer,
    send_without_last,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MIXTURE_ENSEMBLE", "MEEntry", "MEParams", "MERouter"]

_SUM_TOLERANCE = 1e-5


class MEParams(RouterParams):
    """weights: w, one for each model in the deployment's order; finite, 0 or more, summing to 1. TokenRouter's
    paper runs 0.5, 0.3, 0.2."""

    per_request: ClassVar[frozenset[str]] = frozenset({"weights"})

    weights: tuple[float, ...] = Field(description="one for each model, summing to 1")

    @field_validator("weights")
    @classmethod
    def _sum_to_one(cls, weights: tuple[float, ...]) -> tuple[float, ...]:
        if any(not math.isfinite(w) or w < 0 for w in weights):
            raise ValueError("each must be a finite number of 0 or more")
        if abs(sum(weights) - 1) > _SUM_TOLERANCE:
            raise ValueError(f"they must sum to 1; these sum to {sum(weights):.6g}")
        return weights

    def check_models(self, models: Sequence[str]) -> None:
        if len(self.weights) != len(models):
            raise ValueError(
                f"router 'me': weights: {len(self.weights)} of them; allowed: one for each model,"
                f" of which the deployment has {len(models)} ({', '.join(models)})"
            )

    def drawn(self, u: float) -> int:
        """The number of the model that a u of [0, 1) draws."""
        sums = list(accumulate(self.weights))
        # rounding must not bring the draw up to the last sum
        return bisect_right(sums, min(u * sums[-1], math.nextafter(sums[-1], 0)))


class MERouter(BaseRouter[MEParams]):
    """After every token a model is drawn for the next one; the token is kept."""

    needs_logits = False
    needs_sampling = True

    def route(self, result: StepResult) -> list[int]:
        return [model_to_peer(self.index, self._next(result, row)) for row in range(len(result.rids))]

    def _next(self, result: StepResult, row: int) -> int:
        """The number of the model that makes the token after row's."""
        params: MEParams = result.params[row]
        return params.drawn(result.draw(row))


class MEEntry(MERouter):
    """Beside the first model. An answer's first token has yet to be drawn for when it makes it: drawn for
    another model, it is dropped, and that model makes the position."""

    def _next(self, result: StepResult, row: int) -> int:
        params: MEParams = result.params[row]
        u = result.draw(row)
        if result.places[row] > result.prompt_tokens[row]:
            return super()._next(result, row)
        if (model := params.drawn(u)) != 0:
            result.fields[row]["dropped"] = True
            return model
        # The token stays. Given that u is below w_0, u / w_0 is a number of [0, 1) as good as a new one.
        return params.drawn(u / (params.weights[0] / sum(params.weights)))

    def send(self, req: RoutedRequest) -> PeerReq:
        return send_without_last(req) if "dropped" in req.fields else super().send(req)


MIXTURE_ENSEMBLE = Algorithm(name="me", params=MEParams, entry=MEEntry, peer=MERouter, max_models=None)
