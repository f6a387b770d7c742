# SPDX-License-Identifier: Apache-2.0
"""The trained routers that come with the package, on the models that they were trained for and at their own
thresholds, through the real server: token for token. Skipped where those models' weights aren't in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import routers
from python_backends.llm.catalog import WeightsError, locate_tokenizer, locate_weights
from routers import RouterConfig
from routers.networks import CiterNetwork, CoLLMHead, R2RNetwork, restore
from routers.weights import load_router, read_header
from tests.model.reference import Reference
from tests.model.trained import Case, case_of, delegates, makers_of_equal_answers
from tests.triton.servers import assert_clean_and_serving
from tools.deployment import Deployment, load_deployment
from tools.supervisor import RunningServer, running_server

pytestmark = [pytest.mark.model, pytest.mark.triton]

TOKENS = 8
SHIPPED = sorted((Path(routers.__file__).parent / "pretrained").glob("*.safetensors"))
NETWORKS: dict[str, type[torch.nn.Module]] = {"r2r": R2RNetwork, "citer": CiterNetwork, "co_llm": CoLLMHead}
QUESTIONS = [  # the first two are asked one at a time, all of them at once
    "Say how many primes are below 30, and why.",
    "Write a bash one-liner that counts lines.",
    "Write a regex for an IPv4 address.",
    "What is 17 times 23?",
    "Write fizzbuzz in C.",
    "Write SQL for the second highest salary.",
    "Name three sorting algorithms and their costs.",
    "Write a Python class for a stack. " * 13,  # more than one prefill chunk
]


@pytest.fixture(scope="module")
def default() -> Deployment:
    deployment = load_deployment("default")
    try:
        for model in deployment.models:
            locate_weights(model.engine.weights)
        locate_tokenizer(str(deployment.tokenizer))
    except WeightsError as missing:
        pytest.skip(f"the shipped routers are for models that aren't fetched: {missing}")
    return deployment


@pytest.fixture(scope="module", params=SHIPPED, ids=lambda path: path.stem)
def case(request: pytest.FixtureRequest, default: Deployment) -> Case:
    path: Path = request.param
    algorithm = read_header(path).algorithm
    file = load_router(path, algorithm)
    torch.set_num_threads(1)  # as in the served model's process: its sums must be these
    network = restore(NETWORKS[algorithm], file.header.network, file.tensors)
    decide = delegates(algorithm, network, file.header.threshold)
    router = RouterConfig(name=algorithm, params={"weights": path.stem})
    return case_of(default, router, Reference(default, hidden_states=True), decide, QUESTIONS, TOKENS)


@pytest.fixture(scope="module")
def server(case: Case) -> Iterator[RunningServer]:
    with running_server(case.deployment) as running:
        yield running
        assert_clean_and_serving(running)


@pytest.mark.parametrize(("at_once", "prompts"), [(1, 2), (8, 8)])
def test_a_shipped_router_equals_the_sequential_loop(
    server: RunningServer, case: Case, at_once: int, prompts: int
) -> None:
    makers = makers_of_equal_answers(server, case, at_once, prompts)
    assert makers.count("slm") > prompts and makers.count("llm") > prompts  # both wrote, or it would show nothing
