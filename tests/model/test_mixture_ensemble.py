# SPDX-License-Identifier: Apache-2.0
"""ME on real weights through the real server: three members, token for token, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from python_backends.llm.catalog import locate_tokenizer
from python_backends.llm.contract import SamplingParams
from python_backends.token_router.tokenizer import Tokenizer
from tests.model.asking import ask
from tests.model.reference import Reference
from tests.triton.servers import assert_clean_and_serving
from tools.client import Answer, GenerationError, TokenRouterClient
from tools.deployment import Deployment
from tools.supervisor import RunningServer, running_server

pytestmark = [pytest.mark.model, pytest.mark.triton]

TOKENS = 20
WEIGHTS = [0.5, 0.3, 0.2]
MEMBERS = {
    "slm": "smollm2-135m-q4_0",
    "llm": "smollm2-135m-q8_0",
    "xl": "smollm2-135m-q4_0",
}  # of bits that don't change
QUESTIONS = [
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
    "How do I boil an egg?",
    "What is 17 times 23?",
    "Name a river in Africa and say where it ends.",
    "Translate 'good morning' into French.",
    "List three uses of a paper clip.",
]

Answers = list[tuple[list[int], list[str]]]


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return Deployment.model_validate(
        {
            "models": [
                {
                    "name": name,
                    "engine": {"type": "llama_cpp", "weights": weights, "max_sessions": 8, "context_tokens": 512},
                }
                for name, weights in MEMBERS.items()
            ],
            "tokenizer": "smollm2",
            "router": {"name": "me", "params": {"weights": WEIGHTS}},
            "limits": {"max_live": 8},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        }
    )


@pytest.fixture(scope="module")
def prompts(deployment: Deployment) -> list[list[int]]:
    """The last one has one token."""
    tokenizer = Tokenizer(locate_tokenizer(str(deployment.tokenizer)))
    return [*(tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS), tokenizer.encode("The")[:1]]


def _sampling(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=40, seed=seed)


@pytest.fixture(scope="module")
def expected(deployment: Deployment, prompts: list[list[int]]) -> Answers:
    """The sequential reference, in this process."""
    reference = Reference(deployment)
    answers = [reference.me(prompt, TOKENS, WEIGHTS, _sampling(seed)) for seed, prompt in enumerate(prompts)]
    reference.close()
    return answers


@pytest.fixture(scope="module")
def server(deployment: Deployment, expected: Answers) -> Iterator[RunningServer]:
    with running_server(deployment) as running:
        yield running


def _ask(server: RunningServer, prompt: list[int], seed: int, max_tokens: int = TOKENS) -> tuple[list[int], list[str]]:
    sampling = _sampling(seed)
    return ask(server, prompt, max_tokens, 100, temperature=sampling.temperature, top_k=sampling.top_k, seed=seed)


@pytest.mark.parametrize("at_once", [1, 8])
def test_it_equals_the_sequential_loop(
    server: RunningServer, prompts: list[list[int]], expected: Answers, at_once: int
) -> None:
    count = 8 if at_once == 8 else 3
    work = list(enumerate(prompts))[-count:]
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda item: _ask(server, item[1], item[0]), work))
    assert answers == expected[-count:]
    assert {m for _, models in answers for m in models} == set(MEMBERS)
    assert_clean_and_serving(server, input_ids=[3, 4], max_tokens=2, temperature=1.0)


def test_an_answer_of_one_token(server: RunningServer, prompts: list[list[int]], expected: Answers) -> None:
    """By whichever model it was drawn for: those of the reference's first tokens."""
    answers = [_ask(server, prompt, seed, max_tokens=1) for seed, prompt in enumerate(prompts)]
    assert answers == [(ids[:1], models[:1]) for ids, models in expected]
    assert len({models[0] for _, models in answers}) > 1


def test_a_greedy_request_is_refused(server: RunningServer) -> None:
    with (
        TokenRouterClient(server.grpc_url) as client,
        pytest.raises(GenerationError, match="temperature: router 'me' must sample; allowed: 1e-05 or more, got 0"),
    ):
        Answer.of(client.generate(input_ids=[3, 4], max_tokens=2, timeout_s=20))
    assert_clean_and_serving(server, input_ids=[3, 4], max_tokens=2, temperature=1.0)
