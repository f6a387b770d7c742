# SPDX-License-Identifier: Apache-2.0
"""The supervisor's side of the control socket, against a server that gives chosen answers."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from python_backends.token_router.control import CONTROL_SOCKET
from tools.control import ControlClient, ControlError


@contextmanager
def answering(path: Path, answer: Callable[[dict[str, Any]], bytes]) -> Iterator[None]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(answer(json.loads(self.rfile.readline())))

    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield
        server.shutdown()


def test_the_status_is_read(tmp_path: Path) -> None:
    models = {"slm": {"state": "up", "sessions": 2}, "llm": {"state": "reloading"}}
    reply = {"ok": True, "state": "serving", "live": 2, "queued": 1, "models": models}
    reply |= {"max_live": 4, "full": True, "controller": None}
    with answering(tmp_path / CONTROL_SOCKET, lambda question: json.dumps(reply).encode() + b"\n"):
        status = ControlClient.of(tmp_path).status()
    assert (status.state, status.live, status.queued, status.full) == ("serving", 2, 1, True)
    assert status.models["slm"]["sessions"] == 2
    assert status.not_up() == {"llm": "reloading"}


def test_what_is_asked(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def note(question: dict[str, Any]) -> bytes:
        asked.append(question)
        return b'{"ok": true}\n'

    path = tmp_path / "control.sock"
    with answering(path, note):
        ControlClient(path).drain()
        ControlClient(path).abort("bye")
    assert asked == [{"op": "drain"}, {"op": "abort", "reason": "bye"}]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b'{"ok": false, "error": "no"}\n', "refused 'status': .*no"),
        (b'{"ok": true, "state": "serving"}\n', "status lacks 'live'"),
        (b"[]\n", "refused 'status'"),
        (b"half an ans", "did not answer 'status'"),
        (b"", "did not answer 'status'"),
    ],
)
def test_a_bad_answer_is_an_error(tmp_path: Path, reply: bytes, message: str) -> None:
    path = tmp_path / "control.sock"
    with answering(path, lambda question: reply), pytest.raises(ControlError, match=message):
        ControlClient(path).status()


def test_no_socket_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match=r"did not answer 'status': .*No such file"):
        ControlClient(tmp_path / "control.sock").status()


def test_silence_is_an_error(tmp_path: Path) -> None:
    path, hold = tmp_path / "control.sock", threading.Event()

    def silent(question: dict[str, Any]) -> bytes:
        hold.wait(10)
        return b""

    with answering(path, silent):
        with pytest.raises(ControlError, match="timed out"):
            ControlClient(path, timeout_s=0.05).status()
        hold.set()
