# SPDX-License-Identifier: Apache-2.0
"""Faults on a real server: who is hit gets one clear error, the others go on, nothing is left."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.triton.servers import (
    Background,
    assert_clean_and_serving,
    paced_deployment,
    paced_tokens,
    wait_until,
)
from tools.client import Answer, GenerationError, TokenRouterClient
from tools.commands.health import health
from tools.supervisor import RunningServer, running_server

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def slow_llm() -> Iterator[RunningServer]:
    """Every request goes to the LLM at its first token, unless it says otherwise; a step there takes
    seconds, and starts only with two requests."""
    deployment = paced_deployment(
        steps_ms=(5.0, 1500.0),
        router={"name": "random", "params": {"p": 1.0}},
        batching={"threshold": [1, 2], "max_wait_ms": 60_000, "llm_prefill": "lazy"},
    )
    with running_server(deployment) as server:
        yield server


def test_cancel_while_running_on_the_entry(paced_server: RunningServer) -> None:
    running = Background(paced_server.grpc_url, input_ids=[1, 2, 3], max_tokens=4000)
    wait_until("the first tokens", lambda: len(running.answer.ids) > 3)
    running.client.cancel()
    running.join(5)
    assert running.error is not None and running.error.status is grpc.StatusCode.CANCELLED
    assert_clean_and_serving(paced_server)


def test_cancel_while_pending_there_and_running_here(slow_llm: RunningServer) -> None:
    request = Background(slow_llm.grpc_url, input_ids=[1, 2, 3], max_tokens=50)

    def handed_over() -> bool:
        models = slow_llm.control.status().models
        return bool(models["slm"]["pending"] == models["llm"]["running"] == 1)

    wait_until("the request at the LLM", handed_over)  # a first token is not delayed: its step runs at once
    request.client.cancel()
    request.join(5)
    assert request.error is not None
    assert_clean_and_serving(slow_llm, input_ids=[4], max_tokens=2, router_params={"p": 0.0})


def test_cancel_while_waiting_for_a_batch(slow_llm: RunningServer) -> None:
    other = Background(slow_llm.grpc_url, input_ids=[9], max_tokens=4000, router_params={"p": 0.0})
    waits = Background(slow_llm.grpc_url, input_ids=[1, 2, 3], max_tokens=50)
    # its second token waits for another request: B is 2 and the other one never comes
    wait_until("its first token", lambda: len(waits.answer.ids) == 1)
    wait_until("the request waiting", lambda: slow_llm.control.status().models["llm"]["waiting"] == 1)
    waits.client.cancel()
    waits.join(5)
    assert waits.error is not None
    wait_until("its session freed", lambda: slow_llm.control.status().live == 1)
    other.client.cancel()
    other.join(5)
    assert_clean_and_serving(slow_llm, input_ids=[4], max_tokens=2, router_params={"p": 0.0})


def test_a_client_that_disconnects(paced_server: RunningServer) -> None:
    running = Background(paced_server.grpc_url, input_ids=[1, 2, 3], max_tokens=4000)
    wait_until("the first tokens", lambda: len(running.answer.ids) > 3)
    running.client.close()
    assert_clean_and_serving(paced_server)


def test_an_http_client_that_disconnects(paced_server: RunningServer) -> None:
    connection = http.client.HTTPConnection(paced_server.http_url, timeout=20)
    body = json.dumps({"input_ids": [1, 2, 3], "max_tokens": 4000, "stream": True})
    connection.request("POST", "/v2/models/token_router/generate_stream", body)
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: ")
    response.close()
    connection.close()
    assert_clean_and_serving(paced_server)


def test_200_requests_against_a_queue_of_64(paced_server: RunningServer) -> None:
    """16 run and 64 wait; the others are refused at once, as UNAVAILABLE; none is lost."""

    def one(i: int) -> str:
        with TokenRouterClient(paced_server.grpc_url) as client:
            try:
                answer = Answer.of(client.generate(input_ids=[1, i + 1], max_tokens=250, timeout_s=90))
            except GenerationError as error:
                assert "the queue is full" in error.message
                return error.status.name
            assert answer.ids == paced_tokens("slm", [1, i + 1], 250)
            return "served"

    with ThreadPoolExecutor(200) as pool:
        outcomes = list(pool.map(one, range(200)))
    assert set(outcomes) == {"served", "UNAVAILABLE"}
    assert outcomes.count("served") >= 16 + 64
    assert_clean_and_serving(paced_server)


def test_a_full_server_is_busy_and_not_dead() -> None:
    """It would refuse one request more."""
    with running_server(paced_deployment(limits={"max_live": 1, "max_queue": 0})) as server:
        running = Background(server.grpc_url, input_ids=[1, 2, 3], max_tokens=4000)
        wait_until("the first tokens", lambda: running.answer.ids)
        assert health(str(server.pid), 5.0) == "busy: 1 requests running, 0 waiting"
        running.client.cancel()
        running.join(5)
        assert_clean_and_serving(server)
        assert health(str(server.pid), 5.0) == "a token was made"


def test_a_route_that_raises_for_one_request(paced_server: RunningServer) -> None:
    good = [Background(paced_server.grpc_url, input_ids=[1, i], max_tokens=100) for i in range(5, 8)]
    bad = Background(paced_server.grpc_url, input_ids=[1, 2], max_tokens=100, router_params={"raise_at": 40})
    for request in [*good, bad]:
        request.join(30)
    assert bad.error is not None and bad.error.status is grpc.StatusCode.INTERNAL
    assert "told to fail at 40" in bad.error.message
    assert bad.answer.ids == paced_tokens("slm", [1, 2], 38)  # positions 2 to 39 were given
    for i, request in enumerate(good, 5):
        assert request.error is None and request.answer.ids == paced_tokens("slm", [1, i], 100)
    assert_clean_and_serving(paced_server)


@pytest.mark.parametrize("victim", ["slm", "llm"])
def test_a_killed_llm_is_reloaded(paced_server: RunningServer, victim: str) -> None:
    """Its requests get an error at once, and serving goes on without a restart."""
    long_prompt = list(range(1, 30))  # prefilled by both: both hold a session
    requests = [Background(paced_server.grpc_url, input_ids=long_prompt, max_tokens=4000) for _ in range(3)]
    for request in requests:
        wait_until("the first tokens", lambda request=request: len(request.answer.ids) > 3)
    os.kill(paced_server.stub_pids()[victim], signal.SIGKILL)
    for request in requests:
        request.join(5)
        assert request.error is not None and request.error.status is grpc.StatusCode.UNAVAILABLE
        assert f"model '{victim}' went down" in request.error.message
    assert_clean_and_serving(paced_server, input_ids=[1, 2], max_tokens=20)
    wait_until("it is up", lambda: paced_server.control.status().models[victim]["state"] == "up", 30)


def test_the_others_go_on_while_an_llm_is_loaded() -> None:
    """To load one takes minutes when it is large."""
    deployment = paced_deployment(
        steps_ms=(5.0, 10.0), router={"name": "random", "params": {"p": 0.0}}, batching={"llm_prefill": "lazy"}
    )
    with running_server(deployment) as server:
        goes_on = Background(server.grpc_url, input_ids=[3, 4], max_tokens=4000)
        wait_until("the first tokens", lambda: len(goes_on.answer.ids) > 3)

        def is_in(state: str) -> bool:
            return bool(server.control.status().models["llm"]["state"] == state)

        os.kill(server.stub_pids()["llm"], signal.SIGKILL)
        wait_until("it is loaded again", lambda: is_in("reloading"))
        before = len(goes_on.answer.ids)
        wait_until("it is up", lambda: is_in("up"), 30)
        assert len(goes_on.answer.ids) - before > 40  # the stub starts Python and imports for a second and more
        goes_on.client.cancel()
        goes_on.join(5)
        assert_clean_and_serving(server)


def test_a_killed_token_router_is_reloaded(paced_server: RunningServer) -> None:
    """Triton answers nobody that it had (triton.md, section 6); the supervisor brings it back."""
    request = Background(paced_server.grpc_url, input_ids=[1, 2], max_tokens=4000)
    wait_until("the first tokens", lambda: len(request.answer.ids) > 3)
    before = paced_server.stub_pids()["token_router"]
    os.kill(before, signal.SIGKILL)
    wait_until("another token_router", lambda: paced_server.stub_pids().get("token_router", before) != before, 20)
    request.client.cancel()
    request.join(10)

    def served() -> bool:
        with TokenRouterClient(paced_server.grpc_url) as client:
            try:
                return bool(Answer.of(client.generate(input_ids=[1], max_tokens=1, timeout_s=5)).ids)
            except GenerationError:
                return False

    wait_until("the next request served", served, 20)
    assert_clean_and_serving(paced_server)


def test_a_hanging_llm_is_ended_and_reloaded() -> None:
    """A step longer than step_timeout_s: only ending the process frees the blocking call."""
    deployment = paced_deployment(
        steps_ms=(5.0, 600_000.0),
        router={"name": "random", "params": {"p": 0.0}},
        batching={"llm_prefill": "lazy"},
        limits={"step_timeout_s": 1.0},
    )
    with running_server(deployment) as server:
        hangs = Background(server.grpc_url, input_ids=[1, 2], max_tokens=5, router_params={"p": 1.0})
        goes_on = Background(server.grpc_url, input_ids=[3, 4], max_tokens=100)
        for request in (hangs, goes_on):
            request.join(20)
        assert hangs.error is not None and hangs.error.status is grpc.StatusCode.UNAVAILABLE
        assert "model 'llm' went down" in hangs.error.message
        assert goes_on.error is None and goes_on.answer.ids == paced_tokens("slm", [3, 4], 100)  # never was there
        assert_clean_and_serving(server)
