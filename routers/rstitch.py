# SPDX-License-Identifier: Apache-2.0
"""R-Stitch: the large model takes over while the next token is uncertain (arXiv 2507.17307).

The signal is the normalised entropy of the next-token distribution, H / log V, in [0, 1]. The small
model hands over where it exceeds tau and drops its uncertain token; the large one goes on for as long as
its own stays above tau, and hands back with the first confident token, which it keeps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from routers.base import Algorithm, BaseRouter, PeerReq, RoutedRequest, RouterParams, StepResult, send_without_last

if TYPE_CHECKING:
    import torch

__all__ = ["RSTITCH", "RStitchLLM", "RStitchParams", "RStitchSLM", "normalized_entropy"]


class RStitchParams(RouterParams):
    """tau: normalised entropy above which the large model writes. The paper runs 0.03."""

    per_request: ClassVar[frozenset[str]] = frozenset({"tau"})

    tau: float = Field(0.03, ge=0.0, le=1.0, allow_inf_nan=False, description="normalised entropy, 0 to 1")


def normalized_entropy(logits: torch.Tensor) -> torch.Tensor:
    """H_t = -sum_i p_i log p_i / log V for each row of FP32 [n, V]; FP32 [n] in [0, 1].

    Through log_softmax: a probability that underflows to 0 would make p log p a NaN, and a NaN compares
    false with every threshold, which would silently end delegation.
    """
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).nan_to_num(nan=0.0).sum(-1) / math.log(logits.shape[-1])


class RStitchSLM(BaseRouter[RStitchParams]):
    """Beside the small model: uncertain -> the large one regenerates that position."""

    def route(self, result: StepResult) -> torch.Tensor:
        return (normalized_entropy(result.logits) > result.param("tau")).long()

    def send(self, req: RoutedRequest) -> PeerReq:
        return send_without_last(req)


class RStitchLLM(BaseRouter[RStitchParams]):
    """Beside the large model: confident -> back. Its `send` keeps the confident token: without it, the
    small model would find itself in the state that it left, and hand over for ever."""

    def route(self, result: StepResult) -> torch.Tensor:
        return (normalized_entropy(result.logits) <= result.param("tau")).long()


RSTITCH = Algorithm(name="rstitch", params=RStitchParams, entry=RStitchSLM, peer=RStitchLLM)
