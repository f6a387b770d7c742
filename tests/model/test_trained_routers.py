# SPDX-License-Identifier: Apache-2.0
"""R2R, CITER and Co-LLM with small random networks on real weights, through the real server: token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from routers import RouterConfig
from routers.networks import CiterNetwork, CoLLMHead, R2RNetwork
from routers.weights import RouterHeader, save_router
from tests.model.reference import Reference
from tests.model.trained import Case, case_of, delegates, encoded, makers_of_equal_answers, probability
from tests.triton.servers import assert_clean_and_serving
from tools.deployment import load_deployment
from tools.supervisor import RunningServer, running_server
from tools.validate import check

pytestmark = [pytest.mark.model, pytest.mark.triton]

TOKENS = 16
SHARE = 0.2  # of the small model's tokens, to be delegated
HIDDEN, VOCAB = 576, 49152
NETWORKS: dict[str, tuple[type[torch.nn.Module], dict[str, Any]]] = {
    "r2r": (R2RNetwork, {"hidden_size": HIDDEN, "embedding_size": HIDDEN, "width": 64, "blocks": 2}),
    "citer": (CiterNetwork, {"hidden_size": HIDDEN, "width": 32}),
    "co_llm": (CoLLMHead, {"hidden_size": HIDDEN, "bias": False}),
}
QUESTIONS = [
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
    "How do I boil an egg?",
    "List three uses of a paper clip.",
    "What is 17 times 23?",
    "Name a river in Africa and say where it ends.",
    "Translate 'good morning' into French.",
    "Explain recursion to a child, with an example from daily life. " * 10,  # more than one prefill chunk
]


@pytest.fixture(scope="module", params=list(NETWORKS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The threshold is a quantile of what the network says along answers of the small model alone."""
    algorithm = request.param
    torch.set_num_threads(1)  # as in the served model's process: its sums must be these
    torch.manual_seed(1)
    kind, arguments = NETWORKS[algorithm]
    network = kind(**arguments).eval()
    shipped = load_deployment("smollm2")
    reference = Reference(shipped, hidden_states=True)
    seen: list[float] = []

    def never(*step: torch.Tensor) -> bool:
        seen.append(probability(algorithm, network, *step))
        return False

    for prompt in encoded(shipped, QUESTIONS[:3]):
        reference.one_token(prompt, TOKENS, never)
    share = SHARE if algorithm == "citer" else 1 - SHARE
    threshold = float(torch.tensor(seen, dtype=torch.float64).quantile(share))
    decide = delegates(algorithm, network, threshold)
    path: Path = tmp_path_factory.mktemp("router") / f"{algorithm}.safetensors"
    header = RouterHeader(
        algorithm=algorithm,
        models=["smollm2-135m-q4_0", "smollm2-135m-q8_0"],
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        threshold=threshold,
        network=arguments,
    )
    save_router(path, header, network.state_dict())
    router = RouterConfig(name=algorithm, params={"weights": str(path)})
    return case_of(shipped, router, reference, decide, QUESTIONS, TOKENS)


@pytest.fixture(scope="module")
def server(case: Case) -> Iterator[RunningServer]:
    assert check(case.deployment) == []
    with running_server(case.deployment) as running:
        yield running
        assert_clean_and_serving(running)


@pytest.mark.parametrize(("at_once", "prompts"), [(1, 4), (8, 8)])
def test_a_trained_router_equals_the_sequential_loop(
    server: RunningServer, case: Case, at_once: int, prompts: int
) -> None:
    makers = makers_of_equal_answers(server, case, at_once, prompts)
    assert 0.05 < makers.count("llm") / len(makers) < 0.5  # both wrote, or the test would show nothing
