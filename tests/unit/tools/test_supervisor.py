# SPDX-License-Identifier: Apache-2.0
"""The supervisor with a Triton and a token_router that only pretend: its order, its deadline, its end."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import supervisor as module
from tools.control import RouterStatus
from tools.deployment import Deployment
from tools.errors import UserError
from tools.run_directory import RunDirectory
from tools.supervisor import Supervisor, running_server


def deployment(**server: Any) -> Deployment:
    return Deployment.model_validate(
        {
            "models": [{"name": "slm", "engine": {"type": "paced"}}],
            "router": {"name": "single"},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0, **server},
        }
    )


class FakeTriton:
    """Ready at once, for ever alive, and without a model that failed."""

    grpc_url = "unused"

    def __init__(self, *_: object) -> None: ...

    def start(self, more: object = None) -> None: ...

    def is_ready(self) -> bool:
        return True

    def load_failure(self) -> None: ...

    def returncode(self) -> None: ...

    def unload(self, model: str) -> None: ...

    def stop(self) -> None: ...


class FakeControl:
    """Every model is up."""

    @classmethod
    def of(cls, run: Path) -> FakeControl:
        return cls()

    def status(self) -> RouterStatus:
        return RouterStatus("serving", 0, 0, {"slm": {"state": "up"}})

    def abort(self, reason: str) -> None: ...


class SilentToken:
    """A first token that isn't made until the connection closes."""

    def __init__(self, *_: object) -> None:
        self.closed = threading.Event()

    def __enter__(self) -> SilentToken:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()

    def make(self) -> None:
        self.closed.wait()


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "find_triton", lambda: None)
    for name, fake in {"TritonServer": FakeTriton, "ControlClient": FakeControl, "FirstToken": SilentToken}.items():
        monkeypatch.setattr(module, name, fake)


@pytest.mark.usefixtures("pretended")
def test_a_first_token_that_never_comes_ends_the_start(tmp_path: Path) -> None:
    supervisor = Supervisor(deployment(startup_timeout_s=0.3))
    with pytest.raises(
        UserError, match=r"^server\.startup_timeout_s: not serving after 0\.3 s: no token has been made"
    ):
        supervisor.start()
    supervisor.stop(drain=False)
    assert list(tmp_path.iterdir()) == []


def test_what_dead_runs_hold_is_given_back_before_the_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    run = SimpleNamespace(remove=lambda: done.append("remove"))

    def create() -> SimpleNamespace:
        done.append("clear")
        return run

    def refuse(_: Deployment) -> None:
        done.append("check")
        raise UserError("too little memory")

    monkeypatch.setattr(RunDirectory, "create", create)
    monkeypatch.setattr(module, "require_valid", refuse)
    with pytest.raises(UserError, match="too little memory"), running_server(deployment()):
        pass
    assert done == ["clear", "check", "remove"]


class InterruptedSupervisor:
    """Serves at once. While the clean-up waits for the end of its watch, and while it stops, `number` comes."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.quit = threading.Event()
        self.stopped = False

    def start(self) -> object:
        return object()

    def watch(self) -> None:
        self.quit.wait()
        time.sleep(0.05)
        os.kill(os.getpid(), self.number)
        time.sleep(0.05)

    def stop(self, *, drain: bool) -> None:
        os.kill(os.getpid(), self.number)
        self.stopped = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_during_the_clean_up_change_nothing(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    supervisor = InterruptedSupervisor(number)
    monkeypatch.setattr(module, "Supervisor", lambda *_: supervisor)
    before = signal.getsignal(number)
    with running_server(deployment()):
        pass
    assert supervisor.stopped
    assert signal.getsignal(number) is before


def test_a_signal_just_before_they_are_ignored_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    quit = threading.Event()
    fake = SimpleNamespace(start=object, watch=quit.wait, quit=quit, stop=lambda drain: stopped.append(drain))
    monkeypatch.setattr(module, "Supervisor", lambda *_: fake)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "on_signals", interrupted)
    with pytest.raises(KeyboardInterrupt), running_server(deployment()):
        pass
    assert stopped == [False]
