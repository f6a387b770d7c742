# SPDX-License-Identifier: Apache-2.0
"""One KV buffer for all sessions, on real weights: filled to the last token, and nobody meets a full one."""

from __future__ import annotations

import random

import pytest
import torch

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.engines.llama_cpp import LlamaCppEngine
from tests.triton.servers import Background, assert_clean_and_serving, wait_until
from tools.deployment import Deployment
from tools.supervisor import running_server

pytestmark = pytest.mark.model

POOL = 768
LIMIT = 192  # of one request: four fill the pool


def _engine() -> LlamaCppEngine:
    return LlamaCppEngine(
        LlamaCppConfig(
            type="llama_cpp",
            weights="smollm2-135m-q4_0",
            context_tokens=512,
            max_sessions=8,
            kv_tokens=POOL,
            prefill_chunk=64,
            deterministic=False,
        )
    )


def test_the_buffer_holds_every_token_of_it_however_they_are_scattered() -> None:
    """Sessions that grow by turns, shrink, end and begin leave holes; the next ones fill them."""
    engine = _engine()
    rng = random.Random(1)
    lengths: dict[int, int] = {}

    def grow(session: int, count: int) -> None:
        start = lengths[session]
        output = engine.step([SessionStep(session, start, [5 + (start + k) % 100 for k in range(count)])])
        assert not output.errors and output.logits is not None and bool(torch.isfinite(output.logits).all())
        lengths[session] = start + count

    number = 0
    for _ in range(4):
        while POOL - sum(lengths.values()) > 0:
            room = POOL - sum(lengths.values())
            growing = [s for s, n in lengths.items() if n < 512]
            if len(lengths) < 8 and (not growing or rng.random() < 0.5):
                number += 1
                engine.open(SessionOpen(number, prompt_tokens=1, limit=512))
                lengths[number] = 0
                growing.append(number)
            session = rng.choice(growing)
            grow(session, min(room, rng.randint(1, 64), 512 - lengths[session]))
        assert sum(lengths.values()) == POOL
        for session in rng.sample(list(lengths), len(lengths) // 2):
            engine.free([session])
            del lengths[session]
        if lengths:
            session = rng.choice(list(lengths))
            lengths[session] //= 2  # the next step drops what is past it
            grow(session, 1)
    engine.close()


@pytest.mark.triton
def test_two_models_filled_to_capacity_and_one_more_request_waits() -> None:
    """Every token of both pools is reserved, and all but the last one of each sequence is in the KV at the end."""
    engine = {
        "type": "llama_cpp", "context_tokens": 512, "max_sessions": 8, "kv_tokens": POOL, "deterministic": False
    }  # fmt: skip
    deployment = Deployment.model_validate(
        {
            "models": [
                {"name": "slm", "engine": {**engine, "weights": "smollm2-135m-q4_0"}},
                {"name": "llm", "engine": {**engine, "weights": "smollm2-135m-q8_0"}},
            ],
            "router": {"name": "random", "params": {"p": 0.5}},
            "limits": {"max_live": 8},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        }
    )
    with running_server(deployment) as server:

        def ask(prompt: int) -> Background:
            return Background(
                server.grpc_url, input_ids=list(range(5, 5 + prompt)), max_tokens=LIMIT - prompt, ignore_eos=True
            )

        first = [ask(prompt) for prompt in (8, 40, 100, 150)]
        wait_until("four requests are live", lambda: server.control.status().live == 4)
        late = ask(30)
        status = wait_until("the fifth waits", lambda: s if (s := server.control.status()).queued == 1 else None)
        assert [(m["kv_reserved"], m["kv_free"]) for m in status.models.values()] == [(POOL, 0)] * 2
        assert not late.answer.ids
        for request, count in zip([*first, late], (184, 152, 92, 42, 162), strict=True):
            request.join(60)
            assert request.error is None and len(request.answer.ids) == count
        assert_clean_and_serving(server)
