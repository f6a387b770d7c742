# SPDX-License-Identifier: Apache-2.0
"""The client of an LLM on another host, against a gRPC server that plays that host's Triton."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from python_backends.llm.contract import SessionStep, StepRequest
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import RequestFailed, Unavailable
from python_backends.token_router.llm_client import LLMClient, ThreadedLLMClient
from python_backends.token_router.remote_llm import remote_llm_client
from python_backends.token_router.remote_triton import RemoteModel
from routers import RouterConfig
from tests.unit.token_router.far_triton import FarTriton, far_triton

# grpc's own thread, which watches a channel, says so when the channel is closed just before it begins
pytestmark = pytest.mark.filterwarnings(
    "ignore:(?s).*Cannot monitor channel state:pytest.PytestUnhandledThreadExceptionWarning"
)

STEP = StepRequest([SessionStep(1, 0, [5])])

Main = Callable[[LLMClient], Awaitable[None]]


@pytest.fixture
def triton() -> Iterator[FarTriton]:
    with far_triton() as triton:
        yield triton


def _run(url: str, main: Main, **limits: Any) -> None:
    async def with_client() -> None:
        config = RuntimeConfig.model_validate(
            {
                "models": [{"name": "slm"}, {"name": "llm", "url": url}],
                "router": {"name": "random"},
                "limits": {"silence_s": 2.0, **limits},
            }
        )
        client = remote_llm_client(1, config)
        try:
            await main(client)
        finally:
            client.close()

    asyncio.run(with_client())


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_hello_steps_and_the_round_trip(triton: FarTriton) -> None:
    triton.answers_late_s = 0.05

    async def main(client: LLMClient) -> None:
        assert client.lost and client.round_trip_s == 0.0
        assert (await client.hello()).vocab_size == 50
        assert not client.lost
        assert (await client.step(STEP)).facts is None
        await _until(lambda: client.round_trip_s > 0)
        assert 0.05 <= client.round_trip_s < 1

    _run(triton.url, main)
    assert [call.hello for call in triton.calls] == [True, False] and triton.calls[1].steps == STEP.steps
    assert triton.loads == 0


def test_a_model_that_is_not_loaded_there_is_loaded(triton: FarTriton) -> None:
    triton.ready = False

    async def main(client: LLMClient) -> None:
        await client.hello()

    _run(triton.url, main)
    assert triton.loads == 1


def test_a_call_that_fails_is_not_a_model_that_is_gone(triton: FarTriton) -> None:
    async def main(client: LLMClient) -> None:
        await client.hello()
        triton.fails = "EngineError: no"
        with pytest.raises(RequestFailed, match=rf"a step of model 'llm' failed: {triton.url}: EngineError: no"):
            await client.step(STEP)
        assert not client.lost
        triton.fails = ""
        await client.step(STEP)

    _run(triton.url, main)


def test_a_dead_process_there_is_a_lost_llm_and_nobody_ends_it_from_here(triton: FarTriton) -> None:
    async def main(client: LLMClient) -> None:
        await client.hello()
        triton.dead = True
        with pytest.raises(Unavailable, match=rf"model 'llm' went down: {triton.url}: Stub process is not healthy"):
            await client.step(STEP)
        assert client.lost
        await client.reload()  # the connection is good, and the model ready, says Triton
        with pytest.raises(Unavailable, match="doesn't answer"):
            await client.hello()
        triton.dead = False  # its own host has loaded it again
        await client.reload()
        await client.hello()
        await client.step(STEP)

    _run(triton.url, main)
    assert triton.loads == 0


def test_every_hello_looks_at_what_is_there(triton: FarTriton) -> None:
    """After one that failed, its Triton may be another by the next one."""

    async def main(client: LLMClient) -> None:
        triton.dead = True
        with pytest.raises(Unavailable, match="doesn't answer"):
            await client.hello()
        triton.dead, triton.ready = False, False
        triton.told["models"] = ["another", "llm"]
        with pytest.raises(Unavailable, match="was told models"):
            await client.hello()

    _run(triton.url, main)
    assert triton.loads == 1


def test_a_server_that_ends_during_a_call_and_one_that_comes_after_it() -> None:
    async def main(client: LLMClient) -> None:
        with far_triton(port) as first:
            await client.hello()
            first.goes_on.clear()
            calls = [client.step(STEP), client.step(STEP)]
            await _until(lambda: len(first.calls) == 3)
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, Unavailable)
        assert client.lost
        with pytest.raises(Unavailable, match=f"model 'llm' can't be reloaded: 127.0.0.1:{port}: "):
            await client.reload()
        with far_triton(port):
            await client.reload()
            await client.hello()
            await client.step(STEP)

    with far_triton() as triton:
        port = triton.port
    _run(f"127.0.0.1:{port}", main)


def test_a_server_that_ends_while_nothing_is_awaited_is_told() -> None:
    async def main(client: LLMClient) -> None:
        died: asyncio.Queue[str] = asyncio.Queue()
        client.on_death = died.put_nowait
        await client.hello()
        triton.stop()
        assert triton.url in await asyncio.wait_for(died.get(), 10)
        assert client.lost

    with far_triton() as triton:
        _run(triton.url, main)


def test_a_host_that_falls_silent_is_lost_within_the_limit(triton: FarTriton) -> None:
    async def main(client: LLMClient) -> None:
        await client.hello()
        triton.goes_on.clear()
        step = client.step(STEP)
        triton.answers_late_s = 3.0
        began = time.monotonic()
        with pytest.raises(Unavailable, match=f"model 'llm' went down: {triton.url}: it is silent"):
            await step
        assert time.monotonic() - began >= 0.4  # no sooner than the limit

    _run(triton.url, main, silence_s=0.4)


def test_a_step_that_takes_too_long_gives_the_connection_up(triton: FarTriton) -> None:
    async def main(client: LLMClient) -> None:
        await client.hello()
        triton.goes_on.clear()
        with pytest.raises(Unavailable, match=f"went down: {triton.url}: a step took longer than"):
            await client.step(STEP)
        assert client.lost
        triton.goes_on.set()
        await client.reload()
        await client.hello()

    _run(triton.url, main, step_timeout_s=0.3)


def test_a_step_that_comes_too_late_makes_no_connection_of_its_own(triton: FarTriton) -> None:
    """Its life of the LLM is over: only a hello begins another."""

    async def main(client: LLMClient) -> None:
        await client.hello()
        triton.goes_on.clear()
        first = client.step(STEP)
        await _until(lambda: len(triton.calls) == 2)
        assert isinstance(client, ThreadedLLMClient)
        client._lifeline.detach()
        late = client.step(STEP)
        for error in await asyncio.gather(first, late, return_exceptions=True):
            assert isinstance(error, Unavailable)
        triton.goes_on.set()

    _run(triton.url, main)
    assert [call.hello for call in triton.calls] == [True, False]


def test_a_model_that_is_unloaded_there_is_lost(triton: FarTriton) -> None:
    async def main(client: LLMClient) -> None:
        died: asyncio.Queue[str] = asyncio.Queue()
        client.on_death = died.put_nowait
        await client.hello()
        triton.ready = False
        assert await asyncio.wait_for(died.get(), 10) == f"{triton.url}: the model was unloaded there"

    _run(triton.url, main)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"has_model": False}, "failed to load 'llm', no version is available"),
        ({"backend": "python"}, "'llm' there has backend 'python'; allowed: llm"),
        (
            {"told": {"models": ["slm", "llm", "xl"], "index": 1, "router": {"name": "random"}}},
            "'llm' there was told models ['slm', 'llm', 'xl'], and token_router ['slm', 'llm']; both need the same"
            " deployment",
        ),
        (
            {"told": {"models": ["slm", "llm"], "index": 1, "router": "random"}},
            "'llm' there was told router None, and token_router 'random'; both need the same deployment",
        ),
        (
            {"told": {"models": ["slm", "llm"], "index": 1, "router": {"name": "rstitch"}}},
            "'llm' there was told router 'rstitch', and token_router 'random'; both need the same deployment",
        ),
    ],
)
def test_another_model_is_refused(triton: FarTriton, change: dict[str, Any], message: str) -> None:
    vars(triton).update(change)

    async def main(client: LLMClient) -> None:
        with pytest.raises(Unavailable) as error:
            await client.hello()
        assert str(error.value) == f"model 'llm' doesn't answer: {triton.url}: {message}"

    _run(triton.url, main)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"weights": "/there/r.safetensors", "tau": 0.25}, None),  # the file lies in another folder
        (
            {"weights": "/there/r.safetensors", "tau": 0.05},
            "'llm' there was told router.params {'weights': 'r.safetensors', 'tau': 0.05}, and token_router"
            " {'weights': 'r.safetensors', 'tau': 0.25}; both need the same deployment",
        ),
        ({"weights": "/there/other.safetensors", "tau": 0.25}, "other.safetensors"),
        (None, "'llm' there was told router.params None, and"),
    ],
)
def test_the_router_there_needs_the_same_parameters(theirs: dict[str, Any] | None, message: str | None) -> None:
    ours = RouterConfig(name="own", path="/here", params={"weights": "/here/r.safetensors", "tau": 0.25})
    told = {"models": ["slm", "llm"], "index": 1, "router": {"name": "own", "path": "/there", "params": theirs}}
    config = SimpleNamespace(
        backend="llm", parameters={k: SimpleNamespace(string_value=json.dumps(v)) for k, v in told.items()}
    )
    model = RemoteModel(["slm", "llm"], 1, ours)
    if message is None:
        model.check(config)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        model.check(config)


def test_nobody_there() -> None:
    with far_triton() as triton:
        url = triton.url

    async def main(client: LLMClient) -> None:
        with pytest.raises(Unavailable, match=f"model 'llm' doesn't answer: {url}: "):
            await client.hello()

    _run(url, main)
