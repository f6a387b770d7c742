# SPDX-License-Identifier: Apache-2.0
"""What a sweep refuses before its first hour of work, and what its answers are filed under."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from python_backends.llm.catalog import locate_tokenizer
from routers import Algorithm, OneTokenRouter, RouterConfig, RouterParams
from tests.unit.evaluation.made import answered
from tests.unit.routers.trained import network, write
from tools.deployment import Deployment, load_deployment
from tools.errors import UserError
from tools.evaluation.single import evaluate
from tools.evaluation.spec import Point, SweepSpec
from tools.evaluation.sweep import Bench, _check_served, _controls, _rounded, sweep
from tools.tiny_models import ensure_tiny_models

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


def test_a_missing_matplotlib_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"^eval sweep: needs matplotlib, which isn't installed .*'\.\[eval\]'"):
        sweep(SweepSpec(), _models(2), tmp_path / "out", CONSOLE)
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


LLAMA = {"type": "llama_cpp", "weights": "x.gguf"}
STOCK = {"type": "tensorrtllm", "engine_dir": "/engines/a", "vocab_size": 9}
PYTORCH = {"type": "tensorrt_llm", "weights": "/models/a"}


@pytest.mark.parametrize(
    ("engine", "change", "matters"),
    [
        (LLAMA, {"prefill_chunk": 256}, True),
        (LLAMA, {"max_sessions": 4, "context_tokens": 512}, False),
        (STOCK, {"engine_dir": "/engines/b"}, True),
        (STOCK, {"checkpoint": "/models/b"}, True),
        (STOCK, {"logits_dtype": "fp16"}, True),
        (STOCK, {"max_tokens": 9000, "kv_cache_free_gpu_mem_fraction": 0.5, "max_queue_size": 3}, False),
        (PYTORCH, {"kv_cache_dtype": "fp8"}, True),
        (PYTORCH, {"tensor_parallel": 2}, True),
        (PYTORCH, {"host_cache_bytes": 9, "free_memory_fraction": 0.5}, False),
        ({"type": "paced"}, {"step_ms": 1.0}, False),
        ({"type": "paced"}, {"eos_every": 9}, True),
    ],
)
def test_what_of_an_engine_its_answers_depend_on(
    engine: dict[str, Any], change: dict[str, Any], matters: bool, tmp_path: Path
) -> None:
    point = Point("p", "p", RouterConfig(name="single"))
    one, other = [
        Deployment.model_validate({"tokenizer": "smollm2", "models": [{"name": "m", "engine": {**engine, **more}}]})
        for more in ({}, change)
    ]
    Bench(SweepSpec(), one, tmp_path, CONSOLE).file(point)
    with pytest.raises(UserError, match="holds answers with models = ") if matters else nullcontext():
        Bench(SweepSpec(), other, tmp_path, CONSOLE).file(point)


def test_answers_to_prompts_of_another_tokenizer_are_not_mixed(tmp_path: Path) -> None:
    point, one = Point("p", "p", RouterConfig(name="single")), load_deployment("smollm2")
    Bench(SweepSpec(), one, tmp_path / "out", CONSOLE).file(point)
    copy = tmp_path / "mine"
    copy.symlink_to(locate_tokenizer("smollm2"))
    other = one.model_copy(update={"tokenizer": str(copy)})
    with pytest.raises(UserError, match="holds answers with tokenizer = 'smollm2', now it is 'mine'"):
        Bench(SweepSpec(), other, tmp_path / "out", CONSOLE).file(point)


@pytest.mark.parametrize(
    ("routers", "both", "name"),
    [
        ([{"name": "random", "label": "小"}, {"name": "rstitch", "label": "大"}], "'小' and '大'", "-.jsonl"),
        ([{"name": "random", "label": "SLM only"}], "'SLM only' and 'SLM only'", "SLM-only.jsonl"),
        (
            [
                {"name": "rstitch", "label": "x tau=0.1"},
                {"name": "rstitch", "label": "x", "sweep": {"tau": [0.05, 0.1]}},
            ],
            "'x tau=0.1' and 'x tau=0.1'",
            "x-tau=0.1.jsonl",
        ),
    ],
)
def test_two_points_have_two_files(routers: list[dict[str, Any]], both: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        sweep(SweepSpec.model_validate({"routers": routers}), _models(2), tmp_path / "out", CONSOLE)
    assert str(error.value).startswith(f"routers: {both} would both have their answers in {name}; ")
    assert not (tmp_path / "out").exists()


def test_a_trained_routers_file_must_be_there_and_anothers_weights_are_its_own(tmp_path: Path) -> None:
    bench = Bench(SweepSpec(), load_deployment("smollm2"), tmp_path / "out", CONSOLE)
    with pytest.raises(UserError, match=r"^weights: got 'nowhere'; allowed: the path of"):
        _file(bench, "co_llm", "nowhere")
    _file(bench, f"{__name__}:OWN", "nowhere")


@pytest.mark.parametrize("speed", [True, False])
def test_no_tokens_per_second_of_a_machine_that_does_other_things(speed: bool, tmp_path: Path) -> None:
    bench = Bench(SweepSpec(problems="0:1", speed=speed), load_deployment("smollm2"), tmp_path / "out", CONSOLE)
    point = Point("p", "p", RouterConfig(name="random"))
    bench.file(point).add(answered(0, True).model_copy(update={"id": bench.questions[0].id}))
    assert (bench.result(point).tokens_per_s is not None) == speed


def test_points_that_are_near_have_one_control_and_take_one_that_is_asked_for(tmp_path: Path) -> None:
    bench = Bench(SweepSpec(problems="0:1"), load_deployment("smollm2"), tmp_path / "out", CONSOLE)
    shares = {"a": 60, "b": 64, "c": 90, "d": 91, "e": 3, "none": 0, "all": 1000}  # of 1000 tokens; 5 of them are near
    points = [Point(label, label, RouterConfig(name="rstitch", params={"tau": 0.1})) for label in shares]
    points.append(Point("mine", "mine", RouterConfig(name="random"), {"p": 0.0875}, 0.0875))
    for point, llm in zip(points, [*shares.values(), 200], strict=True):
        answer = answered(0, True, slm=1000 - llm, llm=llm)
        bench.file(point).add(answer.model_copy(update={"id": bench.questions[0].id, "by_model": {"slm": 1000 - llm}}))
    controls = _controls(bench, points)
    assert {label: control and control.label for label, control in controls.items()} == {
        "a": "random p=0.06",
        "b": "random p=0.06",
        "c": "mine",
        "d": "mine",
        "e": "random p=0.003",
        "none": None,
        "all": None,
    }
    assert controls["a"] is not None
    assert controls["a"].overrides == {"p": 0.06}


@pytest.mark.parametrize(("llm", "p"), [(9, 0.009), (29, 0.029), (50, 0.05), (996, 0.996)])
def test_a_wide_tolerance_leaves_no_point_without_a_control(llm: int, p: float, tmp_path: Path) -> None:
    bench = Bench(SweepSpec(problems="0:1", control_tolerance=0.03), load_deployment("smollm2"), tmp_path, CONSOLE)
    point = Point("it", "it", RouterConfig(name="rstitch", params={"tau": 0.1}))
    never = Point("never", "random", RouterConfig(name="random"), {"p": 0.0}, 0.0)  # near, and no choice at all
    answer = answered(0, True, slm=1000 - llm, llm=llm)
    bench.file(point).add(answer.model_copy(update={"id": bench.questions[0].id}))
    control = _controls(bench, [point, never])["it"]
    assert control is not None
    assert control.overrides == {"p": p}


def test_a_tiny_share_is_not_rounded_to_no_choice() -> None:
    assert [_rounded(share) for share in (0.06543, 0.00002, 0.99999)] == [0.0654, 0.00002, 0.99999]


def test_a_router_that_does_not_fit_the_models_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what `tokenrouter validate` says, a line for each router; what has nothing to do with them is said once."""
    made = ensure_tiny_models(tmp_path / "tiny")
    engine = {"type": "llama_cpp", "context_tokens": 128}
    models = [{"name": name, "engine": {**engine, "weights": str(made[name])}} for name in ("slm", "llm")]
    tiny = Deployment.model_validate({"tokenizer": str(made["tokenizer"]), "models": models})
    other = str(write(tmp_path / "other.safetensors", "citer", network("citer")))
    spec = SweepSpec.model_validate(
        {
            "problems": "0:1",
            "routers": [
                {"name": "rstitch", "params": {"tau": 0.1}},
                {"name": "citer", "params": {"weights": other}, "sweep": {"tau": [0.1, 0.5]}},
                {"name": "co_llm", "label": "co", "params": {"weights": "co_llm-qwen2.5-coder"}},
            ],
        }
    )
    started: list[str] = []

    @contextmanager
    def server(deployment: Deployment, console: Console) -> Iterator[None]:
        started.append(deployment.router.name)
        raise UserError("started")
        yield

    monkeypatch.setattr("tools.evaluation.sweep.own_server_of", server)
    with pytest.raises(UserError) as error:
        sweep(spec, tiny, tmp_path / "out", CONSOLE)
    assert started == []
    citer, co = error.value.lines
    assert citer.startswith("citer tau=0.1: router.params: got ") and "vocab_size: trained for 40" in citer
    assert co.startswith("co: router.params: got ") and "vocab_size: trained for 151936" in co
    short = tiny.model_copy(update={"limits": tiny.limits.model_copy(update={"max_live": 1000})})
    with pytest.raises(UserError) as error:
        sweep(spec, short, tmp_path / "out", CONSOLE)
    assert [line.split(":")[0] for line in error.value.lines] == ["limits.max_live"] * 2 + ["citer tau=0.1", "co"]
    with pytest.raises(UserError, match=r"^started$"):
        sweep(spec.model_copy(update={"routers": spec.routers[:1]}), tiny, tmp_path / "out", CONSOLE)
    assert started == ["single"]


def test_what_is_measured_already_needs_no_server_and_no_check(tmp_path: Path) -> None:
    spec = SweepSpec(problems="0:1")
    bench = Bench(spec, _models(2), tmp_path / "out", CONSOLE)
    point = Point("p", "p", RouterConfig(name="co_llm", params={"weights": "co_llm-qwen2.5-coder"}))
    bench.file(point).add(answered(0, True).model_copy(update={"id": bench.questions[0].id}))
    _check_served(bench, [[point]])


def test_a_folder_is_worked_in_by_one_process(tmp_path: Path) -> None:
    bench = Bench(SweepSpec(), _models(2), tmp_path / "out", CONSOLE)
    refused = f"--output: another `tokenrouter eval` works in {tmp_path / 'out'}; wait for its end, or give another"
    with bench.alone():
        with pytest.raises(UserError) as error:
            sweep(SweepSpec(), _models(2), tmp_path / "out", CONSOLE)
        assert str(error.value) == refused
        with pytest.raises(UserError) as error:
            evaluate(SweepSpec(), _models(2), {}, None, "127.0.0.1:1", tmp_path / "out", CONSOLE)
        assert str(error.value) == refused
    with bench.alone():
        pass  # it ends with its process, or its work
