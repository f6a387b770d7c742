# SPDX-License-Identifier: Apache-2.0
"""GlimpRouter's style on real weights through the real server: whole lines, each by one model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from python_backends.llm.catalog import locate_tokenizer
from python_backends.token_router.tokenizer import Tokenizer
from routers import RouterConfig
from tests.model.reference import Reference
from tests.triton.servers import assert_clean_and_serving
from tools.client import Answer, TokenRouterClient
from tools.deployment import load_deployment
from tools.supervisor import running_server

pytestmark = [pytest.mark.model, pytest.mark.triton]

TOKENS, TAU = 64, 0.2
QUESTIONS = ["Write a poem of eight short lines.", "List ten fruits, one a line.", "Count from one to ten, one a line."]


def test_glimp_writes_whole_lines_and_equals_its_sequential_loop() -> None:
    shipped = load_deployment("smollm2")
    deployment = shipped.model_copy(
        update={
            "router": RouterConfig(name="glimp", params={"tau": TAU}),
            "server": shipped.server.model_copy(update={"http_port": 0, "grpc_port": 0, "metrics_port": 0}),
        }
    )
    tokenizer = Tokenizer(locate_tokenizer(str(deployment.tokenizer)))
    prompts = [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    ends = {i for i, piece in enumerate(tokenizer.pieces) if piece.endswith(b"\n")}
    reference = Reference(deployment)
    expected = [reference.glimp(prompt, TOKENS, TAU, ends) for prompt in prompts]
    reference.close()
    assert {m for _, makers in expected for m in makers} == {"slm", "llm"}  # else it would show nothing

    with running_server(deployment) as server:

        def ask(prompt: list[int]) -> tuple[list[int], list[str]]:
            with TokenRouterClient(server.grpc_url) as client:
                inputs = {"input_ids": prompt, "max_tokens": TOKENS, "ignore_eos": True, "timeout_s": 100}
                answer = Answer.of(client.generate(**inputs))
            return answer.ids, answer.models

        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask, prompts))
        assert answers == expected
        for ids, models in answers:
            assert all(token in ends for token, (one, next_one) in zip(ids, pairwise(models)) if one != next_one)  # noqa: B905
        assert_clean_and_serving(server)
