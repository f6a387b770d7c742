# SPDX-License-Identifier: Apache-2.0
"""What `check` says of models of the engine tensorrt_llm: the package, their checkpoints, and what they can't do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import tensorrt_llm_check
from tools.deployment import Deployment, load_deployment
from tools.machine import machine_problems
from tools.tensorrt_llm_check import checkpoint_vocabulary, tensorrt_llm_problems
from tools.validate import config_problems


def deployment(*weights: str, **sections: Any) -> Deployment:
    engines = [{"type": "tensorrt_llm", "weights": w} for w in weights]
    models = [{"name": f"m{i}", "engine": engine} for i, engine in enumerate(engines)]
    return Deployment.model_validate({"models": models, "router": {"name": "random"}, **sections})


def checkpoint(folder: Path, vocab_size: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "eos_token_id": 2}))
    return str(folder)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_llm_check, "package_problem", lambda: None)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (problem,) = tensorrt_llm_problems(deployment(checkpoint(tmp_path / "a", 50)))
    assert str(problem).startswith(
        "models[0].engine.type: got 'tensorrt_llm'; tensorrt_llm isn't installed here; the image"
    )


@pytest.mark.usefixtures("installed")
def test_checkpoints_are_read_where_they_are_folders(tmp_path: Path) -> None:
    a, missing = checkpoint(tmp_path / "a", 50), str(tmp_path / "b")
    (problem,) = tensorrt_llm_problems(deployment(a, missing))
    assert problem.path == "models[1].engine.weights" and "config.json can't be read" in str(problem)
    named = deployment("Qwen/Qwen3-8B")
    assert list(tensorrt_llm_problems(named)) == []
    assert checkpoint_vocabulary(named.models[0].engine) is None  # type: ignore[arg-type]


@pytest.mark.usefixtures("installed")
def test_kept_sessions_need_max_tokens_or_a_section_memory(tmp_path: Path) -> None:
    engine = {"type": "tensorrt_llm", "weights": checkpoint(tmp_path / "a", 50), "pending": "kept"}
    values = {"models": [{"name": "m", "engine": engine}], "router": {"name": "single"}}
    (problem,) = tensorrt_llm_problems(Deployment.model_validate(values))
    assert str(problem).startswith("models[0].engine.max_tokens: got null; must be given with pending: kept")


@pytest.mark.usefixtures("installed")
def test_vocabularies_must_be_equal(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a", 50), checkpoint(tmp_path / "b", 60)
    problems = machine_problems(deployment(a, b))
    assert [str(p) for p in problems] == [
        "models[1].engine.weights: got a vocabulary of 60; must have that of models[0].engine.weights, 50"
    ]


def test_a_router_that_needs_hidden_states_is_refused_with_what_to_use() -> None:
    problems = config_problems(deployment("a", "b", router={"name": "citer", "params": {"weights": "any"}}))
    assert any("models[0].engine.type: got 'tensorrt_llm'" in str(p) and "llama_cpp" in str(p) for p in problems)
    assert config_problems(deployment("a", "b", router={"name": "rstitch"})) == []


def test_a_path_is_one_of_the_deployment_s_folder_a_name_is_not(tmp_path: Path) -> None:
    models = [
        {"name": name, "engine": {"type": "tensorrt_llm", "weights": weights}}
        for name, weights in (("slm", "./qwen"), ("llm", "Qwen/Qwen3-8B"))
    ]
    file = tmp_path / "deployment.yaml"
    file.write_text(json.dumps({"models": models, "router": {"name": "random"}}))
    found = [m.engine.weights for m in load_deployment(str(file)).models]  # type: ignore[union-attr]
    assert found == [str(tmp_path / "qwen"), "Qwen/Qwen3-8B"]
