# SPDX-License-Identifier: Apache-2.0
"""What tritonserver is told, with a program that only notes it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.deployment import ServerConfig
from tools.triton_server import TritonServer


def server(folder: Path, *, in_turn: bool = False, **config: Any) -> TritonServer:
    """One with a stand-in for the program: it writes its arguments into the log."""
    program = folder / "tritonserver"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    install: Any = SimpleNamespace(binary=program, environment=dict, make_backend_directory=lambda _: None)
    run: Any = SimpleNamespace(path=folder, shm_prefix="x")
    return TritonServer(install, run, ServerConfig(**config), in_turn=in_turn)


@pytest.mark.parametrize("in_turn", [True, False])
def test_models_of_one_gpu_load_one_after_another(tmp_path: Path, in_turn: bool) -> None:
    triton = server(tmp_path, in_turn=in_turn)
    triton.start()
    while triton.returncode() is None:
        time.sleep(0.01)
    assert ("--model-load-thread-count=1" in triton.log_path.read_text().split()) == in_turn


@pytest.mark.parametrize(("startup_s", "load_s"), [(900.0, 900.0), (5.0, 60.0)])
def test_a_model_may_take_as_long_to_load_again_as_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, startup_s: float, load_s: float
) -> None:
    asked: list[tuple[str, float]] = []

    def http(_: TritonServer, method: str, path: str, timeout_s: float) -> tuple[int, str]:
        asked.append((path.rsplit("/", 1)[1], timeout_s))
        return 200, ""

    monkeypatch.setattr(TritonServer, "_http", http)
    server(tmp_path, startup_timeout_s=startup_s).reload("llm")
    assert asked == [("unload", 60.0), ("load", load_s)]
