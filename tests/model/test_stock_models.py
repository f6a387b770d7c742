# SPDX-License-Identifier: Apache-2.0
"""Stock `tensorrtllm` models against the engine llama_cpp, both on the same real weights: token for token.

The stand-in computes with that engine, so what is compared is everything around it: prefixes sent whole, KV found by
blocks or computed again, logits handed over, sampling and routing in token_router's process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from python_backends.llm.catalog import locate_tokenizer, locate_weights
from python_backends.llm.contract import SamplingParams
from python_backends.llm.gguf_header import read_gguf_header
from python_backends.token_router.tokenizer import Tokenizer
from tests.model.asking import ask, ask_rstitch
from tests.model.reference import Reference
from tests.triton.servers import assert_clean_and_serving
from tests.triton.stock import REAL, engine_folder, stock_engine, stock_server
from tools.deployment import Deployment, load_deployment
from tools.supervisor import RunningServer, running_server

pytestmark = [
    pytest.mark.model,
    pytest.mark.triton,
    pytest.mark.skipif(REAL is not None, reason="its tokens are llama.cpp's"),
]

TOKENS = 40
TAU = 0.15
SAMPLING = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.5, seed=7)
QUESTIONS = [
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Explain recursion to a child, with an example from daily life. " * 12,  # more than one of the engine's chunks
    "What is 17 times 23?",
    "Name a river in Africa and say where it ends.",
]


def _stock(shipped: Deployment, folder: Path) -> Deployment:
    """The shipped pair, its engines inside stock models."""
    models = []
    for model in shipped.models:
        engine = model.engine.model_dump()
        header = read_gguf_header(locate_weights(engine["weights"]))
        built = engine_folder(folder / model.name, engine, header.arrays["tokenizer.ggml.tokens"].length)
        eos = header.values["tokenizer.ggml.eos_token_id"]
        models.append({"name": model.name, "engine": stock_engine(built, eos_token_ids=[eos])})
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    rest = {"tokenizer": shipped.tokenizer, "router": shipped.router.model_dump(), "server": ports}
    return Deployment.model_validate({"models": models, **rest})


def test_tokens_equal_those_of_the_sequential_loop_on_llama_cpp(tmp_path: Path) -> None:
    shipped = load_deployment("smollm2")
    tokenizer = Tokenizer(locate_tokenizer(str(shipped.tokenizer)))
    prompts = [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    reference = Reference(shipped)
    greedy = [reference.rstitch(p, TOKENS, TAU) for p in prompts]
    sampled = [reference.rstitch(p, TOKENS, TAU, SAMPLING) for p in prompts[:3]]
    reference.close()
    assert {m for _, made in greedy for m in made} == set(shipped.model_names)  # or the test would show nothing
    with stock_server(_stock(shipped, tmp_path)) as server:
        assert [ask_rstitch(server, p, TOKENS, TAU) for p in prompts[:2]] == greedy[:2]
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(lambda p: ask_rstitch(server, p, TOKENS, TAU), prompts)) == greedy
            assert (
                list(pool.map(lambda p: ask_rstitch(server, p, TOKENS, TAU, **asdict(SAMPLING)), prompts[:3]))
                == sampled
            )
        blocks = server.control.status().models
        assert all(model["kv_reused_blocks"] > 5 * model["kv_new_blocks"] for model in blocks.values())
        assert_clean_and_serving(server)


def test_a_mixture_gives_the_tokens_of_the_engine_llama_cpp(tmp_path: Path) -> None:
    """ME, which hands over at almost every token and samples; the other routers: tests/triton/test_tensorrtllm.py."""
    asked: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "seed": 3}
    parts = load_deployment("smollm2").model_dump()
    parts |= {"router": {"name": "me", "params": {"weights": [0.6, 0.4]}}}
    parts["server"] |= {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    shipped = Deployment.model_validate(parts)
    tokenizer = Tokenizer(locate_tokenizer(str(shipped.tokenizer)))
    prompts = [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS[-3:]]

    def answers(server: RunningServer) -> list[tuple[list[int], list[str]]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: ask(server, prompt, 24, 200, **asked), prompts))

    with stock_server(_stock(shipped, tmp_path)) as server:
        ours = answers(server)
        assert_clean_and_serving(server, input_ids=prompts[0], max_tokens=2, **asked)
    with running_server(shipped) as server:
        assert ours == answers(server)
    assert {model for _, models in ours for model in models} == set(shipped.model_names)
