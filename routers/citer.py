# SPDX-License-Identifier: Apache-2.0
"""CITER: the large model makes each token for which the small one isn't confident enough (arXiv 2502.01976).

The signal is the confidence that the small model suffices, from its hidden state. Delegated where it is below tau.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from routers.base import Algorithm, StepResult
from routers.neural import NeuralEntry, NeuralParams, NeuralPeer

if TYPE_CHECKING:
    import torch

    from routers.networks import CiterNetwork

__all__ = ["CITER", "CiterParams", "CiterSLM"]


class CiterParams(NeuralParams):
    """tau: the confidence below which a token is delegated. CITER runs 0.9 and 0.95, TokenRouter's paper 0.98."""

    algorithm: ClassVar[str] = "citer"
    threshold_name: ClassVar[str] = "tau"
    per_request: ClassVar[frozenset[str]] = frozenset({"tau"})

    tau: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, description="confidence; null = the file's")


class CiterSLM(NeuralEntry[CiterParams]):
    """Beside the small model: not confident -> the large one makes that position."""

    @staticmethod
    def network_class() -> type[CiterNetwork]:
        from routers.networks import CiterNetwork

        return CiterNetwork

    def route(self, result: StepResult) -> torch.Tensor:
        return (self.probabilities(result) < self.thresholds(result)).long()


CITER = Algorithm(name="citer", params=CiterParams, entry=CiterSLM, peer=NeuralPeer)
