# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter demo` as a person starts it, with tiny models on a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.triton.servers import wait_until
from tools.deployment import Deployment
from tools.run_directory import RunDirectory

pytestmark = pytest.mark.triton

COMMAND = Path(sys.executable).with_name("tokenrouter")
END_S = 60.0


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The demo's own /tmp, in which it makes the folder of its run."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


@pytest.fixture
def demo(tiny_deployment: Deployment, temporary: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The demo under way, its output in a pipe."""
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny_deployment.model_dump(mode="json")))
    with subprocess.Popen(
        [COMMAND, "demo", config, "--max-tokens", "8", "--question", "Why?"],
        env=os.environ | {"TMPDIR": str(temporary), "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.terminate()


def run_in(temporary: Path) -> tuple[RunDirectory, list[psutil.Process]]:
    """The run that the demo has begun, and its processes: tritonserver and three models."""
    (path,) = wait_until("the run's folder", lambda: list(temporary.glob("tokenrouter-*")), END_S)
    run = RunDirectory(path)
    return run, wait_until("the run's processes", lambda: p if len(p := run.processes()) == 4 else None, END_S)


def assert_nothing_left(run: RunDirectory, processes: list[psutil.Process]) -> None:
    assert not any(process.is_running() for process in processes)
    assert run.processes() == []
    assert not list(Path("/dev/shm").glob(f"{run.shm_prefix}*"))
    assert not run.path.exists()


def test_it_shows_both_models_and_leaves_nothing(demo: subprocess.Popen[str], temporary: Path) -> None:
    run, processes = run_in(temporary)
    shown, errors = demo.communicate(timeout=END_S)
    assert (demo.returncode, errors) == (0, "")
    for part in ("slm + llm: Why?", "slm alone: the same question", "llm alone: the same question", "by slm", "by llm"):
        assert part in shown
    rows = {line.split(" alone")[0].strip("│ "): line for line in shown.splitlines() if " alone " in line}
    assert "(100%)" in rows["slm"] and "(100%)" in rows["llm"]
    assert shown.endswith("shutting down ...\n")
    assert_nothing_left(run, processes)


def test_sigterm_twice_leaves_nothing(demo: subprocess.Popen[str], temporary: Path) -> None:
    run, processes = run_in(temporary)
    demo.terminate()
    time.sleep(0.001)  # as it comes from make, which hands its own on
    demo.terminate()
    demo.communicate(timeout=END_S)
    assert demo.returncode == 128 + signal.SIGTERM
    assert_nothing_left(run, processes)
