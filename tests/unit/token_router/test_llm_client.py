# SPDX-License-Identifier: Apache-2.0
"""The client's thread and its watch over the LLM's process, with a real process to watch."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from python_backends.llm.contract import LLMFacts, SessionStep, StepRequest, StepResponse
from python_backends.llm.wire import Wire, decode_request, encode_response
from python_backends.token_router.errors import RequestFailed, Unavailable
from python_backends.token_router.lifeline import ProcessLifeline
from python_backends.token_router.llm_client import ThreadedLLMClient

STEP = StepRequest([SessionStep(1, 0, [5])])


class Model:
    """What stands behind the blocking call: a process, and a function that may fail or hang."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.fails = ""
        self.hangs = threading.Event()
        self.threads: set[str] = set()
        self.step_s = 0.0
        self._one_at_a_time = threading.Lock()
        self.reloads = 0

    def call(self, wire: Wire) -> Wire:
        self.threads.add(threading.current_thread().name)
        request = decode_request(wire)
        if self.fails:
            raise RuntimeError(self.fails)
        if request.steps and self.hangs.is_set():
            self.process.wait()
            time.sleep(0.5)  # Triton takes a second to say so
            raise RuntimeError("Stub process is not healthy")
        with self._one_at_a_time:
            time.sleep(self.step_s if request.steps else 0.0)
        facts = LLMFacts("slm", "fake", self.process.pid, 4, 100, 8, 50, (0,), samples=True, kv_tokens=400)
        return encode_response(StepResponse(facts=facts if request.hello else None))

    def reload(self) -> None:
        self.reloads += 1
        self.process = subprocess.Popen(["sleep", "600"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.kill()


def _run(model: Model, main: Any, step_timeout_s: float = 30.0) -> None:
    async def with_client() -> None:
        client = ThreadedLLMClient("slm", model.call, model.reload, step_timeout_s, ProcessLifeline())
        try:
            await main(client)
        finally:
            client.close()

    asyncio.run(with_client())


def test_calls_are_made_in_the_clients_own_threads(model: Model) -> None:
    async def main(client: ThreadedLLMClient) -> None:
        assert client.lost
        assert (await client.hello()).pid == model.process.pid
        assert not client.lost
        assert (await client.step(STEP)).facts is None

    _run(model, main)
    assert model.threads <= {"llm-slm-0", "llm-slm-1"}


def test_a_call_that_fails_is_not_a_model_that_is_gone(model: Model) -> None:
    async def main(client: ThreadedLLMClient) -> None:
        await client.hello()
        model.fails = "EngineError: no"
        with pytest.raises(RequestFailed, match="a step of model 'slm' failed: EngineError: no"):
            await client.step(STEP)
        assert not client.lost
        model.fails = ""
        await client.step(STEP)

    _run(model, main)


def test_death_during_a_call_is_known_before_the_call_returns(model: Model) -> None:
    async def main(client: ThreadedLLMClient) -> None:
        await client.hello()
        model.hangs.set()
        asyncio.get_running_loop().call_later(0.05, model.process.kill)
        with pytest.raises(Unavailable, match="model 'slm' went down: its process has ended"):
            await client.step(STEP)
        assert client.lost
        model.hangs.clear()
        await client.reload()
        assert (await client.hello()).pid == model.process.pid
        await client.step(STEP)

    _run(model, main)
    assert model.reloads == 1


def test_death_ends_the_call_sent_ahead_too_and_a_reload_waits_for_both(model: Model) -> None:
    async def main(client: ThreadedLLMClient) -> None:
        await client.hello()
        model.hangs.set()
        calls = [client.step(STEP), client.step(STEP)]
        asyncio.get_running_loop().call_later(0.05, model.process.kill)
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, Unavailable)
        began = time.monotonic()
        await client.reload()
        assert time.monotonic() - began > 0.3  # Triton still holds both
        model.hangs.clear()
        await client.hello()
        await client.step(STEP)

    _run(model, main)


def test_death_while_nothing_is_awaited_is_told(model: Model) -> None:
    async def main(client: ThreadedLLMClient) -> None:
        died: asyncio.Queue[str] = asyncio.Queue()
        client.on_death = died.put_nowait
        await client.hello()
        model.process.kill()
        assert await asyncio.wait_for(died.get(), 5) == "its process has ended"
        assert client.lost

    _run(model, main)


def test_a_step_that_takes_too_long_ends_the_process(model: Model) -> None:
    async def main(client: ThreadedLLMClient) -> None:
        await client.hello()
        model.hangs.set()
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"went down: a step took longer than 0\.2 s \(limits\.step_timeout_s\)"):
            await client.step(STEP)
        assert time.monotonic() - began >= 0.2

    _run(model, main, step_timeout_s=0.2)
    assert model.process.wait(5) == -signal.SIGKILL


def test_an_event_loop_that_stands_still_ends_no_process(model: Model) -> None:
    """The answer has come meanwhile, and could not be read."""

    async def main(client: ThreadedLLMClient) -> None:
        await client.hello()
        step = client.step(STEP)
        time.sleep(0.6)
        await step
        assert not client.lost

    _run(model, main, step_timeout_s=0.2)


def test_the_time_of_a_step_begins_when_the_one_before_is_over(model: Model) -> None:
    async def main(client: ThreadedLLMClient) -> None:
        await client.hello()
        model.step_s = 0.35
        await asyncio.gather(client.step(STEP), client.step(STEP))
        assert not client.lost

    _run(model, main, step_timeout_s=0.6)


def test_a_process_that_ended_after_its_hello_is_unavailable(model: Model) -> None:
    model.kill()

    async def main(client: ThreadedLLMClient) -> None:
        with pytest.raises(Unavailable, match="went down"):
            await client.hello()

    _run(model, main)


def test_a_model_that_does_not_answer_hello(model: Model) -> None:
    model.fails = "model 'slm' is not ready"

    async def main(client: ThreadedLLMClient) -> None:
        with pytest.raises(Unavailable, match="doesn't answer: model 'slm' is not ready"):
            await client.hello()

    _run(model, main)
