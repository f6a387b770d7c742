# SPDX-License-Identifier: Apache-2.0
"""The trained routers that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import routers
from python_backends.llm.catalog import CATALOG
from routers import RouterConfig, ServedModel
from routers.weights import load_router, read_header
from tools.deployment import load_deployment

SHIPPED = sorted((Path(routers.__file__).parent / "pretrained").glob("*.safetensors"))


def test_there_are_some() -> None:
    assert SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_it_serves_the_models_that_it_was_trained_for(path: Path) -> None:
    header = read_header(path)
    assert path.stem == f"{header.algorithm}-qwen2.5-coder"
    assert header.models == [getattr(m.engine, "weights", None) for m in load_deployment("default").models]
    assert all(name in CATALOG for name in header.models)
    assert path.stat().st_size < 5_000_000
    config = RouterConfig(name=header.algorithm, params={"weights": path.stem})
    entry = config.router(0, ["slm", "llm"])

    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(token_ids), header.hidden_size)

    model = ServedModel("slm", header.models[0], header.vocab_size, header.hidden_size, embed)
    entry.check(model)
    entry.bind(model)
    assert load_router(path, header.algorithm).header.threshold == header.threshold


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_its_report_lies_beside_it_and_is_of_this_file(path: Path) -> None:
    header = json.loads(read_header(path).model_dump_json())
    report = json.loads(path.with_suffix(".json").read_text())
    assert {key: report.get(key) for key in header} == header
    assert report["data"]["epochs_run"] == [len(losses) - 1 for losses in report["held_out_loss"]]
    assert f"]({path.stem}.png)" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").is_file()
