# SPDX-License-Identifier: Apache-2.0
"""Steps by the Unix socket: the router's end and the LLM's, with a real process to watch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from python_backends.llm import step_socket
from python_backends.llm.contract import LLMFacts, SessionResult, SessionStep, StepRequest, StepResponse
from python_backends.llm.step_socket import FRAME, StepSocket, socket_address
from python_backends.llm.wire import Wire, decode_request, encode_request, encode_response
from python_backends.token_router import local_llm
from python_backends.token_router.errors import RequestFailed, Unavailable
from python_backends.token_router.lifeline import ProcessLifeline
from python_backends.token_router.local_llm import LocalLLMClient


def step(token: int, tokens: int = 1) -> StepRequest:
    return StepRequest([SessionStep(1, 0, [token] * tokens)])


class LLM:
    """One behind both of its ways: a step's token is that of the request + 1. process: what is watched.

    goes_on: steps wait for it. answer_tokens: of a result, each the one before + 1. calls: those made by BLS.
    steps: those that came by the socket.
    """

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.answer_tokens = 1
        self.calls: list[StepRequest] = []
        self.steps: list[StepRequest] = []
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.socket = StepSocket(self.answer)
        pid, name = self.process.pid, self.socket.name
        facts = LLMFacts("slm", "fake", pid, 4, 100, 8, 50, (0,), samples=True, kv_tokens=400)
        self.facts = replace(facts, socket=name)

    def answer(self, wire: Wire) -> Wire:
        request = decode_request(wire)
        self.steps.append(request)
        self.goes_on.wait(10)
        tokens = [s.token_ids for s in request.steps]
        if any(t[0] == 13 for t in tokens):
            raise ValueError("steps: no 13")
        first = [t[-1] + len(t) for t in tokens]
        made = [list(range(token, token + self.answer_tokens)) for token in first]
        return encode_response(StepResponse([SessionResult(m, [0.5] * len(m)) for m in made]))

    def call(self, wire: Wire) -> Wire:
        self.calls.append(decode_request(wire))
        self.socket.hang_up()  # as llm/model.py does
        return encode_response(StepResponse(facts=self.facts))

    def end(self) -> None:
        self.goes_on.set()
        self.process.kill()
        self.process.wait()
        self.socket.close()

    def reload(self) -> None:
        self.end()
        self.start()


@pytest.fixture
def llm() -> Iterator[LLM]:
    llm = LLM()
    yield llm
    llm.end()


def run(llm: LLM, main: Any, step_timeout_s: float = 30.0) -> None:
    async def with_client() -> None:
        client = LocalLLMClient("slm", llm.call, llm.reload, step_timeout_s, ProcessLifeline())
        try:
            await asyncio.wait_for(main(client), 20)
        finally:
            client.close()

    asyncio.run(with_client())


def test_only_the_hello_is_a_call(llm: LLM) -> None:
    async def main(client: LocalLLMClient) -> None:
        assert (await client.hello()).pid == llm.process.pid
        (result,) = (await client.step(step(5))).results
        assert (result.token_ids, result.logprobs) == ([6], [0.5])

    run(llm, main)
    assert [call.hello for call in llm.calls] == [True]


def test_steps_sent_at_once_are_answered_in_order(llm: LLM) -> None:
    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        llm.goes_on.clear()
        steps = [client.step(step(token)) for token in range(20, 30)]
        asyncio.get_running_loop().call_later(0.05, llm.goes_on.set)
        assert [(await s).results[0].token_ids for s in steps] == [[token + 1] for token in range(20, 30)]

    run(llm, main)


def test_a_long_request_and_one_given_up_come_through(llm: LLM) -> None:
    """More than the socket's buffers hold; nobody reads the answer of the one given up."""

    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        llm.goes_on.clear()
        given_up, long = client.step(step(3)), client.step(step(0, tokens=1_000_000))
        given_up.cancel()
        llm.goes_on.set()
        assert (await long).results[0].token_ids == [1_000_000]

    run(llm, main)


def test_long_answers_come_whole(llm: LLM) -> None:
    """4 MB each: many times what the socket's buffers hold, and what the router reads at once."""
    llm.answer_tokens = 500_000

    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        for token, sent in [(token, client.step(step(token))) for token in (5, 6)]:
            (result,) = (await sent).results
            assert len(result.token_ids) == len(result.logprobs) == 500_000
            whole = result.token_ids == list(range(token + 1, token + 500_001)) and set(result.logprobs) == {0.5}
            assert whole  # two such lists would take minutes to show

    run(llm, main)


def test_a_refused_step_is_not_an_llm_that_is_gone(llm: LLM) -> None:
    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        with pytest.raises(RequestFailed, match="a step of model 'slm' failed: ValueError: steps: no 13"):
            await client.step(step(13))
        assert not client.lost
        assert (await client.step(step(5))).results[0].token_ids == [6]

    run(llm, main)


def test_an_answer_that_contradicts_itself_fails_its_step_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        with monkeypatch.context() as patch:
            patch.setattr(llm.socket, "_answer", lambda wire: wire[:3])
            with pytest.raises(RequestFailed, match="header"):
                await client.step(step(5))
        assert (await client.step(step(5))).results[0].token_ids == [6]

    run(llm, main)


def test_death_ends_all_steps_and_a_reload_begins_anew(llm: LLM) -> None:
    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        llm.goes_on.clear()
        steps = [client.step(step(5)), client.step(step(6))]
        asyncio.get_running_loop().call_later(0.05, llm.process.kill)
        for error in await asyncio.gather(*steps, return_exceptions=True):
            assert isinstance(error, Unavailable) and "went down: its process has ended" in str(error)
        assert client.lost
        await client.reload()
        await client.hello()
        assert (await client.step(step(7))).results[0].token_ids == [8]

    run(llm, main)


def test_an_llm_that_hangs_up_is_lost(llm: LLM) -> None:
    """Triton unloads it: the process lives for a while, and takes no more steps."""

    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        await client.step(step(4))
        llm.goes_on.clear()
        running = client.step(step(5))
        closing = threading.Thread(target=llm.socket.close)
        closing.start()
        llm.goes_on.set()
        assert (await running).results[0].token_ids == [6]  # the step under way is answered
        closing.join()
        while not client.lost:
            await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="went down: its socket is closed"):
            await client.step(step(5))
        llm.process.kill()
        await client.reload()
        await client.hello()
        assert (await client.step(step(7))).results[0].token_ids == [8]

    run(llm, main)


def test_a_reload_waits_until_the_one_before_has_ended(llm: LLM) -> None:
    """It gives its memory back after it has hung up, and the next one needs that."""

    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        await client.step(step(4))
        await asyncio.to_thread(llm.socket.close)
        while not client.lost:
            await asyncio.sleep(0.01)
        before, reloading = llm.process, asyncio.ensure_future(client.reload())
        await asyncio.sleep(0.2)
        assert not reloading.done() and llm.process is before
        before.kill()
        await reloading
        assert llm.process is not before
        await client.hello()

    run(llm, main)


def test_a_hello_ends_the_connection_of_the_router_before(llm: LLM) -> None:
    with socket.socket(socket.AF_UNIX) as before:
        before.connect(socket_address(llm.socket.name))
        before.settimeout(5)
        wire = encode_request(step(4))
        before.sendall(FRAME.pack(wire.nbytes, 0) + wire.tobytes())
        assert before.recv(1)  # so that it is heard: nobody hangs up on a router that still waits to be

        async def main(client: LocalLLMClient) -> None:
            await client.hello()
            assert (await client.step(step(5))).results[0].token_ids == [6]

        run(llm, main, step_timeout_s=2.0)


def test_a_process_that_hangs_up_and_does_not_end_is_ended(llm: LLM) -> None:
    """Its step hangs while Triton unloads it: nothing else would end either."""

    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        await client.step(step(4))
        await asyncio.to_thread(llm.socket.close)
        assert await asyncio.to_thread(llm.process.wait, 5) == -signal.SIGKILL

    run(llm, main, step_timeout_s=0.2)


def test_its_loss_while_nothing_is_awaited_is_told_once(llm: LLM) -> None:
    async def main(client: LocalLLMClient) -> None:
        told: list[str] = []
        client.on_death = told.append
        await client.hello()
        await asyncio.to_thread(llm.socket.close)
        llm.process.kill()
        while not told:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert told in (["it has ended, or was unloaded"], ["its process has ended"])

    run(llm, main)


def test_a_step_that_takes_too_long_ends_the_process(llm: LLM) -> None:
    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        llm.goes_on.clear()
        with pytest.raises(Unavailable, match="went down"):
            await client.step(step(5))

    run(llm, main, step_timeout_s=0.2)
    assert llm.process.wait(5) < 0


def test_a_hello_of_an_llm_without_its_socket_is_unavailable(llm: LLM) -> None:
    async def main(client: LocalLLMClient) -> None:
        name = llm.facts.socket
        llm.facts = replace(llm.facts, socket=None)
        with pytest.raises(Unavailable, match="names no socket"):
            await client.hello()
        llm.facts = replace(llm.facts, socket="tokenrouter-of-nobody")
        with pytest.raises(Unavailable, match="can't be reached by its socket"):
            await client.hello()
        llm.facts = replace(llm.facts, socket=name)
        await client.hello()
        await client.step(step(5))

    run(llm, main)


def test_another_users_process_is_hung_up_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abstract address has no permissions."""
    mine = os.geteuid()
    monkeypatch.setattr(step_socket.os, "geteuid", lambda: mine + 1)
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(socket_address(llm.socket.name))
        end.settimeout(5)
        assert end.recv(1) == b""


def test_another_users_llm_is_hung_up_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the address that the LLM named: no step goes there."""

    async def main(client: LocalLLMClient) -> None:
        told: list[str] = []
        client.on_death = told.append
        with monkeypatch.context() as patch:
            patch.setattr(local_llm, "of_same_user", lambda end: False)
            with pytest.raises(Unavailable, match="by its socket: another user's process has its address"):
                await client.hello()
        with pytest.raises(RuntimeError, match="stepped before the LLM said hello"):
            client.step(step(5))
        await client.hello()
        assert (await client.step(step(6))).results[0].token_ids == [7]
        assert told == []

    run(llm, main)
    assert llm.steps == [step(6)]


def test_another_users_router_gets_no_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_socket, "of_same_user", lambda end: False)

    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        with pytest.raises(Unavailable, match="went down"):
            await client.step(step(5))

    run(llm, main)
    assert llm.steps == []


def test_half_a_request_ends_its_connection_only(llm: LLM) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(socket_address(llm.socket.name))
        end.sendall(FRAME.pack(8, 0) + b"half")

    async def main(client: LocalLLMClient) -> None:
        await client.hello()
        assert (await client.step(step(5))).results[0].token_ids == [6]

    run(llm, main)
