# SPDX-License-Identifier: Apache-2.0
"""The requests that a stock model gets, what becomes of its answers and its errors, and a model that hangs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from python_backends.llm.contract import LLMFacts, SessionOpen, SessionStep, StepRequest
from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from python_backends.llm.engines.paced import next_token
from python_backends.llm.runner import check_compatible
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import Unavailable
from python_backends.token_router.stock_client import StockLifeline, StockLLMClient
from python_backends.token_router.stock_engine import StockEngine, Tensors
from routers import BaseRouter
from tests.triton.backends.tensorrtllm.block_cache import BlockCache, Retention

VOCAB, PADDED = 50, 64
FACTS = {"vocab_size": VOCAB, "context_tokens": 100, "eos_token_ids": [0]}


class Model:
    """A stock model: its greedy token is `next_token` of the prefix. answer: changes a response."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], list[str]]] = []
        self.refuse: Callable[[list[int]], str | None] = lambda prompt: None
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda response: response
        self.dtype: Any = np.float32
        self.together = threading.Barrier(1)
        self.hangs = threading.Event()
        self.stops = True
        self.cache = BlockCache(100, 32, lambda: 0.0)

    def __call__(self, request_id: str, inputs: Tensors, outputs: Sequence[str]) -> Tensors:
        self.requests.append((request_id, {n: a.reshape(-1).tolist() for n, a in inputs.items()}, list(outputs)))
        assert all(array.shape[0] == 1 for array in inputs.values())  # the batch dimension
        if "stop" in inputs:
            if self.stops:
                self.hangs.clear()
            return {}
        prompt = inputs["input_ids"].reshape(-1).tolist()
        if (message := self.refuse(prompt)) is not None:
            raise RuntimeError(message)
        self.together.wait(5)
        stopped = self.hangs.is_set()
        while self.hangs.is_set():
            threading.Event().wait(0.005)
        run = 0 if stopped else int(inputs["request_output_len"].reshape(-1)[0])
        made = list(prompt)
        while len(made) < len(prompt) + run:
            made.append(next_token("m", made, VOCAB, 0))
        lease = self.cache.begin(prompt, run, Retention())
        assert lease is not None
        self.cache.end(lease, made[len(prompt) :])
        response = {
            "output_ids": np.array([[made[len(prompt) :]]], np.int32).reshape(1, 1, run),
            "sequence_length": np.array([[run]], np.int32),
            "kv_cache_reused_blocks": np.array([[lease.reused]], np.int32),
            "kv_cache_alloc_new_blocks": np.array([[lease.new]], np.int32),
        }
        if "return_generation_logits" in inputs and run:
            logits = np.zeros((1, 1, run, PADDED), self.dtype)
            logits[0, 0, np.arange(run), made[len(prompt) :]] = 7.5
            logits[..., VOCAB:] = 99  # padding, which must not be sampled
            response["generation_logits"] = logits
        return self.answer({name: value for name, value in response.items() if name in outputs})


def engine(model: Model, **settings: Any) -> StockEngine:
    config = {"type": "tensorrtllm", "engine_dir": "/none", **FACTS} | settings
    return StockEngine(TensorRTLLMBackendConfig.model_validate(config), model)


def opened(stock: StockEngine, *sessions: int, limit: int = 90) -> StockEngine:
    for session in sessions:
        stock.open(SessionOpen(session, 3, limit))
    return stock


def greedy(prefix: Sequence[int]) -> int:
    return next_token("m", prefix, VOCAB, 0)


def test_one_request_for_each_session_with_its_whole_prefix() -> None:
    model = Model()
    stock = opened(engine(model), 1, 2)
    model.together = threading.Barrier(2)  # both are under way at once, or it breaks
    output = stock.step([SessionStep(1, 0, [5, 6, 7]), SessionStep(2, 0, [8])])
    assert output.sessions == [1, 2] and output.errors == {}
    assert output.logits is not None and output.logits.dtype == torch.float32
    assert output.logits.shape == (2, VOCAB)
    assert output.logits.argmax(-1).tolist() == [greedy([5, 6, 7]), greedy([8])]
    model.together = threading.Barrier(1)
    model.requests.clear()
    stock.step([SessionStep(1, 2, [9, 10])])  # token 7 was rejected
    ((request_id, inputs, outputs),) = model.requests
    assert inputs["input_ids"] == [5, 6, 9, 10] and inputs["input_lengths"] == [4]
    assert inputs["request_output_len"] == [1] and inputs["return_generation_logits"] == [True]
    assert "end_id" not in inputs and "seed" not in inputs and "temperature" not in inputs
    assert set(outputs) >= {"output_ids", "sequence_length", "generation_logits", "kv_cache_reused_blocks"}
    assert request_id.endswith(":1:3")


def test_request_ids_are_unique_and_the_blocks_are_kept_dear() -> None:
    model = Model()
    for retention_ms, expected in ((1500, [1500]), (None, None)):
        stock = opened(engine(model, retention_ms=retention_ms, retention_priority=80), 1)
        stock.step([SessionStep(1, 0, [5])])
        stock.free([1])
        opened(stock, 1).step([SessionStep(1, 0, [6])])  # the session comes back after its eviction
        inputs = model.requests[-1][1]
        assert inputs["retention_token_range_starts"] == [0] and inputs["retention_token_range_ends"] == [-1]
        assert inputs["retention_token_range_priorities"] == inputs["retention_decode_priority"] == [80]
        assert inputs.get("retention_token_range_durations_ms") == expected
        assert inputs.get("retention_decode_duration_ms") == expected
    ids = [request_id for request_id, _, _ in model.requests]
    assert len(set(ids)) == len(ids) == 4


def test_a_prefill_is_a_request_without_logits() -> None:
    model = Model()
    stock = opened(engine(model), 1)
    output = stock.step([SessionStep(1, 0, [5] * 40, sample=False)])
    assert output.sessions == [] and output.logits is not None and len(output.logits) == 0
    assert "return_generation_logits" not in model.requests[0][1] and "generation_logits" not in model.requests[0][2]
    stock.step([SessionStep(1, 40, [6])])
    assert (stock.reused_blocks, stock.new_blocks) == (2, 2)


def test_fp16_logits() -> None:
    model = Model()
    model.dtype = np.float16
    output = opened(engine(model, logits_dtype="fp16"), 1).step([SessionStep(1, 0, [5])])
    assert output.logits is not None and output.logits.dtype == torch.float32
    assert output.logits[0, greedy([5])] == 7.5


def test_an_error_is_that_session_s_only_and_readable() -> None:
    model = Model()
    text = (
        "Executor failed process requestId 4 due to the following error: Encountered an error when fetching new"
        " request: Prompt length (3) exceeds maximum input length (2). Set log level to info and check TRTGptModel"
        " logs for how maximum input length is set (/app/batch_manager/llmRequest.h:241)\n1 0x7f /app/lib.so(+0x1)"
    )
    model.refuse = lambda prompt: text if len(prompt) == 3 else None
    output = opened(engine(model), 1, 2).step(
        [SessionStep(1, 0, [5, 6, 7]), SessionStep(2, 0, [8]), SessionStep(9, 0, [1])]
    )
    assert output.sessions == [2]
    assert output.errors[1].endswith("how maximum input length is set") and "Prompt length (3)" in output.errors[1]
    assert output.errors[9] == "session 9 is not open"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {n: v for n, v in r.items() if n != "sequence_length"}, "lacks sequence_length"),
        (
            lambda r: {n: v for n, v in r.items() if n != "generation_logits"},
            "built without --gather_generation_logits",
        ),
        (
            lambda r: r | {"generation_logits": r["generation_logits"][..., :40]},
            "vocab_size: 50, but the model's logits",
        ),
        (lambda r: r | {"generation_logits": np.zeros((1, 1, 0, PADDED))}, "built without --gather_generation_logits"),
        (lambda r: r | {"sequence_length": np.array([[0]], np.int32)}, "stopped before it made a token"),
    ],
)
def test_an_answer_that_isn_t_one(change: Any, message: str) -> None:
    model = Model()
    model.answer = change
    output = opened(engine(model), 1).step([SessionStep(1, 0, [5])])
    assert message in output.errors[1]
    with pytest.raises(EngineError, match=message):
        engine(model).probe()


def test_an_answer_of_no_known_shape_is_that_session_s_only() -> None:
    model = Model()
    answers = iter([lambda r: r | {"sequence_length": np.zeros((1, 0), np.int32)}, lambda r: r])
    model.answer = lambda response: next(answers)(response)
    output = opened(engine(model, calls_at_once=1), 1, 2).step([SessionStep(1, 0, [5]), SessionStep(2, 0, [8])])
    assert output.sessions == [2]
    assert output.errors[1].startswith("the model's answer can't be read: IndexError")


def test_the_probe_warns_of_an_engine_that_reuses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING):
        engine(model).probe()
        assert not caplog.records
        model.cache = BlockCache(100, 32, lambda: 0.0, reuse=False)
        engine(model).probe()
    assert "reused no KV blocks" in caplog.text
    assert all(len(inputs["input_ids"]) == 65 for _, inputs, _ in model.requests)


@pytest.mark.parametrize("run", [1, 3])
def test_a_run_is_taken_step_by_step_and_dropped_when_the_sequence_differs(run: int) -> None:
    model, prefix = Model(), [5, 6]
    stock = opened(engine(model, return_logits=False, run_tokens=run), 1, limit=30)
    new, start = list(prefix), 0
    for _ in range(7):
        output = stock.step([SessionStep(1, start, new)])
        assert output.logits is None and output.next_token_ids == [greedy(prefix)]
        start, new = len(prefix), [greedy(prefix)]
        prefix += new
    assert len(model.requests) == -(-7 // run)
    prefix[-1:] = [3, 4]  # the last one was rejected, and two others came instead
    made = len(model.requests)
    assert stock.step([SessionStep(1, start, [3, 4])]).next_token_ids == [greedy(prefix)]
    assert len(model.requests) == made + 1


def test_a_run_ends_at_the_session_s_limit() -> None:
    model = Model()
    opened(engine(model, return_logits=False, run_tokens=8), 1, limit=5).step([SessionStep(1, 0, [5, 6, 7])])
    assert model.requests[0][1]["request_output_len"] == [2]


def test_sessions_are_counted_and_forgotten() -> None:
    stock = opened(engine(Model(), max_sessions=2), 1, 2)
    with pytest.raises(ValueError, match="session 1 is open already"):
        opened(stock, 1)
    with pytest.raises(EngineError, match="max_sessions = 2"):
        opened(stock, 3)
    stock.free([1, 77])
    opened(stock, 3)
    too_long = stock.step([SessionStep(3, 0, [1] * 101)])
    assert "would make the sequence 101 tokens long; at most 100" in too_long.errors[3]


def test_what_a_router_is_told() -> None:
    class Hidden(BaseRouter[Any]):
        needs_hidden_states = True

    for logits, provides, such_as in ((True, {"logits", "sampling"}, "rstitch"), (False, set[str](), "random")):
        capacity = engine(Model(), return_logits=logits, max_tokens=4096).capacity()
        assert capacity.provides == provides and (capacity.kv_tokens, capacity.kv_block) == (4096, 32)
        with pytest.raises(ValueError, match=f"hidden_states, which the engine tensorrtllm can't.*such as {such_as}"):
            check_compatible(Hidden, capacity, "tensorrtllm")  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [True, False])
def test_a_step_that_hangs(stops: bool) -> None:
    """It is told to stop by its request's id; only a request that doesn't come back even so loses the model."""
    model = Model()
    model.hangs.set()
    model.stops = stops
    stock = opened(engine(model), 1)
    outputs: list[Any] = []

    async def scenario() -> list[str]:
        deaths: list[str] = []
        lifeline = StockLifeline(stock, grace_s=0.2)
        lifeline.on_death = deaths.append
        assert lifeline.lost
        lifeline.attach(LLMFacts("m", "tensorrtllm", 1, 4, 100, 32, VOCAB, (0,), samples=True, kv_tokens=400))
        thread = threading.Thread(target=lambda: outputs.append(stock.step([SessionStep(1, 0, [5])])))
        thread.start()
        while not stock.running:
            await asyncio.sleep(0.005)
        lifeline.kill("it hangs")
        await asyncio.sleep(0.5)
        assert lifeline.lost is not stops
        model.hangs.clear()
        thread.join()
        return deaths

    deaths = asyncio.run(scenario())
    hung, stop = model.requests
    assert stop[0] == hung[0] and stop[1]["stop"] == [True]
    assert "stopped before it made a token" in outputs[0].errors[1]
    assert deaths == ([] if stops else ["it hangs, and 1 of its requests can't be stopped"])


def _client(model: Model, reload: Callable[[], None]) -> StockLLMClient:
    """Of a stock model that is given up after 0.2 s."""
    settings = {"type": "tensorrtllm", "engine_dir": "/none", **FACTS}
    runtime = RuntimeConfig.model_validate(
        {"models": [{"name": "m", "engine": settings}], "router": {"name": "single"}, "limits": {"step_timeout_s": 0.2}}
    )
    stock = runtime.models[0].engine
    assert stock is not None
    return StockLLMClient(0, runtime, stock, model, reload)


def test_a_client_from_hello_to_a_model_that_can_t_be_reloaded() -> None:
    """Steps go through the thread, sampled and routed here; a reload isn't tried while a request hangs."""
    model, reloads = Model(), []

    async def scenario() -> None:
        client = _client(model, lambda: reloads.append(1))
        facts = await client.hello()
        assert (facts.name, facts.engine, facts.context_tokens, facts.kv_block) == ("m", "tensorrtllm", 100, 32)
        assert facts.pid is None  # it is in tritonserver itself
        assert not client.lost
        opens = [SessionOpen(1, 3, 50)]
        response = await client.step(StepRequest([SessionStep(1, 0, [5, 6, 7])], opens, number=1))
        assert response.results[0].token_ids == [greedy([5, 6, 7])] and response.results[0].logprobs[0] < 0
        assert client.kv_blocks()["kv_new_blocks"] > 0
        model.hangs.set()
        model.stops = False
        hung = client.step(StepRequest([SessionStep(1, 3, [9])], number=2))
        while not any("stop" in inputs for _, inputs, _ in model.requests):
            await asyncio.sleep(0.02)
        with pytest.raises(Unavailable, match="can't be reloaded: 1 of its requests hang"):
            await client.reload()
        model.hangs.clear()
        assert "stopped before it made a token" in str((await hung).results[0].error)
        await client.reload()
        assert reloads == [1]
        client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("stops", [True, False])
def test_a_hello_that_hangs_ends_and_none_is_left_behind(stops: bool) -> None:
    model = Model()
    model.hangs.set()
    model.stops = stops

    async def scenario() -> None:
        client = _client(model, lambda: None)

        async def stopped() -> None:
            while client._engine.running:
                await asyncio.sleep(0.005)

        try:
            with pytest.raises(Unavailable, match="doesn't answer: a request takes too long"):
                await asyncio.wait_for(client.hello(), 5)
            if stops:
                await asyncio.wait_for(stopped(), 5)
            else:
                with pytest.raises(Unavailable, match="doesn't answer: a request from before hangs"):
                    await client.hello()
                with pytest.raises(Unavailable, match="can't be reloaded: 1 of its requests hang"):
                    await client.reload()
        finally:
            model.hangs.clear()
        await stopped()
        await client.reload()
        assert (await client.hello()).name == "m" and not client.lost
        client.close()

    asyncio.run(scenario())


def test_requests_that_hang_one_after_another_all_end() -> None:
    """With one call at a time, the second request begins when the first has been stopped, and hangs too."""
    model = Model()
    settings = {"type": "tensorrtllm", "engine_dir": "/none", "calls_at_once": 1, **FACTS}
    runtime = RuntimeConfig.model_validate(
        {"models": [{"name": "m", "engine": settings}], "router": {"name": "single"}, "limits": {"step_timeout_s": 0.2}}
    )

    async def scenario() -> None:
        stock = runtime.models[0].engine
        assert stock is not None
        client = StockLLMClient(0, runtime, stock, model, lambda: None)
        await client.hello()
        model.refuse = lambda prompt: model.hangs.set()
        opens = [SessionOpen(1, 3, 50), SessionOpen(2, 3, 50)]
        step = client.step(StepRequest([SessionStep(1, 0, [5, 6, 7]), SessionStep(2, 0, [8])], opens, number=1))
        try:
            response = await asyncio.wait_for(asyncio.shield(step), 5)
        finally:
            model.refuse = lambda prompt: None
            model.hangs.clear()
            await asyncio.wait([step])
            client.close()
        assert all("stopped before it made a token" in str(result.error) for result in response.results)
        assert sum("stop" in inputs for _, inputs, _ in model.requests) == 2

    asyncio.run(scenario())


def test_a_client_of_a_model_that_nothing_is_known_of() -> None:
    runtime = RuntimeConfig.model_validate(
        {
            "models": [{"name": "m", "engine": {"type": "tensorrtllm", "engine_dir": "/none"}}],
            "router": {"name": "single"},
        }
    )

    async def scenario() -> None:
        stock = runtime.models[0].engine
        assert stock is not None
        StockLLMClient(0, runtime, stock, Model(), lambda: None)

    with pytest.raises(ValueError, match="model 'm': vocab_size: is not given"):
        asyncio.run(scenario())
