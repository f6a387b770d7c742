# SPDX-License-Identifier: Apache-2.0
"""Random routing: with probability p the next token is the large model's.

The control that a trained router has to beat at the same share of LLM tokens, and a synthetic load with
R2R's transition matrix, P = [[1 - p, p], [1, 0]] (paper, appendix D).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from routers.base import (
    Algorithm,
    BaseRouter,
    OneTokenRouter,
    PeerReq,
    RoutedRequest,
    RouterParams,
    StepResult,
    send_without_last,
)

__all__ = ["RANDOM", "RandomParams"]


class RandomParams(RouterParams):
    """p: the probability that a token is delegated; drawn for every token from the request's own stream."""

    per_request: ClassVar[frozenset[str]] = frozenset({"p"})

    p: float = Field(0.1, ge=0.0, le=1.0, allow_inf_nan=False, description="probability, 0 to 1")


class RandomSLM(BaseRouter[RandomParams]):
    """Delegates with probability p and drops its own token."""

    needs_logits = False

    def route(self, result: StepResult) -> list[int]:
        return [int(result.draw(row) < params.p) for row, params in enumerate(result.params)]

    def send(self, req: RoutedRequest) -> PeerReq:
        return send_without_last(req)


RANDOM = Algorithm(name="random", params=RandomParams, entry=RandomSLM, peer=OneTokenRouter)
