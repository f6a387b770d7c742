# SPDX-License-Identifier: Apache-2.0
"""What the watcher does about what it sees, with a Triton and a token_router that only pretend."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from routers import RouterConfig
from tools.control import ControlError, RouterStatus
from tools.triton_server import TritonError
from tools.watcher import ServerDied, Watcher


class FakeTriton:
    """stub: the process of token_router."""

    grpc_url = "unused"

    def __init__(self, stub: subprocess.Popen[bytes]) -> None:
        self.stub = stub
        self.ended = False
        self.refuses = False
        self.reloaded: list[str] = []

    def returncode(self) -> int | None:
        return 1 if self.ended else None

    def how_it_ended(self) -> str:
        return "it ended"

    def stub_pids(self) -> dict[str, int]:
        return {"token_router": self.stub.pid}

    def reload(self, model: str) -> None:
        if self.refuses:
            raise TritonError("no")
        self.reloaded.append(model)


class FakeControl:
    def __init__(self) -> None:
        self.states: dict[str, str] | None = {"slm": "up", "llm": "up"}

    def status(self) -> RouterStatus:
        if self.states is None:
            raise ControlError("silence")
        return RouterStatus("serving", 0, 0, {name: {"state": state} for name, state in self.states.items()})


class Scene:
    """A watcher, what it watches, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.woken = 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Watcher, "_wake_router", self._wake)
        self.triton = FakeTriton(subprocess.Popen(["sleep", "60"]))
        self.control = FakeControl()
        arguments: Any = (self.triton, self.control, RouterConfig())
        self.watcher = Watcher(*arguments)

    def _wake(self, *_: object) -> None:
        self.woken += 1

    def look_after(self, *seconds: float) -> list[str]:
        """What is reloaded by looks that come so much later, each."""
        before = len(self.triton.reloaded)
        for pause_s in seconds:
            self.now += pause_s
            self.watcher.look()
        return self.triton.reloaded[before:]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(monkeypatch)
    yield scene
    scene.triton.stub.kill()
    scene.triton.stub.wait()


def test_nothing_is_done_while_all_is_well(scene: Scene) -> None:
    assert scene.look_after(2, 100, 2) == []


def test_the_end_of_triton_is_told(scene: Scene) -> None:
    scene.triton.ended = True
    with pytest.raises(ServerDied, match="it ended"):
        scene.watcher.look()


def test_a_dead_router_is_reloaded_and_woken_at_once(scene: Scene) -> None:
    scene.triton.stub.kill()
    psutil.wait_procs([psutil.Process(scene.triton.stub.pid)], timeout=5)
    assert scene.look_after(0) == ["token_router"]
    assert scene.woken == 1


def test_a_router_that_hangs_is_killed_and_reloaded(scene: Scene) -> None:
    scene.control.states = None
    assert scene.look_after(2, 29) == []
    assert scene.look_after(2) == ["token_router"]
    assert scene.triton.stub.wait(5) != 0


def test_a_router_that_hangs_and_dies_just_before_it_is_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(process: psutil.Process) -> None:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "kill", gone)
    scene.control.states = None
    assert scene.look_after(2, 31) == ["token_router"]


@pytest.mark.parametrize("state", ["down", "reloading", "starting"])
def test_a_model_that_is_not_up_is_left_to_the_router_and_logged_once(
    scene: Scene, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    scene.control.states = {"slm": "up", "llm": state}
    with caplog.at_level(logging.INFO, logger="tokenrouter"):
        assert scene.look_after(2, 40, 40) == []
        scene.control.states = {"slm": "up", "llm": "up"}
        assert scene.look_after(2, 2) == []
    assert [record.getMessage() for record in caplog.records] == [
        "llm does not answer",
        "llm answers again after 82.0 s",
    ]


def test_a_reload_that_fails_is_tried_again(scene: Scene) -> None:
    scene.control.states = None
    scene.triton.refuses = True
    assert scene.look_after(2, 31) == []
    scene.triton.stub.wait(5)  # it was killed, which takes its time
    scene.triton.refuses = False
    scene.control.states = {"slm": "up"}
    assert scene.look_after(2) == ["token_router"]
