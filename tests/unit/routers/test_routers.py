# SPDX-License-Identifier: Apache-2.0
"""The algorithms by themselves: signals, destinations, what is sent, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routers import (
    ALGORITHMS,
    LogitsOutput,
    RouterConfig,
    StepResult,
    load_algorithm,
    model_to_peer,
    peer_to_model,
)
from routers.rstitch import RSTITCH, normalized_entropy
from tests.unit.routers.steps import routed


def _result(logits: torch.Tensor | None = None, params: Any = None, uniforms: list[float] | None = None) -> StepResult:
    n = len(uniforms) if uniforms is not None else 1 if logits is None else len(logits)
    return StepResult(
        logits_output=LogitsOutput(logits, None),
        token_ids=[0] * n,
        places=range(n),
        sequences=[list(range(r)) for r in range(n)],
        prompt_tokens=[1] * n,
        rids=list(range(n)),
        params=params if isinstance(params, list) else [params] * n,
        draw=(uniforms or [0.0] * n).__getitem__,
        fields=[{} for _ in range(n)],
    )


@dataclass
class Sent:
    """A request as `send` sees it."""

    origin_input_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    output_ids: list[int] = field(default_factory=lambda: [4, 5, 6])
    peer_locs: list[int] = field(default_factory=lambda: [0, 0, 0])
    destination: int = 1
    rid: int = 9
    fields: dict[str, Any] = field(default_factory=dict)

    def finished(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], 1.0),
        ([50.0, 50.0, -50.0, -50.0], 0.5),
        ([500.0, 0.0, 0.0, 0.0], 0.0),
        ([1.0, 1.0, -math.inf, -math.inf], 0.5),
    ],
)
def test_normalized_entropy(logits: list[float], expected: float) -> None:
    assert normalized_entropy(torch.tensor([logits]))[0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("vocabulary", [1000, 128_256, 151_936])
def test_no_preference_at_all_is_not_above_1(vocabulary: int) -> None:
    """tau = 1 is the SLM alone; sums of so many FP32 terms may come out at 1.00007."""
    logits = torch.zeros(1, vocabulary)
    assert normalized_entropy(logits)[0] <= 1
    router = RSTITCH.router(0, RSTITCH.params(), ["slm", "llm"])
    assert routed(router, _result(logits, params=RSTITCH.params(tau=1.0))) == [0]


@given(st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5), min_size=1, max_size=6))
def test_entropy_is_never_nan_and_no_row_depends_on_the_others(rows: list[list[float]]) -> None:
    together = normalized_entropy(torch.tensor(rows))
    assert ((together >= 0) & (together <= 1 + 1e-6)).all()
    for i, row in enumerate(rows):
        assert normalized_entropy(torch.tensor([row]))[0] == together[i]


@pytest.mark.parametrize(("index", "expected"), [(0, [1, 0, 1]), (1, [0, 1, 0])])
def test_rstitch_delegates_the_uncertain_and_takes_back_the_confident(index: int, expected: list[int]) -> None:
    config = RouterConfig(name="rstitch", params={"tau": 0.5})
    logits = torch.tensor([[1.0, 1.0, 1.0], [99.0, 0.0, 0.0], [1.0, 1.0, 0.9]])
    router = config.router(index, ["slm", "llm"])
    assert routed(router, _result(logits, config.parsed_params())) == expected


def test_rstitch_by_each_requests_own_tau() -> None:
    config = RouterConfig(name="rstitch")
    params = [config.override({"tau": t}, ["slm", "llm"]) for t in (0.0, 0.99, 1.0)]
    logits = torch.tensor([[1.0, 1.0, 0.0]] * 3)
    assert routed(config.router(0, ["a", "b"]), _result(logits, params)) == [1, 0, 0]


def test_what_is_sent() -> None:
    """The small model of R-Stitch drops its token, the large one keeps it, or they would loop for ever."""
    config = RouterConfig(name="rstitch")
    first = config.router(0, ["slm", "llm"]).send(Sent())
    assert (list(first.token_ids), first.loc) == ([1, 2, 3, 4, 5], 5)
    later = config.router(0, ["slm", "llm"]).send(Sent(peer_locs=[0, 4]))
    assert (list(later.token_ids), later.loc) == ([5], 5)
    back = config.router(1, ["slm", "llm"]).send(Sent(peer_locs=[0, 4]))
    assert (list(back.token_ids), back.loc) == ([5, 6], 6)
    assert config.router(1, ["slm", "llm"]).receive(back) == back.token_ids


@given(st.integers(1, 5), st.data())
def test_peer_numbers_and_model_numbers(models: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, models - 1))
    seen = [peer_to_model(index, peer) for peer in range(models)]
    assert seen == [index, *(m for m in range(models) if m != index)]
    assert [model_to_peer(index, m) for m in seen] == list(range(models))


def test_single_sends_everything_to_its_model_and_leaves_it_there() -> None:
    config = RouterConfig(name="single", params={"model": 2})
    step = _result(params=config.parsed_params())
    assert routed(config.router(0, ["a", "b", "c"]), step) == [2]
    assert routed(config.router(2, ["a", "b", "c"]), step) == [0]


def test_random_delegates_with_its_probability() -> None:
    config = RouterConfig(name="random", params={"p": 0.3})
    step = _result(params=config.parsed_params(), uniforms=[0.0, 0.29, 0.3, 0.99])
    assert routed(config.router(0, ["a", "b"]), step) == [1, 1, 0, 0]
    assert routed(config.router(1, ["a", "b"]), step) == [1] * 4


def test_markov_goes_where_its_row_says() -> None:
    p = [[0.5, 0.2, 0.3], [0.1, 0.9, 0.0], [0.0, 1.0, 0.0]]
    config = RouterConfig(name="markov", params={"p": p, "c": [[1, 0, 1], [1, 1, 1], [1, 1, 1]]})
    draws = [0.0, 0.49, 0.5, 0.69, 0.7, 0.99]
    names = ["a", "b", "c"]

    def models(index: int) -> list[int]:
        router = config.router(index, names)
        return [peer_to_model(index, d) for d in routed(router, _result(uniforms=draws))]

    assert models(0) == [0, 0, 1, 1, 2, 2]
    assert models(1) == [1, 1, 1, 1, 1, 0]  # own column first
    assert models(2) == [1] * 6
    assert config.router(0, names).send(Sent(destination=1)).loc == 5  # c[0][1] = 0: dropped
    assert config.router(0, names).send(Sent(destination=2)).loc == 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "nope"}, f"no router 'nope'; there are {', '.join(sorted(ALGORITHMS))}, and your own"),
        ({"name": "nowhere.module:X"}, "router 'nowhere.module:X' can't be loaded"),
        ({"name": "routers.base:PeerReq"}, "it must be a routers.Algorithm"),
        ({"name": "rstitch", "params": {"tau": 1.5}}, "router 'rstitch': tau: Input should be less than or equal to 1"),
        ({"name": "rstitch", "params": {"tau": math.nan}}, "tau"),
        ({"name": "rstitch", "params": {"theta": 1}}, "theta: Extra inputs are not permitted, got 1"),
        ({"name": "random", "params": {"p": -0.1}}, "p: Input should be greater than or equal to 0"),
        ({"name": "markov", "params": {"p": [[0.5, 0.4], [1, 0]], "c": [[1, 0], [1, 1]]}}, "that sum to 1"),
        ({"name": "markov", "params": {"p": [[1.0]], "c": [[1, 0]]}}, "c must be a square matrix"),
        ({"name": "markov", "params": {"p": [[0, 1], [1, 0]], "c": [[1, 0], [0, 1]]}}, "no progress would be made"),
        ({"name": "markov", "params": {"p": [[1.0]], "c": [[0]]}}, "1 on the diagonal"),
    ],
)  # fmt: skip
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        RouterConfig.model_validate(config).parsed_params()
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "models", "message"),
    [
        ({"name": "rstitch"}, ["a", "b", "c"], "routes between 2 models; the deployment has 3 (a, b, c)"),
        ({"name": "random"}, ["a"], "the deployment has 1"),
        ({"name": "markov", "params": {"p": [[1.0]], "c": [[1]]}}, ["a", "b"], "p has 1 rows; the deployment has 2"),
        ({"name": "single", "params": {"model": 2}}, ["a", "b"], "model: 2; allowed: 0 to 1"),
    ],
)  # fmt: skip
def test_a_router_for_other_models_is_refused(config: dict[str, Any], models: list[str], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        RouterConfig.model_validate(config).router(0, models)
    assert message in str(refusal.value)


def test_the_registry_has_each_algorithm_under_its_name() -> None:
    assert all(load_algorithm(name) is algorithm and algorithm.name == name for name, algorithm in ALGORITHMS.items())


def test_only_what_an_algorithm_opens_to_requests_can_be_overridden() -> None:
    config = RouterConfig(name="rstitch", params={"tau": 0.2})
    assert config.override({"tau": 0.4}, ["a", "b"]).model_dump() == {"tau": 0.4}
    with pytest.raises(ValueError, match="'p' can't be set by a request to router 'markov'; allowed: none"):
        RouterConfig(name="markov", params={"p": [[1.0]], "c": [[1]]}).override({"p": [[1.0]]}, ["a"])
