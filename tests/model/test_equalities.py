# SPDX-License-Identifier: Apache-2.0
"""Invariants 2 and 3 on real weights through the real server: token for token."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from python_backends.llm.catalog import locate_tokenizer
from python_backends.llm.contract import SamplingParams
from python_backends.token_router.tokenizer import Tokenizer
from tests.model.asking import ask_rstitch
from tests.model.reference import Reference
from tests.triton.servers import assert_clean_and_serving
from tools.deployment import Deployment, load_deployment
from tools.supervisor import RunningServer, running_server

pytestmark = [pytest.mark.model, pytest.mark.triton]

TOKENS = 48
TAU = 0.15
SAMPLING = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5, seed=7
)
QUESTIONS = [
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
    "How do I boil an egg?",
    "List three uses of a paper clip.",
    "Explain recursion to a child, with an example from daily life. " * 12,  # more than one prefill chunk
    "What is 17 times 23?",
    "Name a river in Africa and say where it ends.",
    "Translate 'good morning' into French.",
]


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    shipped = load_deployment("smollm2")
    return shipped.model_copy(
        update={"server": shipped.server.model_copy(update={"http_port": 0, "grpc_port": 0, "metrics_port": 0})}
    )


@pytest.fixture(scope="module")
def prompts(deployment: Deployment) -> list[list[int]]:
    tokenizer = Tokenizer(locate_tokenizer(str(deployment.tokenizer)))
    return [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]


@pytest.fixture(scope="module")
def expected(deployment: Deployment, prompts: list[list[int]]) -> dict[str, list[tuple[list[int], list[str]]]]:
    """The sequential reference of every setting, computed once, in this process."""
    reference = Reference(deployment)
    slm, llm = reference.names
    answers = {
        "routed": [reference.rstitch(p, TOKENS, TAU) for p in prompts],
        "slm": [(reference.alone(0, p, TOKENS), [slm] * TOKENS) for p in prompts],
        "llm": [(reference.alone(1, p, TOKENS), [llm] * TOKENS) for p in prompts],
        "sampled": [reference.rstitch(p, TOKENS, TAU, SAMPLING) for p in prompts[:4]],
    }
    reference.close()
    return answers


@pytest.fixture(scope="module")
def server(deployment: Deployment, expected: Any) -> Iterator[RunningServer]:
    with running_server(deployment) as running:
        yield running


@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_rstitch_equals_the_sequential_loop(
    server: RunningServer, prompts: list[list[int]], expected: Any, at_once: int
) -> None:
    work = [(i, p) for i, p in enumerate(prompts)] * (2 if at_once == 16 else 1)
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda item: ask_rstitch(server, item[1], TOKENS, TAU), work))
    for (i, _), answer in zip(work, answers, strict=True):
        assert answer == expected["routed"][i], QUESTIONS[i]
    makers = {m for _, made in answers for m in made}
    assert makers == {"slm", "llm"}  # both wrote, or the test would show nothing
    assert_clean_and_serving(server)


def test_sampling_equals_the_sequential_loop(server: RunningServer, prompts: list[list[int]], expected: Any) -> None:
    """Penalties count every token, whichever model made it, and a seed's draws don't depend on the batch."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda p: ask_rstitch(server, p, TOKENS, TAU, **asdict(SAMPLING)), prompts[:4]))
    assert answers == expected["sampled"]
    assert {m for _, made in answers for m in made} == {"slm", "llm"}
    assert answers != expected["routed"][:4]


@pytest.mark.parametrize(("who", "tau"), [("slm", 1.0), ("llm", 0.0)])
def test_never_delegating_is_the_slm_and_always_is_the_llm(
    server: RunningServer, prompts: list[list[int]], expected: Any, who: str, tau: float
) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda p: ask_rstitch(server, p, TOKENS, tau), prompts))
    for i, answer in enumerate(answers):
        assert answer == expected[who][i], QUESTIONS[i]
    assert_clean_and_serving(server)
