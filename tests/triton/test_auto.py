# SPDX-License-Identifier: Apache-2.0
"""`batching: auto` and the metrics on a real server."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.solve import evaluate, solve
from tests.triton.servers import Background, assert_clean_and_serving, paced_deployment, wait_until
from tools.supervisor import RunningServer, running_server

pytestmark = pytest.mark.triton

STEPS_MS = (6.0, 27.9)
P = 0.5
LIVE = 4


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    router = {"name": "random", "params": {"p": P}}
    with running_server(paced_deployment(STEPS_MS, router=router, batching={"threshold": "auto"})) as running:
        yield running


@contextmanager
def load(server: RunningServer, count: int = LIVE) -> Iterator[list[Background]]:
    clients = [Background(server.grpc_url, input_ids=[n + 3], max_tokens=4000) for n in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            client.generation.cancel()
            client.join()


def controller(server: RunningServer) -> dict[str, Any]:
    found = server.control.status().controller
    assert found is not None
    return found


def threshold(server: RunningServer) -> tuple[int, ...]:
    return tuple(model["threshold"] for model in server.control.status().models.values())


def workers(server: RunningServer) -> list[psutil.Process]:
    """The solver's process, a child of token_router's."""
    return psutil.Process(server.stub_pids()["token_router"]).children()


def metrics(server: RunningServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as response:
        text = response.read().decode()
    lines = re.findall(r"^(tokenrouter_\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def test_it_applies_what_the_solver_says_of_what_it_measured(server: RunningServer) -> None:
    with load(server):
        status = wait_until("a solution", lambda: (s := controller(server))["thresholds"].get(str(LIVE)) and s, 30)
        wait_until("B is applied", lambda: threshold(server) != (1, 1))
        profile = Profile.model_validate(status["profile"])
        assert profile.p[0][1] == pytest.approx(P, abs=0.25)
        assert profile.p[1] == [1.0, 0.0]
        assert profile.latency[0].ms(1) >= STEPS_MS[0]
        measured = Profile.model_validate(server.control.traffic()["profile"])
        best = solve(measured, LIVE)
        applied = evaluate(measured, LIVE, threshold(server)).throughput
        assert applied >= 0.95 * best.steady.throughput  # it may have been solved for the traffic of before
        assert applied > evaluate(measured, LIVE, (1, 1)).throughput
        applied_b, latency = 'tokenrouter_threshold{model="llm"}', 'tokenrouter_step_latency_seconds{model="llm"}'

        def all_told() -> dict[str, float] | None:
            """They are told one after the other: a scrape may come in between."""
            m = metrics(server)
            there = latency in m and m["tokenrouter_solves_total"] >= 1 <= m["tokenrouter_threshold_changes_total"]
            return m if there and m[applied_b] == threshold(server)[1] > 1 else None

        told = wait_until("the metrics", all_told)
    assert told["tokenrouter_requests_live"] == LIVE
    assert told["tokenrouter_predicted_tokens_per_second"] > 50
    assert told['tokenrouter_routing_probability{from="slm",to="llm"}'] == pytest.approx(P, abs=0.25)
    assert told[latency] >= STEPS_MS[1] / 1000


def test_the_metrics_agree_with_what_clients_got(server: RunningServer) -> None:
    wait_until("no request is left", lambda: metrics(server).get("tokenrouter_requests_live") == 0)
    before = metrics(server)
    client = Background(server.grpc_url, input_ids=[5, 6], max_tokens=60)
    client.join()
    by_model = client.answer.tokens_by_model
    names = {model: f'tokenrouter_tokens_total{{model="{model}"}}' for model in ("slm", "llm")}
    wait_until(
        "every token is counted",
        lambda: all(metrics(server)[name] - before[name] == by_model[model] for model, name in names.items()),
    )


def test_a_solver_that_is_killed_comes_back(server: RunningServer) -> None:
    with load(server, 3) as clients:
        (worker,) = wait_until("a solver", lambda: workers(server), 30)
        worker.send_signal(signal.SIGKILL)
        with load(server, 2):  # five requests: an N that is new, so that it is asked
            wait_until("a solution for 5", lambda: controller(server)["thresholds"].get("5"), 30)
        (again,) = workers(server)
        assert again.pid != worker.pid
        assert all(client.error is None for client in clients)
    assert_clean_and_serving(server)


def test_no_solver_is_left_behind() -> None:
    router = {"name": "random", "params": {"p": P}}
    with running_server(paced_deployment((2.0, 8.0), router=router, batching={"threshold": "auto"})) as server:
        with load(server):
            (worker,) = wait_until("a solver", lambda: workers(server), 30)
            stub = psutil.Process(server.stub_pids()["token_router"])
            stub.kill()
            wait_until("the killed router's solver is gone", lambda: not worker.is_running())
        wait_until("another router", lambda: server.stub_pids().get("token_router") not in (None, stub.pid), 30)
        wait_until("it serves", lambda: serves(server), 30)
        with load(server):
            (worker,) = wait_until("another solver", lambda: workers(server), 30)
            wait_until("metrics go on", lambda: metrics(server).get("tokenrouter_requests_live") == LIVE)
    wait_until("the server's solver is gone", lambda: not worker.is_running())


def serves(server: RunningServer) -> bool:
    client = Background(server.grpc_url, input_ids=[3], max_tokens=2)
    client.join()
    return client.error is None
