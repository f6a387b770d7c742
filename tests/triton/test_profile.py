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

# by sessions: what a step may take beside a paced engine, or this part of its time; 0.5 ms where nothing else runs
BESIDE_ENGINE_MS = {1: 1.5, 4: 3.0}
BESIDE_ENGINE = 0.3
COMMAND = Path(sys.executable).with_name("tokenrouter")


def sound(path: Path, p: float, steps_ms: tuple[float, float], token_ms: float = 0.0) -> Profile:
    """The profile in the file, which is of two paced models with a random router between them. token_ms: of each
    token of a suffix beyond one, of both. The SLM gets the LLM's token and no more, so that its own can't be told."""
    found = Profile.model_validate_json(path.read_bytes())
    assert found.models == ["slm", "llm"]
    assert found.p[0][1] == pytest.approx(p, abs=0.08)
    assert found.p[1] == [1.0, 0.0]
    assert found.c == [[1.0, 0.0], [1.0, 0.0]]
    slm, llm = found.latency
    for latency, ms in zip((slm, llm), steps_ms, strict=True):
        for sessions, more_ms in BESIDE_ENGINE_MS.items():
            assert 0.99 * ms <= latency.ms(sessions) <= ms + max(more_ms, BESIDE_ENGINE * ms)
    assert llm.token_ms == pytest.approx(token_ms, abs=0.06)
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


def test_what_a_suffix_token_costs_is_measured(tmp_path: Path) -> None:
    """0.2 ms for each of the tokens that the SLM has written since the LLM's last step."""
    config, output = tmp_path / "deployment.yaml", tmp_path / "profile.json"
    deployment = paced_deployment((6.0, 27.9), {"name": "random", "params": {"p": 0.2}}, prefill_token_ms=0.2)
    config.write_text(deployment.model_dump_json(exclude_unset=True))
    profile(str(config), output, MeasureOptions(concurrency=[1, 4], seconds=4.0, max_tokens=64))
    sound(output, 0.2, (6.0, 27.9), token_ms=0.2)


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
