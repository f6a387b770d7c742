# SPDX-License-Identifier: Apache-2.0
"""The two ways of a step, by the Unix socket and by BLS: the same answers and the same ends of faults."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.triton.servers import Background, ask, assert_clean_and_serving, paced_deployment, wait_until
from tools.supervisor import RunningServer, running_server

pytestmark = pytest.mark.triton

TOKENS = 40


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, RunningServer]]:
    """One for each transport."""
    with ExitStack() as stack:
        yield {
            transport: stack.enter_context(
                running_server(paced_deployment().model_copy(update={"transport": transport}))
            )
            for transport in ("socket", "bls")
        }


def executed(server: RunningServer, model: str) -> int:
    """How often Triton has executed the model."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=5) as answer:
        page = answer.read().decode()
    found = re.search(rf'^nv_inference_exec_count{{model="{model}",.*}} (\d+)$', page, re.MULTILINE)
    assert found is not None, page
    return int(found[1])


def test_the_answers_are_the_same_and_only_bls_goes_through_triton(servers: dict[str, RunningServer]) -> None:
    answers = {}
    for transport, server in servers.items():
        before = executed(server, "slm")
        answers[transport] = ask(server, input_ids=[1, 2, 3], max_tokens=TOKENS, seed=5)
        wait_until("the session freed", lambda server=server: not server.control.status().live)  # type: ignore[misc]
        calls = executed(server, "slm") - before
        assert calls >= TOKENS / 2 if transport == "bls" else calls == 0
    assert answers["socket"].ids == answers["bls"].ids
    assert answers["socket"].models == answers["bls"].models
    assert len(set(answers["bls"].models)) == 2


def test_a_killed_llm_is_reloaded_by_bls_too(servers: dict[str, RunningServer]) -> None:
    """By the socket: test_faults.py."""
    server = servers["bls"]
    running = Background(server.grpc_url, input_ids=[1, 2, 3], max_tokens=4000)
    wait_until("the first tokens", lambda: len(running.answer.ids) > 3)
    pid = server.stub_pids()["llm"]
    os.kill(pid, signal.SIGKILL)
    running.join(20)
    assert running.error is not None and "'llm' went down" in str(running.error)
    wait_until("it serves again", lambda: server.control.status().models["llm"]["state"] == "up", timeout_s=20)
    assert_clean_and_serving(server)


@pytest.mark.parametrize("transport", ["socket", "bls"])
def test_an_llm_that_triton_unloads_is_loaded_again(servers: dict[str, RunningServer], transport: str) -> None:
    """Somebody uses Triton's model control while a request runs."""
    server = servers[transport]
    running = Background(server.grpc_url, input_ids=[1, 2, 3], max_tokens=4000)
    wait_until("the first tokens", lambda: len(running.answer.ids) > 3)
    pid = server.stub_pids()["llm"]
    unload = urllib.request.Request(f"http://{server.http_url}/v2/repository/models/llm/unload", data=b"{}")
    with urllib.request.urlopen(unload, timeout=20):
        pass
    running.join(20)
    assert running.error is not None and "llm" in str(running.error)
    wait_until("another process", lambda: server.stub_pids().get("llm", pid) != pid, timeout_s=20)
    wait_until("it serves again", lambda: server.control.status().models["llm"]["state"] == "up", timeout_s=20)
    assert_clean_and_serving(server, input_ids=[5, 6], max_tokens=TOKENS)
