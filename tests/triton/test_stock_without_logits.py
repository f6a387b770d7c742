# SPDX-License-Identifier: Apache-2.0
"""Models of the stock `tensorrtllm` backend built without logits, on the stand-in around paced engines: greedy runs of
several tokens, lost KV, a step that hangs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.triton.servers import VOCABULARY, Background, ask, assert_clean_and_serving, paced_tokens, wait_until
from tests.triton.stock import REAL, TOKENS_PER_BLOCK, engine_folder, infer, requests_made, stock_engine, stock_server
from tools.client import GenerationError
from tools.deployment import Deployment

pytestmark = [pytest.mark.triton, pytest.mark.skipif(REAL is not None, reason="needs the stand-in")]


@pytest.fixture(scope="module")
def paced_stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Stock models on paced engines, which give no logits."""

    def deployment(
        step_ms: float, router: dict[str, Any], limits: dict[str, Any], prefill_token_ms: float = 0, **engine: Any
    ) -> Deployment:
        paced = {
            "type": "paced",
            "step_ms": step_ms,
            "prefill_token_ms": prefill_token_ms,
            "vocab_size": VOCABULARY,
            "context_tokens": 512,
            "max_sessions": 32,
        }
        settings = {"eos_token_ids": [0], "return_logits": False} | engine
        folder = tmp_path_factory.mktemp("paced")
        return Deployment.model_validate(
            {
                "models": [
                    {"name": n, "engine": stock_engine(engine_folder(folder / n, paced, VOCABULARY), **settings)}
                    for n in ("slm", "llm")
                ],
                "router": router,
                "limits": limits,
                "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
            }
        )

    return deployment


@pytest.mark.parametrize("run_tokens", [1, 4])
def test_greedy_runs_without_logits(paced_stock: Any, run_tokens: int) -> None:
    """A run of several tokens is one request, and changes no token."""
    deployment = paced_stock(1.0, {"name": "random", "params": {"p": 0.0}}, {}, run_tokens=run_tokens)
    with stock_server(deployment) as server:
        before = requests_made(server, "slm")
        answer = ask(server, input_ids=[5, 6, 7], max_tokens=40, ignore_eos=True)
        assert answer.ids == paced_tokens("slm", [5, 6, 7], 40)
        assert requests_made(server, "slm") - before == 40 // run_tokens
        with pytest.raises(GenerationError, match="can't sample"):
            ask(server, input_ids=[5], temperature=0.7)


def test_a_run_is_thrown_away_where_the_session_comes_back_changed(paced_stock: Any) -> None:
    deployment = paced_stock(1.0, {"name": "random", "params": {"p": 0.4}}, {}, run_tokens=4)
    with stock_server(deployment) as server:
        answer = ask(server, input_ids=[5, 6, 7], max_tokens=60, ignore_eos=True)
        tokens = [5, 6, 7]
        for token, model in zip(answer.ids, answer.models, strict=True):
            assert token == paced_tokens(model, tokens, 1)[0]
            tokens.append(token)
        assert set(answer.models) == {"slm", "llm"}
        assert_clean_and_serving(server)


def test_blocks_that_were_lost_are_computed_again(paced_stock: Any) -> None:
    """Somebody else takes all the KV between two steps: no token changes; the blocks are counted, the time is taken."""
    prefill_ms, prompt = 4.0, list(range(3, 3 + 6 * TOKENS_PER_BLOCK))
    pool = 8 * TOKENS_PER_BLOCK  # too small for both
    deployment = paced_stock(40.0, {"name": "random", "params": {"p": 0.0}}, {}, prefill_ms, max_tokens=pool)
    request = {"input_ids": prompt, "max_tokens": TOKENS_PER_BLOCK, "ignore_eos": True}

    def kept() -> tuple[int, int, float]:
        status = server.control.status().models["slm"]
        return status["kv_reused_blocks"], status["kv_new_blocks"], status["compute_ms"]

    with stock_server(deployment) as server:
        start = kept()
        running = Background(server.grpc_url, **request)
        wait_until("the first tokens", lambda: len(running.answer.ids) > 2)
        other = [7] * (pool - 1)
        infer(server, "slm", input_ids=other, input_lengths=len(other), request_output_len=1)
        running.join(20)
        assert running.error is None and running.answer.ids == paced_tokens("slm", prompt, TOKENS_PER_BLOCK)
        lost = [now - then for now, then in zip(kept(), start, strict=True)]

        assert_clean_and_serving(server)
        start = kept()
        whole = ask(server, **(request | {"input_ids": [token + 200 for token in prompt]}))
        undisturbed = [now - then for now, then in zip(kept(), start, strict=True)]
        assert len(whole.ids) == TOKENS_PER_BLOCK
    assert undisturbed[1] <= 8 and lost[1] >= undisturbed[1] + 6  # the prompt's blocks, a second time
    assert lost[0] <= undisturbed[0] - 6
    assert lost[2] >= undisturbed[2] + 0.5 * prefill_ms * len(prompt)  # the rest of it is for a slow machine's steps


def test_a_step_that_hangs_is_stopped_and_fails(paced_stock: Any) -> None:
    """Somebody else has taken all the KV: the request waits inside the executor."""
    deployment = paced_stock(25.0, {"name": "random", "params": {"p": 0.0}}, {"step_timeout_s": 0.6}, max_tokens=256)
    with stock_server(deployment) as server, ThreadPoolExecutor(1) as pool:
        other = pool.submit(infer, server, "slm", input_ids=[3] * 10, input_lengths=10, request_output_len=240)
        time.sleep(0.3)
        began = time.monotonic()
        with pytest.raises(GenerationError, match="it was stopped before it made a token"):
            ask(server, input_ids=[5, 6, 7] * 8, max_tokens=4)
        assert time.monotonic() - began < 5 and not other.done()
        other.result(30)
        assert_clean_and_serving(server)
        assert server.control.status().models["slm"]["state"] == "up"
