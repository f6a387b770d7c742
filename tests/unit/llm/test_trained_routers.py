# SPDX-License-Identifier: Apache-2.0
"""A trained router behind the runner: bound at start or refused, and a request's bad numbers are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from python_backends.llm.contract import SessionOpen, SessionStep, StepRequest
from python_backends.llm.engines.base import Capacity, EngineOutput
from python_backends.llm.runner import LLMRunner
from routers import RouterConfig
from tests.unit.llm.fakes import VOCAB, FakeEngine
from tests.unit.routers.trained import EMBEDDING, HIDDEN, MODELS, network, write


class TellingEngine(FakeEngine):
    """It has hidden states and embeddings. bad: token -> a number put into the hidden state after it."""

    weights: str | None = MODELS[0]

    def __init__(self, hidden_size: int = HIDDEN) -> None:
        super().__init__(("logits", "hidden_states", "embeddings", "sampling"))
        self.bad: dict[int, float] = {}
        self._hidden_size = hidden_size

    def capacity(self) -> Capacity:
        return replace(super().capacity(), hidden_size=self._hidden_size)

    def step(self, batch: Sequence[SessionStep]) -> EngineOutput:
        output = super().step(batch)
        last = {s.session: s.token_ids[-1] for s in batch}
        hidden = torch.stack([torch.full((HIDDEN,), float(last[s])) for s in output.sessions])
        for row, session in enumerate(output.sessions):
            hidden[row, 2] = self.bad.get(last[session], 0.0)
        return replace(output, hidden_states=hidden)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids[:, None].float().expand(-1, EMBEDDING)


def _config(tmp_path: Path, algorithm: str, **header: Any) -> RouterConfig:
    path = write(tmp_path / "r.safetensors", algorithm, network(algorithm), vocab_size=VOCAB, **header)
    return RouterConfig(name=algorithm, params={"weights": str(path)})


def _runner(config: RouterConfig, engine: FakeEngine, index: int = 0) -> LLMRunner:
    return LLMRunner(["slm", "llm"][index], index, engine, config.router(index, ["slm", "llm"]), config)


@pytest.mark.parametrize("algorithm", ["r2r", "citer", "co_llm"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_hidden_state_that_is_not_finite_fails_its_own_request(tmp_path: Path, algorithm: str, number: float) -> None:
    engine = TellingEngine()
    engine.bad = {5: number}
    runner = _runner(_config(tmp_path, algorithm), engine)
    opens = [SessionOpen(s, 1, 100) for s in (1, 2, 3)]
    steps = [SessionStep(s, 0, [t]) for s, t in ((1, 4), (2, 5), (3, 6))]
    first, second, third = runner.execute(StepRequest(steps, opens)).results
    assert first.error is None and first.token_ids == [5]
    assert third.error is None and third.token_ids == [7]
    assert second.error is not None and "hidden state: holds NaN or infinite numbers" in second.error


@pytest.mark.parametrize("algorithm", ["r2r", "citer", "co_llm", "rstitch"])
def test_logits_that_are_not_finite_fail_their_own_request(tmp_path: Path, algorithm: str) -> None:
    engine = TellingEngine()
    engine.nan_after = {5}
    config = RouterConfig() if algorithm == "rstitch" else _config(tmp_path, algorithm)
    runner = _runner(config, engine)
    opens = [SessionOpen(s, 1, 100) for s in (1, 2)]
    first, second = runner.execute(StepRequest([SessionStep(1, 0, [4]), SessionStep(2, 0, [5])], opens)).results
    assert first.error is None and first.token_ids == [5]
    assert second.error == "the model's logits are not finite"


@pytest.mark.parametrize("algorithm", ["r2r", "citer", "co_llm"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_router_for_other_models_is_refused(tmp_path: Path, algorithm: str, index: int) -> None:
    config = _config(tmp_path, algorithm)
    engine = TellingEngine()
    engine.weights = "others"
    with pytest.raises(ValueError, match=rf"models\[{index}\]: trained for {MODELS[index]}, model .* has others"):
        _runner(config, engine, index)
    engine.weights = MODELS[index]
    _runner(config, engine, index)


def test_a_router_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_size: trained for 8, model 'slm' has 9"):
        _runner(_config(tmp_path, "citer"), TellingEngine(hidden_size=9))


@pytest.mark.parametrize(
    ("algorithm", "provides", "missing"),
    [
        ("citer", ["logits", "sampling"], "CiterSLM needs hidden_states"),
        ("co_llm", ["logits", "sampling"], "CoLLMSLM needs hidden_states"),
        ("r2r", ["logits", "hidden_states", "sampling"], "R2RSLM needs embeddings"),
        ("r2r", ["hidden_states", "embeddings"], "R2RSLM needs logits"),
    ],
)
def test_an_engine_without_what_it_needs_is_refused(
    tmp_path: Path, algorithm: str, provides: list[str], missing: str
) -> None:
    with pytest.raises(ValueError, match=missing):
        _runner(_config(tmp_path, algorithm), FakeEngine(provides))


def test_a_request_with_a_threshold_out_of_range_fails_alone(tmp_path: Path) -> None:
    runner = _runner(_config(tmp_path, "citer"), TellingEngine())
    opens = [SessionOpen(1, 1, 100), SessionOpen(2, 1, 100, router_params={"tau": -0.1})]
    first, second = runner.execute(StepRequest([SessionStep(1, 0, [4]), SessionStep(2, 0, [5])], opens)).results
    assert first.error is None
    assert second.error is not None and "tau: Input should be greater than or equal to 0, got -0.1" in second.error
