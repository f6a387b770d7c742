# SPDX-License-Identifier: Apache-2.0
"""Routers that fail where they are told to, for the fault tests. Loaded by dotted path, as a user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from routers import Algorithm, BaseRouter, PeerReq, RoutedRequest, RouterParams, StepResult, send_without_last

if TYPE_CHECKING:
    import torch


class FaultyParams(RouterParams):
    """raise_at, delegate_at: the positions at which `route` raises or delegates; 0 = never."""

    per_request: ClassVar[frozenset[str]] = frozenset({"raise_at", "delegate_at"})

    raise_at: int = Field(0, ge=0)
    delegate_at: int = Field(0, ge=0)


class FaultyEntry(BaseRouter[FaultyParams]):
    needs_logits = False

    def route(self, result: StepResult) -> torch.Tensor:
        for position, params in zip(result.places, result.params, strict=True):
            if params.raise_at and position == params.raise_at:
                raise ArithmeticError(f"told to fail at {position}")
        return (result.next_token_ids.new_tensor(result.places) == result.param("delegate_at")).long()

    def send(self, req: RoutedRequest) -> PeerReq:
        return send_without_last(req)


class Back(BaseRouter[FaultyParams]):
    needs_logits = False

    def route(self, result: StepResult) -> torch.Tensor:
        return result.next_token_ids.new_ones(len(result.rids))


FAULTY = Algorithm(name="faulty", params=FaultyParams, entry=FaultyEntry, peer=Back)
