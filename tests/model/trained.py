# SPDX-License-Identifier: Apache-2.0
"""What R2R, CITER and Co-LLM decide, one token at a time, without any of the routers' code; and the comparison of a
server with the sequential loop that decides so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from python_backends.llm.catalog import locate_tokenizer
from python_backends.token_router.tokenizer import Tokenizer
from routers import RouterConfig
from tests.model.asking import ask
from tests.model.reference import Delegates, Reference
from tools.deployment import Deployment
from tools.supervisor import RunningServer

__all__ = ["Case", "case_of", "delegates", "encoded", "makers_of_equal_answers", "probability"]


@dataclass
class Case:
    """A deployment with a trained router, and the reference's answers. tokens: of each."""

    deployment: Deployment
    questions: Sequence[str]
    prompts: list[list[int]]
    tokens: int
    expected: list[tuple[list[int], list[str]]]


def encoded(deployment: Deployment, questions: Sequence[str]) -> list[list[int]]:
    """Each question as the models get it."""
    tokenizer = Tokenizer(locate_tokenizer(str(deployment.tokenizer)))
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]


def case_of(
    deployment: Deployment, router: RouterConfig, reference: Reference, decide: Delegates, questions: Sequence[str],
    tokens: int,
) -> Case:  # fmt: skip
    """The deployment with this router on free ports, and what the reference answers where it decides so. Closes it."""
    prompts = encoded(deployment, questions)
    expected = [reference.one_token(prompt, tokens, decide) for prompt in prompts]
    reference.close()
    server = deployment.server.model_copy(update={"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    served = deployment.model_copy(update={"router": router, "server": server})
    return Case(served, questions, prompts, tokens, expected)


def makers_of_equal_answers(server: RunningServer, case: Case, at_once: int, prompts: int) -> list[str]:
    """The first so many prompts, asked so many at once, are answered as by the reference. Returns the model that made
    each of their tokens."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt, case.tokens, 200), case.prompts[:prompts]))
    assert len(answers) == prompts
    for question, answer, expected in zip(case.questions, answers, case.expected, strict=False):
        assert answer == expected, f"{question}: {answer}, expected {expected}"
    return [maker for _, made in answers for maker in made]


def probability(
    algorithm: str, network: torch.nn.Module, hidden: torch.Tensor, logits: torch.Tensor, embedding: torch.Tensor
) -> float:
    """What the network says of one token: of its divergence (r2r), of the confidence in it (citer), of deferring
    (co_llm). Of the small model: its hidden state, its logits and its token's embedding."""
    with torch.inference_mode():
        inputs = [hidden[None]]
        if algorithm == "r2r":
            inputs += [logits.sort(descending=True).values[None, :100], embedding[None]]
        return float(network(*inputs).double().sigmoid())


def delegates(algorithm: str, network: torch.nn.Module, threshold: float) -> Delegates:
    """The algorithm's comparison of that probability with its threshold."""

    def decide(*step: torch.Tensor) -> bool:
        said = probability(algorithm, network, *step)
        return {"r2r": said >= threshold, "citer": said < threshold, "co_llm": said > threshold}[algorithm]

    return decide
