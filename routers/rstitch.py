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

_LOWEST = -1e30


class RStitchParams(RouterParams):
    """tau: normalised entropy above which the large model writes. The paper runs 0.03."""

    per_request: ClassVar[frozenset[str]] = frozenset({"tau"})

    tau: float = Field(0.03, ge=0.0, le=1.0, allow_inf_nan=False, description="normalised entropy, 0 to 1")


def normalized_entropy(logits: torch.Tensor) -> torch.Tensor:
    """H_t = -sum_i p_i log p_i / log V for each row of FP32 [n, V]; FP32 [n] in [0, 1]. A logit of -inf is a token
    that is masked out, with p = 0.

    Raises ValueError where there is no such distribution: a NaN, a +inf, or nothing but -inf.

    Row by row: a row fits in a core's cache, a batch of a large vocabulary doesn't, and no row's last bit
    can depend on the others.
    """
    entropies = [_entropy(row) for row in logits]
    if not all(map(math.isfinite, entropies)):  # a NaN compares false with every threshold
        raise ValueError("logits: hold NaN or +inf, or nothing but -inf; allowed: finite ones, and -inf for a mask")
    # rounding takes that of a large vocabulary without any preference above 1, and tau = 1 would delegate
    return (logits.new_tensor(entropies) / math.log(logits.shape[-1])).clamp_(0.0, 1.0)


def _entropy(row: torch.Tensor) -> float:
    # In log space and bounded below: where a probability underflows to 0, p log p would be a NaN.
    log_p = row.log_softmax(-1).clamp_min_(_LOWEST)
    return -float(log_p.exp().dot(log_p))


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
