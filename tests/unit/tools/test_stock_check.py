# SPDX-License-Identifier: Apache-2.0
"""Deployments of stock models: what `validate` says of them on this machine and on any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.triton.stock import BACKEND, engine_folder, stock_engine
from tools.deployment import Deployment, load_deployment
from tools.errors import UserError
from tools.stock_check import stock_problems
from tools.triton_install import find_triton
from tools.validate import config_problems

PACED = {"type": "paced", "context_tokens": 128}


def deployment(folder: Path, router: str = "random", **engine: Any) -> Deployment:
    built = engine_folder(folder / "engine", PACED, 100)
    settings = {"eos_token_ids": [0], "return_logits": False} | engine
    return Deployment.model_validate(
        {
            "models": [{"name": n, "engine": stock_engine(built, **settings)} for n in ("slm", "llm")],
            "router": {"name": router, "params": {"p": 0.2} if router == "random" else {}},
        }
    )


def test_a_triton_without_the_backend_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENROUTER_BACKENDS", raising=False)
    (problem,) = stock_problems(deployment(tmp_path))
    assert "models[0].engine.type: got 'tensorrtllm'; this Triton has no such backend" in str(problem)
    monkeypatch.setenv("TOKENROUTER_BACKENDS", str(BACKEND))
    assert list(stock_problems(deployment(tmp_path))) == []
    assert find_triton().has_stock_backend


def test_more_backends_go_into_the_backend_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENROUTER_BACKENDS", str(BACKEND))
    find_triton().make_backend_directory(tmp_path / "backends")
    assert (tmp_path / "backends" / "tensorrtllm").resolve() == BACKEND
    assert (tmp_path / "backends" / "python").is_dir() and (tmp_path / "backends" / "llm").is_dir()
    monkeypatch.chdir(BACKEND.parent)
    monkeypatch.setenv("TOKENROUTER_BACKENDS", BACKEND.name)  # the link lies elsewhere
    find_triton().make_backend_directory(tmp_path / "again")
    assert (tmp_path / "again" / "tensorrtllm").resolve() == BACKEND
    monkeypatch.setenv("TOKENROUTER_BACKENDS", f"{BACKEND}:{tmp_path / 'none'}")
    with pytest.raises(UserError, match=r"TOKENROUTER_BACKENDS: .*none is no folder"):
        find_triton()


def test_every_mismatch_with_the_engine_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENROUTER_BACKENDS", str(BACKEND))
    lines = [str(p) for p in stock_problems(deployment(tmp_path, tokens_per_block=32, return_logits=True))]
    assert lines == [
        f"models[{i}].engine.{what}"
        for i in (0, 1)
        for what in (
            "tokens_per_block: got 32; the engine was built with 16",
            "return_logits: got true; the engine was built without --gather_generation_logits",
        )
    ]
    (line, _) = (str(p) for p in stock_problems(deployment(tmp_path, eos_token_ids=None)))
    assert "models[0].engine.engine_dir" in line and "eos_token_ids: is not given" in line


def test_a_router_that_needs_what_isn_t_returned(tmp_path: Path) -> None:
    (line, other) = map(str, config_problems(deployment(tmp_path, "rstitch")))
    assert line == "models[0].engine.return_logits: got false; router 'rstitch' needs logits; allowed: true"
    assert "models[1]" in other
    assert config_problems(deployment(tmp_path, "rstitch", return_logits=True)) == []


def test_steps_leave_threads_for_other_calls(tmp_path: Path) -> None:
    """For the request that stops one that hangs, too."""
    assert config_problems(deployment(tmp_path, calls_at_once=61)) == []
    (problem,) = config_problems(deployment(tmp_path, calls_at_once=62))
    assert str(problem).startswith(
        "models[0].engine.calls_at_once: got 62; the stock models' are 124 together; allowed: 123 together"
    )


def test_paths_are_taken_from_the_file_s_folder(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(
        "models: [{name: slm, engine: {type: tensorrtllm, engine_dir: engines/slm, checkpoint: hf}}]\n"
        "router: {name: single}\n"
    )
    engine = load_deployment(tmp_path / "d.yaml").models[0].engine
    assert engine.engine_dir == str(tmp_path / "engines/slm")  # type: ignore[union-attr]
    assert engine.checkpoint == str(tmp_path / "hf")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engin_dir: x", "models[0].engine.engin_dir: unknown key (did you mean 'engine_dir'?)"),
        ("engine_dir: x, parameters: {gpt_model_pth: y}", "gpt_model_pth: is no parameter of the backend; allowed: "),
        ("engine_dir: x, run_tokens: 3", "run_tokens: got 3; must be 1 with return_logits: true"),
        (
            "engine_dir: x, logits_dtype: bf16",
            "models[0].engine.logits_dtype: got 'bf16'; input should be 'fp32' or 'fp16'",
        ),
        (
            "engine_dir: x, gpu_device_ids: [1, 1]",
            "models[0].engine.gpu_device_ids: got [1, 1]; must name each GPU once",
        ),
        (
            "engine_dir: x, gpu_device_ids: []",
            "models[0].engine.gpu_device_ids: got []; list should have at least 1 item",
        ),
        ("engine_dir: x, max_tokens: 0", "models[0].engine.max_tokens: got 0; input should be greater than 0"),
    ],
)
def test_bad_input(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(f"models: [{{name: slm, engine: {{type: tensorrtllm, {text}}}}}]\nrouter: {{name: single}}\n")
    with pytest.raises(UserError) as refusal:
        load_deployment(file)
    assert message in str(refusal.value)
