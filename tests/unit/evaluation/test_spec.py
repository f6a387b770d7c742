# SPDX-License-Identifier: Apache-2.0
"""A sweep's file: its points, and what it can have wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.errors import UserError
from tools.evaluation.spec import RouterSweep, SweepSpec, load_spec, points_of

MODELS = ["slm", "llm"]


def told(tmp_path: Path, **given: Any) -> list[str]:
    """What a wrong file is answered with."""
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(given))
    with pytest.raises(UserError) as error:
        load_spec(path)
    return [line.removeprefix(f"{path}: ") for line in error.value.lines]


def test_a_parameter_that_requests_may_set_takes_one_server() -> None:
    points = list(points_of(RouterSweep(name="rstitch", sweep={"tau": [0.01, None, 0.1]}), MODELS))
    assert [p.label for p in points] == ["rstitch tau=0.01", "rstitch", "rstitch tau=0.1"]
    assert [p.overrides for p in points] == [{"tau": 0.01}, {}, {"tau": 0.1}]
    assert {p.router.model_dump_json() for p in points} == {points[0].router.model_dump_json()}


def test_another_parameter_takes_a_server_for_each_value() -> None:
    matrices = [[[0.5, 0.5], [1, 0]], [[0.9, 0.1], [1, 0]]]
    sweep = RouterSweep(name="markov", params={"c": [[1, 0], [1, 1]]}, label="m", sweep={"p": matrices})
    points = list(points_of(sweep, MODELS))
    assert [p.overrides for p in points] == [{}, {}]
    assert [p.router.params["p"] for p in points] == matrices
    assert {p.group for p in points} == {"m"}


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"name": "rstitch", "sweep": {"tau": [0.1, 2]}}, "rstitch: .*tau: .*less than or equal to 1.*, got 2"),
        ({"name": "rstich"}, "no router 'rstich'"),
        ({"name": "rstitch", "sweep": {"tua": [0.1]}}, "tua"),
    ],
)
def test_a_point_that_is_none_is_named(sweep: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(points_of(RouterSweep(**sweep), MODELS))


def test_what_a_file_can_have_wrong(tmp_path: Path) -> None:
    assert told(tmp_path, routers=[{"name": "rstitch", "sweep": {"tau": [0.1, 0.1]}}]) == [
        "routers[0]: sweep: a value is given twice"
    ]
    assert told(tmp_path, routers=[{"name": "rstitch", "sweep": {"a": [1], "b": [1]}}]) == [
        "routers[0]: sweep: one parameter at a time; got a, b"
    ]
    assert told(tmp_path, routers=[{"name": "rstitch"}, {"name": "rstitch"}]) == [
        "routers: each needs a label of its own; given twice: rstitch"
    ]
    assert told(tmp_path, temperature=1e-6) == [
        "temperature: got 1e-06; input should be greater than or equal to 0.00001"
    ]
    assert told(tmp_path, temperature=101) == ["temperature: got 101; input should be less than or equal to 100"]
    assert told(tmp_path, seed=2**64)[0].startswith("seed: got 18446744073709551616; input should be less than")
    assert told(tmp_path, concurency=3)[0].startswith("concurency: unknown key (did you mean 'concurrency'?)")
    assert told(tmp_path, task={"type": "mmlu"}) == ["task.type: got 'mmlu'; allowed: 'humaneval', 'reasoning'"]
    kinds = told(tmp_path, task={"type": "reasoning", "kinds": ["gcd", "chain_sum", "gcd"]})
    assert kinds == ["task.kinds: given twice: gcd"]
    assert told(tmp_path, task={"type": "reasoning", "kinds": []})[0].startswith("task.kinds: got []; list should have")
    with pytest.raises(UserError, match="no such file"):
        path = tmp_path / "sweep.yaml"
        path.write_text("deployment: nowhere.yaml")
        load_spec(path)
    with pytest.raises(UserError, match="can't be read"):
        load_spec(tmp_path / "nothing.yaml")


def test_a_router_s_files_lie_beside_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "deployment: smollm2\n"
        "routers:\n"
        "  - {name: r2r, params: {weights: mine.safetensors}}\n"
        "  - {name: citer, params: {weights: shipped}}\n"
        "  - {name: co_llm, sweep: {weights: [a.safetensors, ~/b.safetensors, shipped]}}\n"
        "  - {name: me, params: {weights: [0.5, 0.5]}}\n"
    )
    spec, deployment = load_spec(path)
    mine = str(tmp_path / "mine.safetensors")
    assert [r.params.get("weights") for r in spec.routers] == [mine, "shipped", None, [0.5, 0.5]]
    home = str(Path("~/b.safetensors").expanduser())
    assert spec.routers[2].sweep == {"weights": [str(tmp_path / "a.safetensors"), home, "shipped"]}
    assert deployment.tokenizer == "smollm2"
    assert spec.model_copy(update={"routers": []}) == SweepSpec(deployment="smollm2")
