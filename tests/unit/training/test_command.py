# SPDX-License-Identifier: Apache-2.0
"""Bad input to `tokenrouter train`: a line that names what, and nothing written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import cli
from tools.training.workers import Processes, Setup

BAD = [
    (["gpt"], "gpt"),
    (["r2r", "paced"], "a router is trained for two models of engine llama_cpp; the deployment has paced, paced"),
    (["r2r", "no-such.yaml"], "no such file"),
    (["r2r", "--recall", "0.9", "--llm-share", "0.1"], "give one of them"),
    (["r2r", "--recall", "1.5"], "less than or equal to 1"),
    (["r2r", "--judge", "oracle"], "--judge: got 'oracle'"),
    (["r2r", "--judge", "http://judge/v1"], "--judge-model"),
    (["citer", "--rounds", "0"], "rounds"),
    (["co_llm", "--prompts", "2", "--reasoning", "0"], "--prompts: got 2"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda x: str(x)[:40])
def test_bad_input(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = tmp_path / "work"
    monkeypatch.setattr(sys, "argv", ["tokenrouter", "train", *arguments, "--work", str(work)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (1, 2)
    assert message in capsys.readouterr().err
    assert not work.exists()


def test_a_worker_that_cannot_load_its_model_is_one_line() -> None:
    from tools.errors import UserError
    from tools.training.workers import Item

    missing = {"type": "llama_cpp", "weights": "/no/such.gguf"}
    with pytest.raises(UserError, match=r"train: .*/no/such\.gguf"):
        list(Processes(1)(Setup([missing]), [Item("a", "answer", [1], {})]))
