# SPDX-License-Identifier: Apache-2.0
"""In the style of BiLD (arXiv 2302.07863): the large model writes a token where the small one's best is improbable.

This is BiLD's fallback policy. Its rollback policy, by which the large model later takes back tokens of the small
one, is not here: a token that was committed is final.
"""

from __future__ import annotations

import math
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

__all__ = ["BILD", "BiLDParams"]


class BiLDParams(RouterParams):
    """threshold: the probability of the small model's most probable token below which the large one writes."""

    per_request: ClassVar[frozenset[str]] = frozenset({"threshold"})

    threshold: float = Field(0.5, ge=0.0, le=1.0, allow_inf_nan=False, description="probability, 0 to 1")


class BiLDSLM(BaseRouter[BiLDParams]):
    """Beside the small model: max p < threshold -> the large one makes that position."""

    def route(self, result: StepResult) -> list[int]:
        # row by row, as in rstitch: no row's last bit can depend on the others
        highest = [float(row.softmax(-1).max()) for row in result.logits]
        if not all(map(math.isfinite, highest)):  # a NaN compares false with every threshold
            raise ValueError("logits: hold NaN or +inf, or nothing but -inf; allowed: finite ones, and -inf for a mask")
        return [int(p < params.threshold) for p, params in zip(highest, result.params, strict=True)]

    def send(self, req: RoutedRequest) -> PeerReq:
        return send_without_last(req)


BILD = Algorithm(name="bild", params=BiLDParams, entry=BiLDSLM, peer=OneTokenRouter)
