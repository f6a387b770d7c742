# SPDX-License-Identifier: Apache-2.0
"""Co-LLM: the small model has learnt when to defer, and the large one then makes the token (arXiv 2403.03870).

The signal is the probability of deferring, sigmoid(theta . h), h = the small model's hidden state. Delegated where
it is above eta.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from routers.base import Algorithm, StepResult
from routers.neural import NeuralEntry, NeuralParams, NeuralPeer

if TYPE_CHECKING:
    import torch

    from routers.networks import CoLLMHead

__all__ = ["CO_LLM", "CoLLMParams", "CoLLMSLM"]


class CoLLMParams(NeuralParams):
    """eta: the probability of deferring above which a token is delegated. TokenRouter's paper runs 0.15."""

    algorithm: ClassVar[str] = "co_llm"
    threshold_name: ClassVar[str] = "eta"
    per_request: ClassVar[frozenset[str]] = frozenset({"eta"})

    eta: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, description="probability; null = the file's")


class CoLLMSLM(NeuralEntry[CoLLMParams]):
    """Beside the small model: it defers -> the large one makes that position."""

    @staticmethod
    def network_class() -> type[CoLLMHead]:
        from routers.networks import CoLLMHead

        return CoLLMHead

    def route(self, result: StepResult) -> torch.Tensor:
        return (self.probabilities(result) > self.thresholds(result)).long()


CO_LLM = Algorithm(name="co_llm", params=CoLLMParams, entry=CoLLMSLM, peer=NeuralPeer)
