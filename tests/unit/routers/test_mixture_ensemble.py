# SPDX-License-Identifier: Apache-2.0
"""ME: its draws are those of the weights, its answers are the sequential loop's, and what it refuses.

The models are scripted. The tests of distributions have constant ones, so they show the draws of models and tokens,
and nothing of contexts: those are in test_mixture_of_engines.py, on real models.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from python_backends.llm.contract import SamplingParams
from python_backends.llm.sampling import SamplingRow, routing_stream, sample, uniform
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import InvalidRequest
from routers import RouterConfig
from tests.unit.token_router.harness import Deployment, Stream, run
from tests.unit.token_router.scripted import answers, scripted_llms

VOCABULARY = 6
WEIGHTS = (0.5, 0.3, 0.2)
STEPS_S = (0.001, 0.003, 0.007)
MEMBERS = torch.tensor(  # what each model's next token is, whatever came before
    [
        [0.50, 0.20, 0.10, 0.10, 0.05, 0.05],
        [0.05, 0.05, 0.40, 0.20, 0.20, 0.10],
        [0.10, 0.10, 0.05, 0.05, 0.10, 0.60],
    ],
    dtype=torch.float64,
)
MIXTURE = (torch.tensor(WEIGHTS, dtype=torch.float64)[:, None] * MEMBERS).sum(0)
ACCEPTS, REJECTS = 1e-3, 1e-9  # p-values


def _config(weights: Sequence[float] = WEIGHTS, **batching: Any) -> RuntimeConfig:
    return RuntimeConfig.model_validate(
        {
            "models": [{"name": name} for name in "abc"[: len(weights)]],
            "router": {"name": "me", "params": {"weights": weights}},
            "batching": batching,
            "limits": {"max_live": 32, "max_queue": 10_000},
        }
    )


def _constant(model: int, _: Sequence[int]) -> torch.Tensor:
    return MEMBERS[model].log().float()


def _p_value(counts: Counter[Any], expected: dict[Any, float]) -> float:
    total = sum(counts.values())
    return float(chisquare([counts[k] for k in expected], [p * total for p in expected.values()]).pvalue)


def _tokens_by(distribution: torch.Tensor) -> dict[int, float]:
    return dict(enumerate(distribution.tolist()))


def _asked(count: int, max_tokens: int) -> list[dict[str, Any]]:
    return [
        {"input_ids": [1 + seed % 5], "max_tokens": max_tokens, "temperature": 1.0, "seed": seed}
        for seed in range(count)
    ]


def test_the_tokens_distribution_is_the_mixtures() -> None:
    """Over whole answers, of models that don't mind what came before: tokens, makers, the next maker after the last,
    and tokens by maker."""
    streams = run(answers(_config(), _constant, VOCABULARY, STEPS_S, _asked(40, 150)))
    tokens = Counter(t for s in streams for t in s.token_ids)
    assert sum(tokens.values()) == 6000
    assert _p_value(tokens, _tokens_by(MIXTURE)) > ACCEPTS
    for wrong in ((1, 1, 1), (5, 2, 3), (1, 0, 0)):  # the test would notice
        weights = torch.tensor(wrong, dtype=torch.float64) / sum(wrong)
        assert _p_value(tokens, _tokens_by((weights[:, None] * MEMBERS).sum(0))) < REJECTS

    makers = [[("a", "b", "c").index(m) for m in s.models] for s in streams]
    assert _p_value(Counter(m for made in makers for m in made), dict(enumerate(WEIGHTS))) > ACCEPTS
    pairs = Counter(pair for made in makers for pair in pairwise(made))
    table = [[pairs[i, j] for j in range(3)] for i in range(3)]
    assert chi2_contingency(table).pvalue > ACCEPTS  # the next model doesn't depend on the last
    given = Counter((m, t) for s, made in zip(streams, makers, strict=True) for m, t in zip(made, s.token_ids))  # noqa: B905
    assert (
        _p_value(given, {(m, t): WEIGHTS[m] * float(MEMBERS[m, t]) for m, t in product(range(3), range(6))}) > ACCEPTS
    )


def test_an_answers_first_token_is_drawn_too_and_the_second_is_independent_of_it() -> None:
    """As constant models have it. The same answers reject a first token by the entry model alone, and one draw for
    the models of both."""
    streams = run(answers(_config(), _constant, VOCABULARY, STEPS_S, _asked(4000, 2)))
    pairs = Counter((s.token_ids[0], s.token_ids[1]) for s in streams)
    cells = list(product(range(VOCABULARY), repeat=2))
    assert _p_value(pairs, {(i, j): float(MIXTURE[i] * MIXTURE[j]) for i, j in cells}) > ACCEPTS
    entry_first = {(i, j): float(MEMBERS[0, i] * MIXTURE[j]) for i, j in cells}  # were it not drawn
    assert _p_value(pairs, entry_first) < REJECTS
    makers = Counter(tuple(s.models) for s in streams)
    names = dict(zip("abc", WEIGHTS, strict=True))
    assert _p_value(makers, {(i, j): names[i] * names[j] for i, j in product("abc", repeat=2)}) > ACCEPTS
    stuck = {
        (i, j): names[i] * (names[j] if i != "a" else float(j == "a")) + 1e-12 for i, j in product("abc", repeat=2)
    }
    total = sum(stuck.values())
    assert _p_value(makers, {k: v / total for k, v in stuck.items()}) < REJECTS  # were one draw used for both


def _sequential(
    logits: Callable[[int, Sequence[int]], torch.Tensor], weights: Sequence[float], request: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """ME as one loop: tokens, and the number of the model that made each."""
    sampling = SamplingParams(temperature=request["temperature"], seed=request["seed"])
    prompt = request["input_ids"]

    def drawn(u: float) -> int:
        return next(m for m in range(len(weights)) if u < sum(weights[: m + 1]))

    def draw(model: int, place: int) -> float:
        return uniform(request["seed"], place, routing_stream(model))

    tokens, makers = list(prompt), []
    u = draw(0, len(prompt))
    model = drawn(u)
    while True:
        row = SamplingRow(sampling, tokens, len(prompt))
        token = int(sample(logits(model, tokens)[None], [row]).token_ids[0])
        first = not makers
        tokens.append(token)
        makers.append(model)
        if len(makers) == request["max_tokens"]:
            return tokens[len(prompt) :], makers
        place = len(tokens) - 1
        model = drawn(u / weights[0] if first and model == 0 else draw(model, place))


@pytest.mark.parametrize("weights", [WEIGHTS, (0.25, 0.75), (0.0, 0.5, 0.5), (1.0, 0.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize(
    "batching", [{}, {"threshold": 4, "run_ahead": 4}, {"policy": "model_sync"}, {"resume": False}]
)
def test_the_answers_are_the_sequential_loops(weights: Sequence[float], batching: dict[str, Any]) -> None:
    """On models that mind every token before; prompts of one token and more, answers of one token and more."""

    def logits(model: int, sequence: Sequence[int]) -> torch.Tensor:
        seed = random.Random(repr((model, list(sequence)))).getrandbits(63)
        return torch.randn(16, generator=torch.Generator().manual_seed(seed))

    requests = [
        {"input_ids": [1 + i % 15] * (1 + i % 12), "max_tokens": 1 + i % 9, "temperature": 0.9, "seed": i}
        for i in range(24)
    ]
    streams: list[Stream] = run(answers(_config(weights, **batching), logits, 16, STEPS_S, requests))
    for request, stream in zip(requests, streams, strict=True):
        tokens, makers = _sequential(logits, weights, request)
        assert stream.token_ids == tokens
        assert stream.models == ["abc"[m] for m in makers]


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_a_greedy_request_is_refused_and_harms_nobody(temperature: float) -> None:
    async def main() -> None:
        async with Deployment(_config(), scripted_llms(_config(), _constant, VOCABULARY, STEPS_S)) as deployment:
            _, served = deployment.submit(input_ids=[1], max_tokens=5, temperature=1.0, seed=1)
            with pytest.raises(InvalidRequest, match=r"temperature: router 'me' must sample; allowed: 1e-05 or more"):
                deployment.submit(input_ids=[1], temperature=temperature)
            await served.done.wait()
            assert len(served.token_ids) == 5

    run(main())


def test_a_request_may_bring_its_own_weights() -> None:
    requests = [
        {**asked, "router_params": {"weights": w}}
        for asked, w in zip(_asked(2, 20), ([0.0, 0.0, 1.0], [1.0, 0.0, 0.0]), strict=True)
    ]
    streams = run(answers(_config(), _constant, VOCABULARY, STEPS_S, requests))
    assert [set(s.models) for s in streams] == [{"c"}, {"a"}]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.3, 0.3], "router 'me': weights: Value error, they must sum to 1; these sum to 1.1"),
        ([], "they must sum to 1; these sum to 0"),
        ([1.5, -0.5], "each must be a finite number of 0 or more"),
        ([math.nan, 1.0], "each must be a finite number of 0 or more"),
        ([math.inf, 1.0], "each must be a finite number of 0 or more"),
        ([0.5, 0.5], "router 'me': weights: 2 of them; allowed: one for each model, of which the deployment has 3 (a,"),
        (None, "router 'me': weights: Field required"),
    ],
)
def test_weights_refused(weights: list[float] | None, message: str) -> None:
    config = RouterConfig(name="me", params={} if weights is None else {"weights": weights})
    with pytest.raises(ValueError) as refusal:
        config.router(0, ["a", "b", "c"])
    assert message in str(refusal.value)


def test_weights_of_a_request_are_checked_as_those_of_the_deployment() -> None:
    config = RouterConfig(name="me", params={"weights": WEIGHTS})
    with pytest.raises(ValueError, match=r"these sum to 1\.5"):
        config.override({"weights": [0.5, 0.5, 0.5]}, ["a", "b", "c"])
    with pytest.raises(ValueError, match="2 of them"):
        config.override({"weights": [0.5, 0.5]}, ["a", "b", "c"])


def test_it_needs_two_models() -> None:
    with pytest.raises(ValueError, match="router 'me' routes between 2 or more models; the deployment has 1"):
        RouterConfig(name="me", params={"weights": [1.0]}).router(0, ["a"])


@pytest.mark.parametrize("third", [1 / 3, 0.333333])
def test_thirds_sum_to_one_and_every_draw_finds_a_model(third: float) -> None:
    params: Any = RouterConfig(name="me", params={"weights": [third] * 3}).parsed_params()
    assert [params.drawn(u) for u in (0.0, 0.33, 0.34, 0.66, 0.67, 1 - 2**-53, 1.0)] == [0, 0, 1, 1, 2, 2, 2]
    zero_last: Any = RouterConfig(name="me", params={"weights": [0.3, 0.7 - 1e-7, 0.0]}).parsed_params()
    assert zero_last.drawn(1 - 2**-53) == 1
