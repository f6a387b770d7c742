# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter serve` with a supervisor that only pretends: what signals and a lost terminal come to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tools.commands import serve as module
from tools.deployment import load_deployment

URLS = {"grpc_url": "g", "http_url": "h", "metrics_url": "m", "log_path": "l"}


class FakeSupervisor:
    """Is sent the first of `numbers` while it watches and the others while it drains."""

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self.deployment = load_deployment("paced")
        self.quit = threading.Event()
        self.hurry = threading.Event()
        self.numbers = numbers
        self.stopped: list[bool] = []

    def start(self) -> Any:
        return SimpleNamespace(deployment=self.deployment, **URLS)

    def watch(self) -> None:
        os.kill(os.getpid(), self.numbers[0])
        assert self.quit.wait(5)

    def stop(self, *, drain: bool) -> None:
        for number in self.numbers[1:]:
            os.kill(os.getpid(), number)
        self.hurry.wait(5 if signal.SIGINT in self.numbers[1:] else 0.1)
        self.stopped.append(drain)


def served(monkeypatch: pytest.MonkeyPatch, *numbers: signal.Signals) -> FakeSupervisor:
    supervisor = FakeSupervisor(numbers)
    monkeypatch.setattr(module, "Supervisor", lambda *_: supervisor)
    module.serve("paced", None)
    return supervisor


@pytest.mark.parametrize(
    ("numbers", "hurried"),
    [
        ((signal.SIGTERM,), False),
        ((signal.SIGHUP,), False),
        ((signal.SIGTERM, signal.SIGTERM, signal.SIGHUP), False),
        ((signal.SIGINT, signal.SIGINT), True),
    ],
)
def test_signals_end_it_once_and_a_second_ctrl_c_ends_the_drain(
    monkeypatch: pytest.MonkeyPatch, numbers: tuple[signal.Signals, ...], hurried: bool
) -> None:
    before = [signal.getsignal(number) for number in numbers]
    supervisor = served(monkeypatch, *numbers)
    assert supervisor.stopped == [True]
    assert supervisor.hurry.is_set() == hurried
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_terminal_that_is_gone_keeps_nothing_from_being_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Console.print

    def lost(self: Console, *texts: Any, **options: Any) -> None:
        if "stopping" in str(texts):
            raise OSError(5, "Input/output error")
        shown(self, *texts, **options)

    monkeypatch.setattr(Console, "print", lost)
    assert served(monkeypatch, signal.SIGHUP).stopped == [True]
