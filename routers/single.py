# SPDX-License-Identifier: Apache-2.0
"""One model only: the baseline that every routed run is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from routers.base import Algorithm, BaseRouter, PeerReq, RoutedRequest, RouterParams, StepResult, send_without_last

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SINGLE", "SingleParams"]


class SingleParams(RouterParams):
    """model: the number of the model that writes the whole answer, in the deployment's order."""

    per_request: ClassVar[frozenset[str]] = frozenset({"model"})

    model: int = Field(0, ge=0, description="which model writes, from 0")

    def check_models(self, models: Sequence[str]) -> None:
        if self.model >= len(models):
            raise ValueError(f"router 'single': model: {self.model}; allowed: 0 to {len(models) - 1}")


class SingleEntry(BaseRouter[SingleParams]):
    """Where every request starts. When another model is to write, the first token is dropped and the
    request leaves for good: that model makes it anew."""

    needs_logits = False

    def route(self, result: StepResult) -> list[int]:
        # seen from model 0, every model's peer number is its own number
        return [params.model for params in result.params]

    def send(self, req: RoutedRequest) -> PeerReq:
        return send_without_last(req)


class SinglePeer(BaseRouter[SingleParams]):
    """Beside every other model: what comes stays."""

    needs_logits = False

    def route(self, result: StepResult) -> list[int]:
        return [0] * len(result.rids)


SINGLE = Algorithm(
    name="single", params=SingleParams, entry=SingleEntry, peer=SinglePeer, min_models=1, max_models=None
)
