# SPDX-License-Identifier: Apache-2.0
"""One KV buffer for all sessions, on real weights: filled to the last token, and nobody meets a full one."""

from __future__ import annotations

import random
import time

import pytest
import torch
import tritonclient.grpc as triton

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.engines.llama_cpp import LlamaCppEngine
from python_backends.llm.sampling import routing_stream, uniform
from tests.triton.servers import Background, assert_clean_and_serving, wait_until
from tools.deployment import Deployment
from tools.sizing.joint import sized
from tools.supervisor import RunningServer, running_server

pytestmark = pytest.mark.model

POOL = 768
SMALL = 256  # the smallest pool that llama.cpp makes
LIMIT = 64  # of one request: four fill the small pool


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
    """Sized by `memory` to 256 tokens: 224 MiB less 77,571,136 and 144,811,072 bytes of weights, over 2 * 23,040
    bytes a token, in whole blocks of 256, of which there is one.

    Four requests of 64 tokens go in step: admitted at once, with one seed (whose draws decide who writes) and a
    barrier after each step. So they end in one step too, and then all is in the KV of both models but the last
    token of each, which no model is given."""
    engine = {"type": "llama_cpp", "context_tokens": SMALL, "max_sessions": 8, "deterministic": False}
    deployment = Deployment.model_validate(
        {
            "models": [
                {"name": "slm", "engine": {**engine, "weights": "smollm2-135m-q4_0"}},
                {"name": "llm", "engine": {**engine, "weights": "smollm2-135m-q8_0"}},
            ],
            "router": {"name": "random", "params": {"p": 0.5}},
            "memory": {"devices": {"host": "224MiB"}, "reserve": 0},
            "batching": {"policy": "step_sync"},
            "limits": {"max_live": 8},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        }
    )
    assert [m.engine.kv_tokens for m in deployment.models] == [None, None]  # type: ignore[union-attr]
    assert [m.engine.kv_tokens for m in sized(deployment).models] == [SMALL, SMALL]  # type: ignore[union-attr]
    seed = next(s for s in range(99) if uniform(s, LIMIT - 1, routing_stream(0)) < 0.5)  # the LLM makes the last token

    with running_server(deployment) as server:

        def ask(prompt: list[int], max_tokens: int) -> Background:
            return Background(server.grpc_url, input_ids=prompt, max_tokens=max_tokens, ignore_eos=True, seed=seed)

        before = ask(list(range(5, 13)), SMALL - 8)  # everything is its own, so that the four come in together
        wait_until("it has begun", lambda: before.answer.ids)
        first = [ask(list(range(5 + i, 13 + i)), LIMIT - 8) for i in range(4)]
        wait_until("four wait", lambda: server.control.status().queued == 4)
        late = ask(list(range(5, 5 + LIMIT - 16)), 16)
        wait_until("and a fifth", lambda: server.control.status().queued == 5)
        before.client.cancel()
        status = wait_until("four are live", lambda: s if (s := server.control.status()).live == 4 else None)
        assert status.queued == 1 and not late.answer.ids
        assert [(m["kv_reserved"], m["kv_free"]) for m in status.models.values()] == [(SMALL, 0)] * 2

        held = dict.fromkeys(deployment.model_names, 0)
        while late.is_alive():
            status = server.control.status()
            assert status.live <= 4 and not any(m["problem"] for m in status.models.values())
            for name, model in status.models.items():
                held[name] = max(held[name], model["kv_tokens"])
            time.sleep(0.01)
        assert held == dict.fromkeys(deployment.model_names, SMALL - len(first))
        for request, count in zip([*first, late], [LIMIT - 8] * 4 + [16], strict=True):
            request.join(60)
            assert request.error is None and len(request.answer.ids) == count
        assert {request.answer.models[-1] for request in first} == {"llm"}
        assert late.answer.first_at > max(request.answer.last_at for request in first)  # type: ignore[operator,type-var]
        assert_clean_and_serving(server)
        assert _failures(server) == {"slm": 0, "llm": 0}


def _failures(server: RunningServer) -> dict[str, int]:
    """Calls of each model that failed, as Triton counts them."""
    with triton.InferenceServerClient(server.grpc_url) as client:
        found = client.get_inference_statistics(as_json=True)["model_stats"]
    return {m["name"]: int(m["inference_stats"]["fail"].get("count", 0)) for m in found if m["name"] in ("slm", "llm")}
