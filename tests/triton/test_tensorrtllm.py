# SPDX-License-Identifier: Apache-2.0
"""Conformance of models of the stock `tensorrtllm` backend: on the stand-in here, unchanged on the real one
(tests/triton/stock.py). Where a test depends on weights or on a build that only the stand-in has, it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from tritonclient.utils import InferenceServerException

from python_backends.llm.engines.stock_facts import stock_facts
from python_backends.llm.gguf_header import read_gguf_header
from routers.registry import ALGORITHMS
from tests.triton.servers import Background, assert_clean_and_serving, wait_until
from tests.triton.stock import (
    BACKEND,
    REAL,
    TOKENS_PER_BLOCK,
    engine_folder,
    infer,
    max_seq_len,
    real_deployment,
    requests_made,
    stock_engine,
    stock_server,
)
from tests.unit.routers.trained import NETWORKS, network, write
from tools.client import Answer, GenerationError, TokenRouterClient
from tools.deployment import Deployment
from tools.errors import UserError
from tools.supervisor import RunningServer, running_server
from tools.validate import require_valid

pytestmark = pytest.mark.triton
stand_in_only = pytest.mark.skipif(REAL is not None, reason="needs the stand-in")

PROMPT = "Tell me about rivers."
PROMPTS = [PROMPT, "x", "How do I boil an egg? " * 10, "Why is the sky blue?", "Name a river.", "A poem, please."]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5}
ONLY_LOGITS: dict[str, dict[str, Any]] = {  # or not even those; with params by which both models write
    "rstitch": {"tau": 0.4 if REAL is None else 0.02},
    "me": {"weights": [0.5, 0.5]},
    "bild": {"threshold": 0.3 if REAL is None else 0.9},
    "random": {"p": 0.5},
    "markov": {"p": [[0.5, 0.5], [0.3, 0.7]], "c": [[1, 0], [1, 1]]},
    "single": {"model": 1},  # but for this one
}
RSTITCH = {"name": "rstitch", "params": ONLY_LOGITS["rstitch"]}
MORE = {
    "citer": "hidden_states",
    "co_llm": "hidden_states",
    "r2r": "hidden_states",
    "glimp": "token_bytes",
}


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An engine folder for each of the two tiny llama.cpp models; none for the real backend, where llama.cpp isn't."""
    if REAL is not None:
        return {}
    folder, folders = tmp_path_factory.mktemp("engines"), {}
    for model in request.getfixturevalue("tiny_deployment").models:
        tokens = read_gguf_header(Path(model.engine.weights)).arrays["tokenizer.ggml.tokens"]  # type: ignore[union-attr]
        folders[model.name] = engine_folder(folder / model.name, model.engine.model_dump(), tokens.length)
    return folders


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest, engines: dict[str, Path]) -> Any:
    """A deployment of stock models under a router; parts: other sections of it."""

    def deployment(router: dict[str, Any], count: int = 2, **parts: Any) -> Deployment:
        if REAL is not None:
            real = real_deployment(router=router, **parts)
            return real.model_copy(update={"models": real.models[:count]})
        ends = [1]
        return Deployment.model_validate(
            {
                "models": [
                    {"name": name, "engine": stock_engine(folder, eos_token_ids=ends)}
                    for name, folder in list(engines.items())[:count]
                ],
                "tokenizer": request.getfixturevalue("tiny_deployment").tokenizer,
                "router": router,
                "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
            }
            | parts
        )

    return deployment


@pytest.fixture(scope="module")
def server(stock: Any) -> Iterator[RunningServer]:
    with stock_server(stock(RSTITCH)) as running:
        yield running


def ask(server: RunningServer, **request: Any) -> Answer:
    with TokenRouterClient(server.grpc_url) as client:
        return Answer.of(client.generate(timeout_s=60, **({"text": PROMPT} | request)))


def kv(server: RunningServer, model: str) -> tuple[int, int]:
    status = server.control.status().models[model]
    return status["kv_reused_blocks"], status["kv_new_blocks"]


# The routers


def test_every_router_is_tried() -> None:
    assert sorted([*ONLY_LOGITS, *MORE]) == sorted(ALGORITHMS)


@pytest.mark.parametrize("name", list(ONLY_LOGITS))
def test_a_router_that_needs_only_logits(stock: Any, request: pytest.FixtureRequest, name: str) -> None:
    """Many requests at once; on the stand-in token for token what the engine llama_cpp gives."""
    router = {"name": name, "params": ONLY_LOGITS[name]}
    requests: list[tuple[str, dict[str, Any]]] = [(text, SAMPLED) for text in PROMPTS]
    if name != "me":  # it takes no greedy request
        requests += [(text, {"seed": 5}) for text in PROMPTS[:3]]  # the draws of `random` and `markov` too

    def answers(server: RunningServer) -> list[tuple[list[int], list[str]]]:
        with ThreadPoolExecutor(len(requests)) as pool:
            made = pool.map(lambda r: ask(server, text=r[0], max_tokens=40, ignore_eos=True, **r[1]), requests)
            return [(answer.ids, answer.models) for answer in made]

    with stock_server(stock(router)) as server:
        ours = answers(server)
        assert all(len(ids) == 40 for ids, _ in ours)
        assert {model for _, models in ours for model in models} == ({"llm"} if name == "single" else {"slm", "llm"})
        assert_clean_and_serving(server, input_ids=[3, 4], max_tokens=2, **SAMPLED)
    if REAL is None:
        parts = request.getfixturevalue("tiny_deployment").model_dump() | {"router": router}
        with running_server(Deployment.model_validate(parts)) as theirs:
            assert ours == answers(theirs)


def test_rstitch_both_models_write_and_log_probs_come(server: RunningServer) -> None:
    answer = ask(server, max_tokens=60, ignore_eos=True, return_log_probs=True)
    assert len(answer.ids) == 60 and set(answer.models) == {"slm", "llm"}
    assert_clean_and_serving(server)


@pytest.mark.parametrize(("name", "needs"), list(MORE.items()))
def test_a_router_that_needs_more_than_logits_is_refused_at_start(
    stock: Any, name: str, needs: str, tmp_path: Path
) -> None:
    params = {}
    if name in NETWORKS:
        params["weights"] = str(write(tmp_path / "router.safetensors", name, network(name)))
    deployment = stock({"name": name, "params": params})
    with pytest.raises(UserError) as refusal:
        require_valid(deployment)
    text = str(refusal.value)
    assert f"models[0].engine.type: got 'tensorrtllm'; router '{name}' needs {needs}" in text
    assert "allowed: llama_cpp" in text
    with pytest.raises(UserError, match=needs), running_server(deployment):
        pass


# Streaming, cancelling


def test_streamed_and_whole_are_the_same_answer(server: RunningServer) -> None:
    with TokenRouterClient(server.grpc_url) as client:
        chunks = list(client.generate(text=PROMPT, max_tokens=60, ignore_eos=True, timeout_s=60))
    assert len(chunks) > 5
    assert sum(len(c.ids) for c in chunks) == 60 and chunks[-1].usage["completion_tokens"] == 60
    assert chunks[-1].finish_reason == "length"
    whole = ask(server, max_tokens=60, ignore_eos=True, stream=False)
    if REAL is None:
        assert [i for c in chunks for i in c.ids] == whole.ids


def test_cancel(server: RunningServer) -> None:
    running = Background(server.grpc_url, text=PROMPT, max_tokens=400, ignore_eos=True)
    wait_until("the first tokens", lambda: len(running.answer.ids) > 3)
    running.client.cancel()
    running.join(10)
    assert running.error is not None and running.error.status is grpc.StatusCode.CANCELLED
    assert_clean_and_serving(server)


def test_many_at_once(server: RunningServer) -> None:
    alone = ask(server, max_tokens=30, ignore_eos=True)
    with ThreadPoolExecutor(12) as pool:
        requests = [pool.submit(ask, server, max_tokens=30, ignore_eos=True, text=f"{i} {PROMPT}") for i in range(11)]
        together = ask(server, max_tokens=30, ignore_eos=True)
        assert all(len(request.result().ids) == 30 for request in requests)
    if REAL is None:
        assert (together.ids, together.models) == (alone.ids, alone.models)
    assert_clean_and_serving(server)


# KV


def test_every_step_finds_the_blocks_of_the_one_before(stock: Any) -> None:
    """A step computes its last token; the rest is whole blocks and the beginning of one more."""
    prompt, made = list(range(3, 3 + 2 * TOKENS_PER_BLOCK + 5)), TOKENS_PER_BLOCK + 3
    deployment = stock({"name": "single"}, 1)
    block, name = deployment.models[0].engine.tokens_per_block, deployment.model_names[0]
    lengths = range(len(prompt), len(prompt) + made - 1)  # of what each step but the first finds
    with stock_server(deployment) as server:
        reused, new = kv(server, name)
        ask(server, text=None, input_ids=prompt, max_tokens=made, ignore_eos=True)
        first = kv(server, name)
        assert first[0] - reused == sum(-(-length // block) for length in lengths)
        assert first[1] - new <= -(-(len(prompt) + made) // block) + 1
        ask(server, text=None, input_ids=prompt, max_tokens=1)
        again = kv(server, name)
        assert again[0] - first[0] == -(-(len(prompt) - 1) // block)  # the prompt's last token is computed anew


def test_a_prompt_longer_than_a_chunk(stock: Any) -> None:
    """Chunks are requests of their own; each finds what the one before has left."""
    deployment = stock({"name": "single"}, 1)
    engine = deployment.models[0].engine
    prompt = [3 + i % 50 for i in range(engine.prefill_chunk + 40)]
    with stock_server(deployment) as server:
        before, requests = kv(server, "slm"), requests_made(server, "slm")
        ask(server, text=None, input_ids=prompt, max_tokens=1)
        assert requests_made(server, "slm") - requests == 2
        assert kv(server, "slm")[0] - before[0] == engine.prefill_chunk // engine.tokens_per_block


# What the model itself refuses


def test_an_over_long_prompt_is_refused_by_the_model(server: RunningServer) -> None:
    engine = server.deployment.models[0].engine
    longest = max_seq_len(engine) - 1  # of the engine as it was built: the deployment may give sessions less
    prompt = [3] * (longest + 1)
    with pytest.raises(
        InferenceServerException, match=f"Prompt length \\({longest + 1}\\) exceeds maximum input length"
    ):
        infer(server, "slm", input_ids=prompt, input_lengths=len(prompt), request_output_len=1)
    with pytest.raises(GenerationError, match="leave no room for an answer"):
        ask(server, text=None, input_ids=[3] * stock_facts(engine).context_tokens, max_tokens=1)  # type: ignore[arg-type]
    assert_clean_and_serving(server)


@stand_in_only
def test_make_test_gpu_runs_them_on_another_deployment(stock: Any, tmp_path: Path) -> None:
    """The stand-in in the real backend's place, under a deployment that gives sessions less than the engine has."""
    deployment = stock(RSTITCH).model_dump(mode="json", exclude_defaults=True)
    for model in deployment["models"]:
        model["engine"]["context_tokens"] = 256
    (tmp_path / "stock.yaml").write_text(yaml.safe_dump(deployment))
    done = subprocess.run(
        ["make", "test-gpu", f"DEPLOYMENT={tmp_path}/stock.yaml", f"TEST_PYTHON={sys.executable}",
         "ARGS=-p no:cacheprovider -k 'over_long or refused_parameter or streamed'"],
        cwd=Path(__file__).parents[2], env=os.environ | {"TOKENROUTER_BACKENDS": str(BACKEND)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


@stand_in_only
def test_what_the_model_refuses_is_an_error_of_that_request_only(stock: Any, engines: dict[str, Path]) -> None:
    """Without chunked context a prompt must fit in the engine's max_num_tokens, which no file of ours knows."""
    folder = engines["slm"].parent / "short"
    engine = stock_engine(
        engine_folder(folder, *_engine_of(engines["slm"]), max_num_tokens=48),
        eos_token_ids=[1], parameters={"enable_chunked_context": False},
    )  # fmt: skip
    with stock_server(stock({"name": "single"}, 1, models=[{"name": "slm", "engine": engine}])) as server:
        beside = Background(server.grpc_url, input_ids=[5, 6, 7], max_tokens=40, ignore_eos=True)
        with pytest.raises(GenerationError) as refusal:
            ask(server, text=None, input_ids=[4] * 60, max_tokens=5)
        text = refusal.value.message
        assert "Prompt length (60) exceeds maximum input length (48)" in text and "llmRequest.h" not in text
        beside.join(20)
        assert beside.error is None and len(beside.answer.ids) == 40
        assert_clean_and_serving(server)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"streaming": True}, "Streaming is only supported if model is deployed using decoupled mode"),
        ({"retention_token_range_starts": 0}, "retention_token_range_ends must be provided"),
        ({"outputs": ("output_ids",)}, "sequence_length tensor must be present in list of output tensors"),
    ],
)
def test_a_refused_parameter(server: RunningServer, request_: dict[str, Any], message: str) -> None:
    prompt = {"input_ids": [3, 4, 5], "input_lengths": 3, "request_output_len": 1}
    with pytest.raises(InferenceServerException, match=message):
        infer(server, "slm", **(prompt | request_))
    assert_clean_and_serving(server)


def test_stop_by_request_id(server: RunningServer) -> None:
    prompt = {"input_ids": [3, 4, 5], "input_lengths": 3}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(infer, server, "llm", request_id="stop-me", **prompt, request_output_len=400)
        time.sleep(0.05)
        infer(server, "llm", request_id="stop-me", stop=True, input_lengths=1, request_output_len=1)
        assert int(running.result(20).as_numpy("sequence_length").reshape(-1)[0]) < 400
    infer(server, "llm", request_id="never-there", stop=True, input_lengths=1, request_output_len=1)
    with pytest.raises(InferenceServerException, match="request ID is not provided"):
        infer(server, "llm", stop=True, input_lengths=1, request_output_len=1)


def _engine_of(folder: Path) -> tuple[dict[str, Any], int]:
    """What the stand-in runs there, and its vocabulary."""
    engine, build = (json.loads((folder / name).read_text()) for name in ("stand_in.json", "config.json"))
    return engine, build["pretrained_config"]["vocab_size"]
