# SPDX-License-Identifier: Apache-2.0
"""BiLD's fallback and GlimpRouter's first tokens: signals, comparisons, and what is kept."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from python_backends.token_router.config import RuntimeConfig
from routers import LogitsOutput, RouterConfig, ServedModel, StepResult
from routers.rstitch import normalized_entropy
from tests.unit.routers.steps import routed
from tests.unit.token_router.harness import run
from tests.unit.token_router.scripted import LINE_ENDS, answers

FLAT, PEAKED = [0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]
TEXTS = [b"a", b"\n", b":\n\n", b""]


def _result(logits: list[list[float]], params: Any, sequences: list[list[int]], prompt: int = 1) -> StepResult:
    n = len(sequences)
    return StepResult(
        logits_output=LogitsOutput(torch.tensor(logits) if logits else None, None),
        token_ids=[s[-1] for s in sequences],
        places=[len(s) - 1 for s in sequences],
        sequences=[s[:-1] for s in sequences],
        prompt_tokens=[prompt] * n,
        rids=list(range(n)),
        params=[params] * n,
        draw=lambda _: 0.0,
        fields=[{} for _ in range(n)],
    )


def test_bild_falls_back_below_its_threshold_and_not_at_it() -> None:
    config = RouterConfig(name="bild", params={"threshold": 0.25})
    rows = [FLAT, [0.0, 0.0, 0.0, 0.1], [math.log(3), 0.0, 0.0, -math.inf], [-math.inf, 0.0, 0.0, 0.0]]

    def route(threshold: float) -> list[int]:
        params = config.override({"threshold": threshold}, ["slm", "llm"])
        return routed(config.router(0, ["slm", "llm"]), _result(rows, params, [[1, 2]] * len(rows)))

    assert route(0.25) == [0, 0, 0, 0]
    assert route(0.251) == [1, 0, 0, 0]
    assert route(0.5) == [1, 1, 0, 1]
    assert route(0.61) == [1, 1, 1, 1]
    assert route(0.0) == [0, 0, 0, 0]
    assert routed(config.router(1, ["slm", "llm"]), _result([], None, [[1, 2]])) == [1]


@pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_bild_refuses_what_is_no_distribution(row: list[float]) -> None:
    config = RouterConfig(name="bild")
    with pytest.raises(ValueError, match="logits: hold NaN"):
        config.router(0, ["slm", "llm"]).route(_result([row], config.parsed_params(), [[1, 2]]))


def _glimp(index: int, **params: Any) -> tuple[Any, Any]:
    config = RouterConfig(name="glimp", params={"tau": 0.5, **params})
    router = config.router(index, ["slm", "llm"])
    router.bind(ServedModel("m", "m", len(TEXTS), token_bytes=TEXTS.__getitem__))
    return router, config.parsed_params()


@pytest.mark.parametrize(
    ("step_end", "ends"), [("\n", [True, False, True, True, False]), ("\n\n", [True, False, False, True, False])]
)
def test_glimp_decides_at_the_first_token_of_a_step_only(step_end: str, ends: list[bool]) -> None:
    router, params = _glimp(0, step_end=step_end)
    sequences = [[0, 3], [0, 0, 3], [0, 1, 3], [0, 2, 3], [1, 3, 3]]  # the answer's first; after a, \n, :\n\n, special
    assert routed(router, _result([FLAT] * 5, params, sequences)) == [int(e) for e in ends]
    assert routed(router, _result([PEAKED] * 5, params, sequences)) == [0] * 5


def test_glimp_comes_back_with_the_token_that_ends_the_step() -> None:
    router, params = _glimp(1)
    assert routed(router, _result([], params, [[0, 0], [0, 1], [0, 2], [0, 3]])) == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("params", "model", "message"),
    [
        ({}, ServedModel("slm", None, 4), "the engine of model 'slm' doesn't say"),
        ({"step_end": "%"}, ServedModel("slm", None, 4, token_bytes=TEXTS.__getitem__), "step_end: '%' ends no token"),
    ],
)
def test_glimp_is_refused_at_start(params: dict[str, Any], model: ServedModel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(name="glimp", params=params).router(0, ["slm", "llm"]).bind(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "bild", "params": {"threshold": 1.1}}, "threshold: Input should be less than or equal to 1"),
        ({"name": "bild", "params": {"threshold": math.nan}}, "threshold"),
        ({"name": "glimp", "params": {"tau": -0.1}}, "tau: Input should be greater than or equal to 0"),
        ({"name": "glimp", "params": {"step_end": ""}}, "step_end: String should have at least 1 character"),
    ],
)
def test_parameters_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        RouterConfig.model_validate(config).parsed_params()
    assert message in str(refusal.value)


def _logits(model: int, sequence: Sequence[int]) -> torch.Tensor:
    """Anything, and it minds every token before."""
    seed = random.Random(repr((model, list(sequence)))).getrandbits(63)
    return 3 * torch.randn(16, generator=torch.Generator().manual_seed(seed))


def _bild(prompt: list[int], count: int, threshold: float) -> tuple[list[int], list[str]]:
    tokens, makers = list(prompt), []
    for _ in range(count):
        small = _logits(0, tokens)
        falls_back = small.softmax(-1).max() < threshold
        tokens.append(int((_logits(1, tokens) if falls_back else small).argmax()))
        makers.append("llm" if falls_back else "slm")
    return tokens[len(prompt) :], makers


def _glimp_loop(prompt: list[int], count: int, tau: float) -> tuple[list[int], list[str]]:
    tokens, makers = list(prompt), []
    writer = "slm"
    for at in range(count):
        if at == 0 or tokens[-1] in LINE_ENDS:
            writer = "llm" if normalized_entropy(_logits(0, tokens)[None])[0] > tau else "slm"
        tokens.append(int(_logits(("slm", "llm").index(writer), tokens).argmax()))
        makers.append(writer)
    return tokens[len(prompt) :], makers


@pytest.mark.parametrize(
    ("router", "sequential"),
    [
        ({"name": "bild", "params": {"threshold": 0.7}}, lambda prompt: _bild(prompt, 40, 0.7)),
        ({"name": "glimp", "params": {"tau": 0.35}}, lambda prompt: _glimp_loop(prompt, 40, 0.35)),
    ],
    ids=["bild", "glimp"],
)
def test_served_they_equal_their_sequential_loops(
    router: dict[str, Any], sequential: Callable[[list[int]], tuple[list[int], list[str]]]
) -> None:
    config = RuntimeConfig.model_validate({"models": [{"name": "slm"}, {"name": "llm"}], "router": router})
    prompts = [[1 + i] * (1 + i % 10) for i in range(12)]
    requests = [{"input_ids": prompt, "max_tokens": 40} for prompt in prompts]
    streams = run(answers(config, _logits, 16, (0.001, 0.004), requests))
    for prompt, stream in zip(prompts, streams, strict=True):
        assert (stream.token_ids, stream.models) == sequential(prompt)
    makers = [m for s in streams for m in s.models]
    assert min(makers.count("slm"), makers.count("llm")) > len(makers) // 10
