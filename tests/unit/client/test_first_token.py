# SPDX-License-Identifier: Apache-2.0
"""The request that proves that a server serves: what it asks of which router."""

from __future__ import annotations

from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from routers import Algorithm, BaseRouter, RouterConfig, RouterParams
from tests.unit.client.fake_triton import FakeTriton
from tools.client import TokenRouterClient
from tools.errors import UserError
from tools.first_token import FirstToken


class Draws(BaseRouter[RouterParams]):
    needs_sampling = True

    def route(self, result: Any) -> Any:
        raise NotImplementedError


DRAWING = Algorithm(name="drawing", params=RouterParams, entry=Draws, peer=Draws)


@pytest.mark.parametrize(("router", "temperatures"), [("rstitch", []), (f"{__name__}:DRAWING", [1.0])])
def test_it_is_greedy_unless_the_router_needs_sampling(
    triton: tuple[FakeTriton, TokenRouterClient], router: str, temperatures: list[float]
) -> None:
    fake, _ = triton
    with FirstToken(fake.url, RouterConfig(name=router)) as token:
        token.make()
    sent = {i.name: i.contents for i in fake.requests[0].inputs}
    assert list(sent["max_tokens"].int_contents) == [1]
    assert [v for name, c in sent.items() if name == "temperature" for v in c.fp32_contents] == temperatures


def test_a_refusal_is_one_line(triton: tuple[FakeTriton, TokenRouterClient]) -> None:
    fake, _ = triton

    def refuse(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNAVAILABLE, "model 'llm' is down")
        yield

    fake.script = refuse
    with (
        FirstToken(fake.url, RouterConfig()) as token,
        pytest.raises(UserError, match=r"^the first token was not made: UNAVAILABLE: model 'llm' is down$"),
    ):
        token.make()
