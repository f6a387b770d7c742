# SPDX-License-Identifier: Apache-2.0
"""What a sweep refuses before its first hour of work, and what its answers are filed under."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from routers import Algorithm, OneTokenRouter, RouterConfig, RouterParams
from tests.unit.routers.trained import network, write
from tools.deployment import Deployment, load_deployment
from tools.errors import UserError
from tools.evaluation.spec import Point, SweepSpec
from tools.evaluation.sweep import Bench, sweep

CONSOLE = Console(quiet=True)


class OwnParams(RouterParams):
    weights: str = "equal"


OWN = Algorithm("own", OwnParams, OneTokenRouter, OneTokenRouter)


def _models(count: int) -> Deployment:
    deployment = load_deployment("smollm2")
    models = [deployment.models[0].model_copy(update={"name": f"m{i}"}) for i in range(count)]
    return deployment.model_copy(update={"models": models})


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, "a sweep needs a small and a large model; the deployment has m0"),
        (3, "controls: true is for two models; the deployment has m0, m1, m2; allowed: false"),
    ],
)
def test_models_that_a_sweep_cannot_compare(count: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        sweep(SweepSpec(), _models(count), tmp_path / "out", CONSOLE)
    assert not (tmp_path / "out").exists()


def _file(bench: Bench, name: str, weights: str) -> None:
    bench.file(Point("p", "p", RouterConfig(name=name, params={"weights": weights})))


def test_answers_of_a_router_trained_anew_are_not_mixed(tmp_path: Path) -> None:
    bench = Bench(SweepSpec(), load_deployment("smollm2"), tmp_path / "out", CONSOLE)
    path = write(tmp_path / "r.safetensors", "co_llm", network("co_llm"))
    for _ in range(2):
        _file(bench, "co_llm", str(path))
    write(path, "co_llm", network("co_llm", seed=1))
    with pytest.raises(UserError, match="holds answers with router_weights"):
        _file(bench, "co_llm", str(path))


def test_answers_of_an_engine_with_other_threads_are_not_mixed(tmp_path: Path) -> None:
    """With several threads the engine keeps its keys in 8 bits: other sums, other answers."""
    point = Point("p", "p", RouterConfig(name="single"))
    one = load_deployment("smollm2")
    Bench(SweepSpec(), one, tmp_path, CONSOLE).file(point)
    engine = one.models[0].engine.model_copy(update={"threads": 2})
    two = one.model_copy(update={"models": [one.models[0].model_copy(update={"engine": engine}), *one.models[1:]]})
    with pytest.raises(UserError, match=r"holds answers with models = .*'threads': 1.*, now it is .*'threads': 2"):
        Bench(SweepSpec(), two, tmp_path, CONSOLE).file(point)


def test_a_trained_routers_file_must_be_there_and_anothers_weights_are_its_own(tmp_path: Path) -> None:
    bench = Bench(SweepSpec(), load_deployment("smollm2"), tmp_path / "out", CONSOLE)
    with pytest.raises(UserError, match=r"^weights: got 'nowhere'; allowed: the path of"):
        _file(bench, "co_llm", "nowhere")
    _file(bench, f"{__name__}:OWN", "nowhere")
