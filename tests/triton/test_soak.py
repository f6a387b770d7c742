# SPDX-License-Identifier: Apache-2.0
"""10,000 requests among three paced models: every stream is the function's value, nothing is left."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from python_backends.llm.engines.paced import PrefixHash
from python_backends.llm.sampling import routing_stream, uniform
from tests.triton.servers import VOCABULARY, assert_clean_and_serving, paced_deployment
from tools.client import GenerationError, TokenRouterClient
from tools.supervisor import running_server

pytestmark = pytest.mark.triton

NAMES = ("slm", "llm", "xl")
REQUESTS = 10_000
ROUNDS = 5
AT_ONCE = 32


def _matrices(rng: random.Random) -> tuple[list[list[float]], list[list[int]]]:
    """Random transitions; a token is dropped only on the way to a model of a higher number, so that no
    cycle drops it all the way round."""
    p = []
    for i in range(3):
        weights = [rng.random() ** 2 + (2.0 if j == i else 0.05) for j in range(3)]
        p.append([w / sum(weights) for w in weights])
    return p, [[1 if j <= i else rng.randint(0, 1) for j in range(3)] for i in range(3)]


def _expected(
    p: list[list[float]], c: list[list[int]], prompt: list[int], count: int, seed: int
) -> tuple[list[int], list[str]]:
    """The plain sequential loop: which model is where is drawn as the router draws it."""
    hashes = [PrefixHash(name) for name in NAMES]
    tokens, makers, at = list(prompt), [], 0
    while len(makers) < count:
        hashes[at].extend(tokens[len(hashes[at]) :])
        token = hashes[at].next_token(VOCABULARY, 0)
        to = _destination(p[at], at, uniform(seed, len(tokens), routing_stream(at)))
        if c[at][to]:
            tokens.append(token)
            makers.append(NAMES[at])
        at = to
    return tokens[len(prompt) :], makers


def _destination(row: list[float], at: int, draw: float) -> int:
    order = [at, *(j for j in range(3) if j != at)]
    bounds = itertools.accumulate(row[j] for j in order[:-1])
    return order[sum(draw >= bound for bound in bounds)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("round_", range(ROUNDS))
def test_random_handoffs_among_three_models(round_: int) -> None:
    _soak(random.Random(round_), REQUESTS // ROUNDS, AT_ONCE, run_ahead=None)


def test_run_ahead_with_few_at_once() -> None:
    """A model runs ahead only while every live request is in its batch, which many at once never are."""
    _soak(random.Random(99), 400, 2, run_ahead=4)


def _soak(rng: random.Random, requests: int, at_once: int, run_ahead: int | None) -> None:
    p, c = _matrices(rng)
    batching = {
        "threshold": [rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 8)],
        "max_wait_ms": rng.choice([5.0, 50.0]),
        "run_ahead": run_ahead or rng.choice([1, 2, 4]),
        "llm_prefill": rng.choice(["eager", "lazy"]),
    }
    deployment = paced_deployment(
        steps_ms=(0.2, 0.5, 0.8),
        router={"name": "markov", "params": {"p": p, "c": c}},
        batching=batching,
        limits={"max_live": AT_ONCE, "max_queue": AT_ONCE},
        prefill_chunk=16,
    )
    specs = [
        {
            "prompt": [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 40))],
            "max_tokens": rng.randint(1, 24),
            "seed": rng.getrandbits(63),
            "cancel_after": rng.randint(0, 8) if rng.random() < 0.05 else None,
        }
        for _ in range(requests)
    ]
    with running_server(deployment) as server, TokenRouterClient(server.grpc_url) as client:

        def one(spec: dict[str, Any]) -> str:
            expected, makers = _expected(p, c, spec["prompt"], spec["max_tokens"], spec["seed"])
            generation = client.generate(
                input_ids=spec["prompt"], max_tokens=spec["max_tokens"], seed=spec["seed"], timeout_s=60
            )
            ids: list[int] = []
            models: list[str] = []
            try:
                for chunk in generation:
                    ids += chunk.ids
                    models += chunk.models
                    if spec["cancel_after"] is not None and len(ids) > spec["cancel_after"]:
                        generation.cancel()
            except GenerationError as error:
                assert spec["cancel_after"] is not None and error.status is grpc.StatusCode.CANCELLED, error
                assert ids == expected[: len(ids)] and models == makers[: len(ids)]
                return "cancelled"
            assert (ids, models) == (expected, makers)
            return "finished"

        with ThreadPoolExecutor(at_once) as pool:
            outcomes = list(pool.map(one, specs))
        assert outcomes.count("finished") > 0.9 * len(specs)
        assert_clean_and_serving(server)
