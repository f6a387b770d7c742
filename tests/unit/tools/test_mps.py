# SPDX-License-Identifier: Apache-2.0
"""The MPS daemon of a run, with a control program that only pretends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools import supervisor as module
from tools.deployment import Deployment
from tools.errors import UserError
from tools.mps import Mps
from tools.run_directory import RunDirectory
from tools.sizing.sharing import shares_a_gpu
from tools.supervisor import Supervisor

GPU = {"type": "llama_cpp", "weights": "w.gguf", "gpu_layers": -1}
CPU = {"type": "llama_cpp", "weights": "w.gguf"}
TRT = {"type": "tensorrt_llm", "weights": "w"}
STOCK = {"type": "tensorrtllm", "engine_dir": "e"}


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with a program that notes what it is told, and stays in the background when it is a daemon.
    `fails` in it makes it fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(
        f"#!/bin/sh\n[ -e {folder}/fails ] && {{ echo 'no GPU' >&2; exit 1; }}\n"
        'told="start $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY$CUDA_VISIBLE_DEVICES"\n'
        f'if [ "$1" = -d ]; then echo "$told" >> {folder}/told;'
        f" sleep 60 & echo $! > {folder}/pid; else cat >> {folder}/told; kill $(cat {folder}/pid); fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def test_it_is_started_and_ended_once(control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # of its clients; a daemon that had it would renumber the GPUs
    mps = Mps(tmp_path / "mps")
    mps.start()
    pid = int((control / "pid").read_text())
    os.kill(pid, 0)  # it runs
    assert all(Path(folder).is_dir() for folder in mps.environment.values())
    mps.stop()
    mps.stop()
    pipe, log = mps.environment["CUDA_MPS_PIPE_DIRECTORY"], mps.environment["CUDA_MPS_LOG_DIRECTORY"]
    assert (control / "told").read_text() == f"start {pipe} {log}\nquit\n"


def test_one_that_cannot_start_says_why(control: Path, tmp_path: Path) -> None:
    (control / "fails").touch()
    mps = Mps(tmp_path / "mps")
    with pytest.raises(UserError, match=r"^server\.mps: nvidia-cuda-mps-control -d failed: no GPU$"):
        mps.start()
    mps.stop()
    assert not (control / "told").exists()


def test_one_that_never_answers_is_not_waited_for_without_end(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (control / "nvidia-cuda-mps-control").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("tools.mps._TIMEOUT_S", 0.2)
    mps = Mps(tmp_path / "mps")
    with pytest.raises(UserError, match=r"^server\.mps: nvidia-cuda-mps-control -d failed: .* timed out"):
        mps.start()
    mps.stop()


def test_without_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^server\.mps: true; there is no nvidia-cuda-mps-control on PATH"):
        Mps(tmp_path / "mps").start()


def test_it_ends_after_the_processes_that_use_it(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = RunDirectory.create()
    run.mps.start()
    (run.path / "stub").symlink_to("/bin/sleep")
    stub = subprocess.Popen([str(run.path / "stub"), "60"])
    program = control / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\nkill -0 {stub.pid} && echo in use >> {control}/told\n" + program.read_text())
    run.remove()
    assert (control / "told").read_text().splitlines()[1:] == ["quit"]
    stub.wait(5)


def test_the_next_run_ends_that_of_a_supervisor_that_was_killed(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = (
        "import os; from tools.run_directory import RunDirectory\n"
        "run = RunDirectory.create(); run.mps.start(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", killed], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    assert psutil.pid_exists(int((control / "pid").read_text()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    RunDirectory.create().remove()
    assert (control / "told").read_text().splitlines()[1:] == ["quit"]
    assert not list(tmp_path.glob("tokenrouter-*"))


@pytest.mark.parametrize(
    ("engines", "devices", "shared"),
    [
        ([GPU, TRT], None, True),  # nobody says where they are
        ([GPU, CPU], None, False),
        ([{"type": "paced"}, TRT], None, False),
        ([TRT, TRT], None, True),  # the first GPU, both
        ([TRT, TRT], [["gpu0"], ["gpu1"]], True),  # what `memory` calls them moves none
        ([TRT, {**TRT, "gpu_device_ids": [1]}], [["gpu0"], ["gpu1"]], False),
        ([TRT, {**TRT, "gpu_device_ids": [1]}], None, False),
        ([{**STOCK, "gpu_device_ids": [2, 1]}, {**TRT, "gpu_device_ids": [1]}], None, True),
        ([STOCK, {**TRT, "tensor_parallel": 2}], None, True),
        ([{**TRT, "gpu_device_ids": [1]}, GPU], None, True),  # llama.cpp spreads over all that it sees
        ([CPU, TRT], [["gpu0"], ["gpu0"]], False),
    ],
)
def test_who_shares_a_gpu(engines: list[dict[str, Any]], devices: list[list[str]] | None, shared: bool) -> None:
    models = [{"name": f"m{i}", "engine": engine} for i, engine in enumerate(engines)]
    given: dict[str, Any] = {"models": models}
    if devices is not None:
        for model, names in zip(models, devices, strict=True):
            model["devices"] = names
        given["memory"] = {"devices": {"gpu0": "40GiB", "gpu1": "40GiB"}}
    deployment = Deployment.model_validate(given)
    assert shares_a_gpu(deployment) == shared


def test_a_model_on_another_host_shares_none() -> None:
    models = [{"name": "slm", "engine": TRT}, {"name": "llm", "engine": TRT, "url": "gpu2:8001"}]
    assert not shares_a_gpu(Deployment.model_validate({"models": models}))


class FakeTriton:
    """Notes the environment that it is started with, and never gets ready."""

    grpc_url = "unused"

    in_turn: object = None

    def __init__(self, *_: object) -> None:
        self.environment: Mapping[str, str] | None = None

    def told(self, *how: object) -> FakeTriton:
        """As the supervisor makes one."""
        self.in_turn = how[-1]
        return self

    def start(self, more: Mapping[str, str] | None = None) -> None:
        self.environment = more

    def is_ready(self) -> bool:
        return False

    def load_failure(self) -> str:
        return "enough seen"

    def stop(self) -> None: ...


@pytest.mark.parametrize("shared", [True, False])
def test_the_supervisor_starts_it_for_models_that_share_and_ends_it(
    control: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    triton = FakeTriton()
    monkeypatch.setattr(module, "find_triton", lambda: None)
    monkeypatch.setattr(module, "TritonServer", triton.told)
    monkeypatch.setattr(module, "shares_a_gpu", lambda _: shared)
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    given = {"models": [{"name": "slm", "engine": {"type": "paced"}}], "router": {"name": "single"}}
    supervisor = Supervisor(Deployment.model_validate({**given, "server": {**ports, "mps": True}}))
    with pytest.raises(UserError, match="enough seen"):
        supervisor.start()
    supervisor.stop(drain=False)
    assert triton.in_turn is shared  # they load one after another
    if shared:
        assert triton.environment is not None
        pipe, log = triton.environment["CUDA_MPS_PIPE_DIRECTORY"], triton.environment["CUDA_MPS_LOG_DIRECTORY"]
        assert (control / "told").read_text() == f"start {pipe} {log}\nquit\n"
    else:
        assert triton.environment is None and not (control / "told").exists()
