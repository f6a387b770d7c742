# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter health` where no token is asked for, or none is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from routers import RouterConfig
from tests.unit.token_router.far_triton import FarTriton, far_triton
from tools.commands import health as module
from tools.commands.health import health
from tools.control import ControlError, RouterStatus
from tools.errors import UserError
from tools.first_token import FirstToken


@pytest.fixture
def triton() -> Iterator[FarTriton]:
    with far_triton() as triton:
        yield triton


def _found(monkeypatch: pytest.MonkeyPatch, url: str, models: list[str], status: Any = None) -> None:
    control = SimpleNamespace(status=status)
    found = SimpleNamespace(grpc_url=url, models=lambda: models, control=control)
    monkeypatch.setattr(module, "find_server", lambda which: found)


def test_a_host_of_llms(triton: FarTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    _found(monkeypatch, triton.url, ["llm", "xl"])
    assert health("auto", 5.0) == "llm, xl loaded"
    triton.ready = False
    with pytest.raises(UserError, match=r"^not serving: model 'llm' is not loaded$"):
        health("auto", 5.0)
    triton.stop()
    with pytest.raises(UserError, match=r"^not serving: "):
        health("auto", 5.0)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
def test_a_timeout_is_a_time(timeout_s: float) -> None:
    with pytest.raises(UserError, match=r"^--timeout-s: got .*; must be more than 0$"):
        health("auto", timeout_s)


def test_a_busy_router_is_not_asked_for_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    _found(monkeypatch, "nobody", ["llm", "token_router"], lambda: RouterStatus("serving", 4, 0, full=True))
    assert health("auto", 5.0) == "busy: 4 requests running, 0 waiting"


@pytest.mark.parametrize(
    ("later", "found"),
    [
        (RouterStatus("serving", 4, 1, full=True), "busy: 4 requests running, 1 waiting"),
        (RouterStatus("serving", 3, 0), None),
    ],
)
def test_a_router_that_got_busy_meanwhile(
    monkeypatch: pytest.MonkeyPatch, triton: FarTriton, later: RouterStatus, found: str | None
) -> None:
    """Others came between the question and the request."""

    def refused(self: FirstToken, timeout_s: float) -> None:
        raise UserError("the first token was not made: DEADLINE_EXCEEDED")

    runtime = SimpleNamespace(router=RouterConfig())
    monkeypatch.setattr(module.TokenRouterClient, "runtime", lambda self, timeout_s: runtime)
    monkeypatch.setattr(FirstToken, "make", refused)
    said = iter([RouterStatus("serving", 3, 0), later])
    _found(monkeypatch, triton.url, ["llm", "token_router"], lambda: next(said))
    if found is not None:
        assert health("auto", 5.0) == found
        return
    with pytest.raises(UserError, match=r"^the first token was not made"):
        health("auto", 5.0)


def test_a_triton_that_hangs_is_not_waited_for(triton: FarTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    triton.answers_late_s = 2.0
    _found(monkeypatch, triton.url, ["token_router"], lambda: RouterStatus("serving", 0, 0))
    with pytest.raises(UserError, match=r"^not serving: DEADLINE_EXCEEDED: "):
        health("auto", 0.2)


def test_a_silent_or_broken_router_is_not_serving(triton: FarTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> None:
        raise ControlError("token_router did not answer 'status'")

    _found(monkeypatch, triton.url, ["token_router"], silent)
    with pytest.raises(UserError, match=r"^not serving: token_router did not answer"):
        health("auto", 5.0)
    _found(monkeypatch, triton.url, ["token_router"], lambda: RouterStatus("serving", 0, 0))
    with pytest.raises(UserError, match=r"^not serving: .*another version"):
        health("auto", 5.0)
