# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter health` where no token is asked for, or none is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.token_router.far_triton import FarTriton, far_triton
from tools.commands import health as module
from tools.commands.health import health
from tools.control import ControlError
from tools.errors import UserError


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
    _found(monkeypatch, "nobody", ["llm", "token_router"], lambda: SimpleNamespace(queued=3))
    assert health("auto", 5.0) == "busy: 3 requests wait"


def test_a_silent_or_broken_router_is_not_serving(triton: FarTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> None:
        raise ControlError("token_router did not answer 'status'")

    _found(monkeypatch, triton.url, ["token_router"], silent)
    with pytest.raises(UserError, match=r"^not serving: token_router did not answer"):
        health("auto", 5.0)
    _found(monkeypatch, triton.url, ["token_router"], lambda: SimpleNamespace(queued=0))
    with pytest.raises(UserError, match=r"^not serving: .*another version"):
        health("auto", 5.0)
