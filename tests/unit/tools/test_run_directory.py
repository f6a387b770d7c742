# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind, and that the next one clears it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tools.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def run() -> Iterator[RunDirectory]:
    run = RunDirectory.create()
    yield run
    run.remove()


def stub_of(run: RunDirectory) -> subprocess.Popen[bytes]:
    """A process that runs a file of the run's folder, as a stub does."""
    stub = run.path / "stub"
    stub.symlink_to("/bin/sleep")
    return subprocess.Popen([str(stub), "60"])


def test_removing_ends_the_processes_and_the_shared_memory(run: RunDirectory) -> None:
    stub = stub_of(run)
    region = Path("/dev/shm") / f"{run.shm_prefix}1"
    region.write_bytes(b"")
    reader = subprocess.Popen(["tail", "-f", str(run.path / "lock")])  # names the folder, is not of the run
    try:
        assert [p.pid for p in run.processes()] == [stub.pid]
        run.remove()
        stub.wait(5)
        assert reader.poll() is None
    finally:
        reader.kill()
        reader.wait()
    assert not region.exists() and not run.path.exists()


def test_a_run_whose_supervisor_was_killed_is_cleared_by_the_next(tmp_path: Path) -> None:
    code = "import os; from tools.run_directory import RunDirectory; print(RunDirectory.create().path, flush=True)"
    killed = subprocess.run(
        [sys.executable, "-c", f"{code}; os.kill(os.getpid(), 9)"],
        env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    dead = RunDirectory(Path(killed.stdout.strip()))
    stub = stub_of(dead)
    RunDirectory.create().remove()
    stub.wait(5)
    assert not dead.path.exists()


def test_a_process_with_the_number_of_an_earlier_one_is_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = stub_of(run)
    (kept,) = (process for process in psutil.process_iter() if process.pid == stub.pid)
    monkeypatch.setattr(kept, "_ident", (stub.pid, 1.0))  # as if it had been there since 1970
    with pytest.raises(psutil.NoSuchProcess):
        kept.kill()
    run.remove()
    stub.wait(5)


def test_a_folder_without_a_lock_stays(tmp_path: Path) -> None:
    (tmp_path / "tokenrouter-x").mkdir()
    RunDirectory.create().remove()
    assert (tmp_path / "tokenrouter-x").exists()


def test_a_run_that_goes_on_stays(run: RunDirectory) -> None:
    RunDirectory.create().remove()
    assert run.path.exists()
