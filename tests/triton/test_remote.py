# SPDX-License-Identifier: Apache-2.0
"""An LLM on another host: a second Triton in a network namespace of its own, behind a link with a delay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from perf.far_host import FarHost, far_host, why_not
from perf.far_server import FarServer, far_server, with_far_models
from tests.triton.servers import Background, assert_clean_and_serving, paced_deployment, wait_until
from tools.client import Answer, TokenRouterClient
from tools.deployment import Deployment
from tools.errors import UserError
from tools.supervisor import RunningServer, running_server

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(why_not() is not None, reason=f"no network namespace here: {why_not()}"),
]

END_S = 40.0
PROMPTS = [[1 + i, 5, 9] * (1 + 7 * i) for i in range(4)]


def _tritonserver_and_stub(server: FarServer) -> tuple[psutil.Process, psutil.Process]:
    found = psutil.Process(server.process.pid).children(recursive=True)
    found = [p for p in found if p.status() != psutil.STATUS_ZOMBIE]  # Triton doesn't wait for a dead stub
    (triton,) = (p for p in found if p.name() == "tritonserver")
    (stub,) = (p for p in found if "stub" in p.name())
    return triton, stub


class Pair:
    """The server of token_router and the SLM, here, and that of the LLM, far away."""

    def __init__(self, far: FarHost, config: Path, llm: FarServer, server: RunningServer) -> None:
        self.far = far
        self.llm = llm
        self.server = server
        self._config = config

    def start_llm_again(self) -> None:
        self.llm = FarServer(self.far, self._config, "llm")

    def llm_status(self) -> dict[str, Any]:
        return self.server.control.status().models["llm"]

    def until_up(self) -> None:
        wait_until("the LLM up", lambda: self.llm_status()["state"] == "up", 20)


@contextmanager
def pair_of(deployment: Deployment, one_way_ms: float, folder: Path) -> Iterator[Pair]:
    """The deployment with its LLM on a far host."""
    config = folder / "far.yaml"
    limits = deployment.limits.model_copy(update={"silence_s": 1.5})
    with far_host(one_way_ms) as far:
        given = with_far_models(deployment.model_copy(update={"limits": limits}), far, ["llm"])
        with far_server(given, far, config, "llm") as llm, running_server(given) as server:
            pair = Pair(far, config, llm, server)
            try:
                yield pair
            finally:
                far.mend()
                pair.llm.end()


def _answers(server: RunningServer) -> list[Answer]:
    """All prompts at once."""

    def one(prompt: list[int]) -> Answer:
        with TokenRouterClient(server.grpc_url) as client:
            return Answer.of(client.generate(input_ids=prompt, max_tokens=40, ignore_eos=True, timeout_s=60))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, PROMPTS))


@pytest.fixture(scope="module")
def alone(tiny_deployment: Deployment) -> list[Answer]:
    """What one host with both models answers."""
    with running_server(tiny_deployment) as server:
        return _answers(server)


@pytest.fixture(scope="module")
def tiny_pair(tiny_deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(tiny_deployment, 0, tmp_path_factory.mktemp("far")) as pair:
        yield pair


@pytest.mark.parametrize("one_way_ms", [0, 1, 5])
def test_the_tokens_are_those_of_one_host(one_way_ms: float, alone: list[Answer], tiny_pair: Pair) -> None:
    tiny_pair.far.delay(one_way_ms)
    # the quickest of the last heartbeats, so that those before the change have to pass
    wait_until("the round trip measured", lambda: tiny_pair.llm_status()["round_trip_ms"] > 2 * one_way_ms)
    there = _answers(tiny_pair.server)
    assert [answer.ids for answer in there] == [answer.ids for answer in alone]
    assert [answer.models for answer in there] == [answer.models for answer in alone]
    assert {model for answer in there for model in answer.models} == {"slm", "llm"}
    assert_clean_and_serving(tiny_pair.server)


@pytest.fixture(scope="module")
def paced_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(paced_deployment(), 1, tmp_path_factory.mktemp("far")) as pair:
        yield pair


def _ends_unavailable(request: Background) -> None:
    request.join(10)
    assert request.error is not None and request.error.status is grpc.StatusCode.UNAVAILABLE
    assert "model 'llm' went down" in request.error.message


def _running(pair: Pair) -> Background:
    """A request that the LLM has a part in."""
    request = Background(pair.server.grpc_url, input_ids=[1, 2, 3], max_tokens=4000)
    wait_until("tokens of the LLM", lambda: "llm" in request.answer.models)
    return request


def test_a_far_server_that_is_killed_and_started_again(paced_pair: Pair) -> None:
    request = _running(paced_pair)
    _tritonserver_and_stub(paced_pair.llm)[0].kill()
    _ends_unavailable(request)
    assert paced_pair.llm.process.wait(END_S) == 1
    wait_until("the LLM down", lambda: paced_pair.llm_status()["state"] == "down")
    assert paced_pair.far.address in paced_pair.llm_status()["problem"]
    paced_pair.llm.end()
    paced_pair.start_llm_again()
    paced_pair.until_up()
    assert_clean_and_serving(paced_pair.server, input_ids=[1, 2], max_tokens=20)


def test_a_far_llm_that_is_killed_is_loaded_again_by_its_own_host(paced_pair: Pair) -> None:
    request = _running(paced_pair)
    _tritonserver_and_stub(paced_pair.llm)[1].kill()
    _ends_unavailable(request)
    paced_pair.until_up()
    assert_clean_and_serving(paced_pair.server, input_ids=[1, 2], max_tokens=20)


def test_health_on_either_host(paced_pair: Pair) -> None:
    command = [str(Path(sys.executable).with_name("tokenrouter")), "health", "--server"]
    here = subprocess.run([*command, str(paced_pair.server.pid)], capture_output=True, text=True, check=False)
    assert (here.returncode, here.stdout) == (0, "a token was made\n")
    triton, _ = _tritonserver_and_stub(paced_pair.llm)
    there = [*paced_pair.far.command, *command, str(triton.pid)]
    far = subprocess.run(there, capture_output=True, text=True, check=False)
    assert (far.returncode, far.stdout) == (0, "llm loaded\n")
    near = subprocess.run(there[4:], capture_output=True, text=True, check=False)  # where nobody listens at its port
    assert near.returncode == 1 and near.stderr.startswith("tokenrouter: not serving: ")


def test_a_cut_line_is_noticed_and_mended(paced_pair: Pair) -> None:
    """Nobody is told: no packet says that the other side is gone."""
    request = _running(paced_pair)
    paced_pair.far.cut()
    _ends_unavailable(request)
    wait_until("the LLM down", lambda: paced_pair.llm_status()["state"] == "down")
    paced_pair.far.mend()
    paced_pair.until_up()
    assert_clean_and_serving(paced_pair.server, input_ids=[1, 2], max_tokens=20)


def test_a_far_server_without_the_model_is_named(tmp_path: Path) -> None:
    """A tritonserver is there, but it serves another deployment."""
    with far_host(0) as far:
        given = with_far_models(paced_deployment(), far, ["llm"])
        patience = given.server.model_copy(update={"startup_timeout_s": 16.0})
        given = given.model_copy(update={"server": patience})
        another = [given.models[0], given.models[1].model_copy(update={"name": "another"})]
        theirs = given.model_copy(update={"models": another})
        with far_server(theirs, far, tmp_path / "far.yaml", "another"):
            started = running_server(given)
            with pytest.raises(UserError, match=rf"llm is starting: .*{far.address}:8001: .*llm"), started:
                pass


def test_a_far_llm_that_hangs_is_ended_by_its_own_host(tmp_path: Path) -> None:
    """Nobody here can end it; there, calls wait for it and none ends."""
    deployment = paced_deployment(
        steps_ms=(5.0, 600_000.0),
        router={"name": "random", "params": {"p": 0.0}},
        batching={"llm_prefill": "lazy"},
        limits={"step_timeout_s": 2.0},
    )
    with pair_of(deployment, 0, tmp_path) as pair:
        _, before = _tritonserver_and_stub(pair.llm)
        hangs = Background(pair.server.grpc_url, input_ids=[1, 2], max_tokens=5, router_params={"p": 1.0})
        goes_on = Background(pair.server.grpc_url, input_ids=[3, 4], max_tokens=100)
        for request in (hangs, goes_on):
            request.join(20)
        assert hangs.error is not None and hangs.error.status is grpc.StatusCode.UNAVAILABLE
        assert "model 'llm' went down" in hangs.error.message and "a step took longer than" in hangs.error.message
        assert goes_on.error is None and len(goes_on.answer.ids) == 100  # it never was there
        pair.until_up()
        assert _tritonserver_and_stub(pair.llm)[1] != before
        assert_clean_and_serving(pair.server)
