# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter train` from prompts to a router's file, on the smallest real pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from routers.weights import load_router
from tools.errors import UserError
from tools.training.command import train
from tools.training.options import DataOptions, TrainOptions
from tools.training.training import Target

pytestmark = pytest.mark.model

DATA = DataOptions(prompts=6, reasoning=2, max_tokens=64, seed=0)


def test_a_router_from_the_real_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainOptions(tmp_path, DATA, Target(), judge="continuation", width=32, epochs=2, processes=1, sessions=8)
    train("r2r", "smollm2", options)
    made = (tmp_path / "r2r.safetensors").read_bytes()
    header = load_router(tmp_path / "r2r.safetensors", "r2r").header
    assert header.models == ["smollm2-135m-q4_0", "smollm2-135m-q8_0"]
    assert (header.hidden_size, header.vocab_size, header.network["width"]) == (576, 49152, 32)
    lines = (tmp_path / "branches-statement.jsonl").read_text().splitlines()
    branches = [branch for line in lines for branch in json.loads(line)["branches"]]
    answers = {r["key"]: r for r in map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())}
    assert branches and all(0 <= b["position"] < DATA.max_tokens and b["token_ids"] for b in branches)
    assert all(0 < len(a["token_ids"]) <= DATA.max_tokens for a in answers.values())
    assert {p.name for p in tmp_path.glob("r2r.*")} == {"r2r.safetensors", "r2r.json", "r2r.md", "r2r.png"}

    def no_model(*_: object) -> None:
        raise AssertionError("a model was started for what is there already")

    monkeypatch.setattr("tools.training.workers.Processes.__call__", no_model)
    (tmp_path / "r2r.safetensors").unlink()
    train("r2r", "smollm2", options)
    assert (tmp_path / "r2r.safetensors").read_bytes() == made
    with pytest.raises(UserError, match="was begun with prompts = 6, not 7"):
        train("r2r", "smollm2", TrainOptions(tmp_path, DataOptions(7, 2, 64, 0), Target()))
