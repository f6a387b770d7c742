# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter profile` on a server that it starts and on one that runs, and `threshold --server`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from python_backends.token_router.threshold.profile import Profile
from tests.triton.servers import paced_deployment
from tools.commands.options import MeasureOptions
from tools.commands.profile import profile
from tools.errors import UserError
from tools.running import find_server
from tools.supervisor import running_server

pytestmark = pytest.mark.triton

COMMAND = Path(sys.executable).with_name("tokenrouter")


def sound(path: Path, p: float, steps_ms: tuple[float, float]) -> Profile:
    """The profile in the file, which is of two paced models with a random router between them."""
    found = Profile.model_validate_json(path.read_bytes())
    assert found.models == ["slm", "llm"]
    assert found.p[0][1] == pytest.approx(p, abs=0.08)
    assert found.p[1] == [1.0, 0.0]
    assert found.c == [[1.0, 0.0], [1.0, 0.0]]
    for latency, ms in zip(found.latency, steps_ms, strict=True):
        assert latency.ms(1) == pytest.approx(ms, rel=0.5)
        assert latency.ms(1) >= ms
    return found


def test_a_deployment_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    profile("paced", output, MeasureOptions(concurrency=[1, 4], seconds=3.0, max_tokens=64))
    found = sound(output, 0.35, (6.0, 27.9))
    assert {1, 4} <= set(found.latency[1].batch_ms)  # the LLM has stepped alone, and with all of them
    best = subprocess.run(
        [COMMAND, "threshold", output, "--concurrency", "4", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(best.stdout)["best"][0] == 1


def test_a_running_server_is_measured_and_asked(tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    with running_server(paced_deployment((6.0, 27.9))) as server:
        assert find_server(str(server.pid)).grpc_url == server.grpc_url
        with pytest.raises(UserError, match="too little traffic yet"):
            subprocess_threshold(server.pid)
        profile("paced", output, MeasureOptions(server=str(server.pid), concurrency=[2], seconds=5.0, max_tokens=64))
        sound(output, 0.3, (6.0, 27.9))
        told = json.loads(subprocess_threshold(server.pid))
        assert set(told["throughput"]) == {"1,1", "1,2", "2,1"}


def subprocess_threshold(pid: int) -> str:
    command = [COMMAND, "threshold", "--server", str(pid), "--concurrency", "2", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise UserError(ran.stderr)
    return ran.stdout
