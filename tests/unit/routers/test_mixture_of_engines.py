# SPDX-License-Identifier: Apache-2.0
"""ME over three tiny llama.cpp models: what it samples is the mixture of the engines' own distributions.

The models are real files with random weights, and mind every token before. They stand behind the real runtime,
runner, sampling and router, in one process, on a fake clock and without Triton. Unlike with the constant
distributions of test_mixture_ensemble.py, a model that takes over with a wrong context shows here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.engines.llama_cpp import LlamaCppEngine
from python_backends.llm.runner import LLMRunner
from python_backends.token_router.config import RuntimeConfig
from tests.unit.token_router.harness import Deployment, Stream, run
from tests.unit.token_router.scripted import RunnerLLM
from tools.tiny_models import make_tiny_gguf

NAMES = "abc"
LAYERS = (1, 2, 2)
WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
STEPS_S = (0.001, 0.003, 0.007)
PROMPT = [72, 105, 40, 12]
TEMPERATURE = 0.7
REQUESTS = 2000  # of two tokens each, request number i with seed i
LEAST = 5  # expected in a cell; cells below it are counted as one
ACCEPTS, REJECTS = 1e-3, 1e-9  # p-values


@dataclass
class Exact:
    """From each model alone, at TEMPERATURE, FP64: first [3, V], the distribution of the token after the prompt, and
    second [3, V, V], of the one after the prompt and each first token."""

    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Counts:
    """by_makers [3, 3, V, V]: how many answers have this first and second maker, and this first and second token."""

    by_makers: torch.Tensor

    @property
    def first(self) -> torch.Tensor:
        """[V]."""
        return self.pairs.sum(1)

    @property
    def pairs(self) -> torch.Tensor:
        """[V, V]."""
        return self.by_makers.sum((0, 1))


def _engines(files: Sequence[Path]) -> list[LlamaCppEngine]:
    return [
        LlamaCppEngine(LlamaCppConfig(type="llama_cpp", weights=str(f), context_tokens=64, max_sessions=32))
        for f in files
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tiny")
    paths = [folder / f"{name}.gguf" for name in NAMES]
    for number, path in enumerate(paths):
        make_tiny_gguf(path, seed=1 + number, layers=LAYERS[number])
    return paths


@pytest.fixture(scope="module")
def exact(files: list[Path]) -> Exact:
    """Every context is a session of its own, given to the engine at once."""

    def after(engine: LlamaCppEngine, tokens: list[int]) -> torch.Tensor:
        engine.open(SessionOpen(1, len(tokens), 64))
        logits = engine.step([SessionStep(1, 0, tokens)]).logits
        engine.free([1])
        assert logits is not None
        return (logits[0].double() / TEMPERATURE).softmax(-1)

    engines = _engines(files)
    first = torch.stack([after(engine, PROMPT) for engine in engines])
    second = torch.stack(
        [torch.stack([after(engine, [*PROMPT, t]) for t in range(first.shape[1])]) for engine in engines]
    )
    for engine in engines:
        engine.close()
    return Exact(first, second)


@pytest.fixture(scope="module")
def counts(files: list[Path], exact: Exact) -> Counts:
    """Of the answers to all requests, up to 32 of them live at once."""
    config = RuntimeConfig.model_validate(
        {
            "models": [{"name": name} for name in NAMES],
            "router": {"name": "me", "params": {"weights": WEIGHTS.tolist()}},
            "limits": {"max_live": 32, "max_queue": REQUESTS},
        }
    )
    engines = _engines(files)
    runners = [
        LLMRunner(NAMES[m], m, engine, config.router.router(m, list(NAMES)), config.router)
        for m, engine in enumerate(engines)
    ]

    async def answers() -> list[Stream]:
        llms = [RunnerLLM(NAMES[m], runner, STEPS_S[m]) for m, runner in enumerate(runners)]
        request = {"input_ids": PROMPT, "max_tokens": 2, "ignore_eos": True, "temperature": TEMPERATURE}
        async with Deployment(config, llms) as deployment:
            streams = [deployment.submit(**request, seed=seed)[1] for seed in range(REQUESTS)]
            await asyncio.gather(*(stream.done.wait() for stream in streams))
        return streams

    streams: list[Stream] = run(answers())
    for engine in engines:
        engine.close()
    vocabulary = exact.first.shape[1]
    by_makers = torch.zeros(len(NAMES), len(NAMES), vocabulary, vocabulary, dtype=torch.float64)
    for stream in streams:
        assert stream.error is None
        makers, tokens = [NAMES.index(m) for m in stream.models], stream.token_ids
        by_makers[(*makers, *tokens)] += 1
    return Counts(by_makers)


def _mixed(of_models: torch.Tensor, weights: torch.Tensor = WEIGHTS) -> torch.Tensor:
    return torch.tensordot(weights, of_models, 1)


def _p_value(counts: torch.Tensor, distribution: torch.Tensor) -> float:
    """Of the chi-square test, over the cells in which LEAST or more are expected, and one for all the others."""
    expected, counted = (distribution * counts.sum()).flatten(), counts.flatten()
    large = expected >= LEAST
    assert large.sum() > 20  # else it would say little
    cells = [torch.cat([x[large], x[~large].sum()[None]]) for x in (counted, expected)]
    assert cells[1].min() >= LEAST
    return float(chisquare(cells[0].numpy(), cells[1].numpy()).pvalue)


def _wrong_weights() -> Iterator[torch.Tensor]:
    for wrong in ((1, 1, 1), (5, 2, 3), (1, 0, 0)):  # equal, exchanged, and the entry model's alone
        yield torch.tensor(wrong, dtype=torch.float64) / sum(wrong)


def test_the_first_tokens_distribution_is_the_mixtures(counts: Counts, exact: Exact) -> None:
    """After the prompt, over all answers; three wrong mixtures are rejected by the same answers."""
    assert counts.first.sum() == REQUESTS
    assert _p_value(counts.first, _mixed(exact.first)) > ACCEPTS
    for weights in _wrong_weights():
        assert _p_value(counts.first, _mixed(exact.first, weights)) < REJECTS


def test_the_second_tokens_distribution_is_the_mixtures_after_the_first_one(counts: Counts, exact: Exact) -> None:
    """Pairs of tokens against P(first) P(second | first). The same answers reject a second token by wrong weights,
    one that doesn't mind the first token, and one of another first token's context."""
    first, second = _mixed(exact.first)[:, None], _mixed(exact.second)
    assert _p_value(counts.pairs, first * second) > ACCEPTS
    for weights in _wrong_weights():
        assert _p_value(counts.pairs, first * _mixed(exact.second, weights)) < REJECTS
    assert _p_value(counts.pairs, first * _mixed(exact.first)) < REJECTS
    assert _p_value(counts.pairs, first * second.roll(1, 0)) < REJECTS


def test_a_model_that_takes_over_goes_on_from_the_others_token(counts: Counts, exact: Exact) -> None:
    """Answers whose tokens are of two models, by makers and tokens, against w_a w_b P_a(first) P_b(second | first).
    The same answers reject a model that takes over without the other's token, with its own choice in its place,
    and one that writes as the model before it would."""
    handoffs = ~torch.eye(len(NAMES), dtype=torch.bool)
    counted = counts.by_makers[handoffs]
    chances = (WEIGHTS[:, None] * WEIGHTS)[handoffs]
    before, after = handoffs.nonzero(as_tuple=True)
    firsts = (chances / chances.sum())[:, None] * exact.first[before]  # [6, V]

    def p_value(seconds: torch.Tensor) -> float:
        """seconds: P(second | makers, first), [6, V, V] or what broadcasts to it."""
        return _p_value(counted, firsts[:, :, None] * seconds)

    assert p_value(exact.second[after]) > ACCEPTS
    assert p_value(exact.first[after][:, None]) < REJECTS
    own = torch.stack([exact.second[m, exact.first[m].argmax()] for m in after.tolist()])
    assert p_value(own[:, None]) < REJECTS
    assert p_value(exact.second[before]) < REJECTS
