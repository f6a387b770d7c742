# SPDX-License-Identifier: Apache-2.0
"""Before the response thread: streams gather for a moment, and the thread is woken once for all of them."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def outbox_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    monkeypatch.delitem(sys.modules, "python_backends.token_router.response_thread", raising=False)
    from python_backends.token_router.response_thread import Outbox

    return Outbox


def test_streams_gather_and_wake_the_thread_once(outbox_class: Any) -> None:
    async def run() -> None:
        woken: list[Any] = []
        outbox = outbox_class(SimpleNamespace(wake=lambda *streams: woken.append(streams)), asyncio.get_running_loop())
        outbox.put("a")
        outbox.put("b")
        assert woken == []
        await asyncio.sleep(0.05)
        assert woken == [("a", "b")]
        outbox.put("c")
        await asyncio.sleep(0.05)
        assert woken == [("a", "b"), ("c",)]

    asyncio.run(run())


def test_a_flush_waits_for_nothing(outbox_class: Any) -> None:
    async def run() -> None:
        woken: list[Any] = []
        outbox = outbox_class(SimpleNamespace(wake=lambda *streams: woken.extend(streams)), asyncio.get_running_loop())
        outbox.put("a")
        outbox.flush()
        assert woken == ["a"]
        await asyncio.sleep(0.05)
        assert woken == ["a"]

    asyncio.run(run())
