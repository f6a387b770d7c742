# SPDX-License-Identifier: Apache-2.0
"""The other scheduling policies and handoff without resume on a real server: the same answers, made otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest

from python_backends.llm.engines.paced import next_token
from tests.triton.servers import VOCABULARY, Background, assert_clean_and_serving, paced_deployment
from tools.client import Answer
from tools.deployment import Deployment
from tools.supervisor import RunningServer, running_server

pytestmark = pytest.mark.triton

STEPS_MS = (4.0, 6.0)
PREFILL_MS = 0.2  # of a token
TOKENS = 30
PROMPTS = [[n, *range(100, 120)] for n in range(3, 9)]


def deployment(**batching: Any) -> Deployment:
    router = {"name": "random", "params": {"p": 0.4}}
    return paced_deployment(STEPS_MS, router=router, batching=batching, prefill_token_ms=PREFILL_MS)


def answers(server: RunningServer) -> list[Answer]:
    """Of all prompts, asked at once, each with a seed of its own."""
    clients = [
        Background(server.grpc_url, input_ids=prompt, max_tokens=TOKENS, ignore_eos=True, seed=seed)
        for seed, prompt in enumerate(PROMPTS)
    ]
    for client in clients:
        client.join()
        assert client.error is None
    return [client.answer for client in clients]


def written(found: Sequence[Answer]) -> list[list[tuple[int, str]]]:
    return [list(zip(answer.ids, answer.models, strict=True)) for answer in found]


@pytest.fixture(scope="module")
def reference() -> list[list[tuple[int, str]]]:
    """What `async` with resume writes, each token of exactly the prefix before it."""
    with running_server(deployment()) as server:
        found = written(answers(server))
    for prompt, answer in zip(PROMPTS, found, strict=True):
        prefix = list(prompt)
        assert len(answer) == TOKENS and {model for _, model in answer} == {"slm", "llm"}
        for token, model in answer:
            assert token == next_token(model, prefix, VOCABULARY, 0)
            prefix.append(token)
    return found


def prefilled_again_ms(found: Sequence[Answer]) -> float:
    """What the LLM's engine takes at least for the prefixes of those that come back to it, beyond their steps."""
    tokens = 0
    for prompt, answer in zip(PROMPTS, found, strict=True):
        turns = groupby(enumerate(answer.models), key=lambda written: written[1])
        visits = [next(turn)[0] for model, turn in turns if model == "llm"]
        tokens += sum(len(prompt) + at - 1 for at in visits[1:])
    return tokens * PREFILL_MS


@pytest.mark.parametrize("batching", [{"policy": "step_sync"}, {"policy": "model_sync"}, {"resume": False}], ids=str)
def test_the_answers_are_those_of_async_with_resume(
    batching: dict[str, Any], reference: list[list[tuple[int, str]]]
) -> None:
    with running_server(deployment(**batching)) as server:
        found = answers(server)
        assert written(found) == reference
        if batching == {"resume": False}:
            llm = server.control.status().models["llm"]
            assert llm["engine_ms"] >= llm["steps"] * STEPS_MS[1] + prefilled_again_ms(found)
        assert_clean_and_serving(server)
