# SPDX-License-Identifier: Apache-2.0
"""Bad input to `tokenrouter train`: a line that names what, and nothing written."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.training.fakes import VOCAB, CharacterTokenizer
from tools import cli
from tools.errors import UserError
from tools.evaluation.sandbox import SandboxError
from tools.training.report import Judged, measure, write_report
from tools.training.stages import Pair
from tools.training.workers import Item, Processes, Setup

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
    (["r2r", "--output", "router.pt"], "--output: got router.pt; must end with .safetensors"),
    (["r2r", "--seed", str(2**64)], "seed"),
    (["co_llm", "--width", "64"], "--width: only of r2r, citer; the router is co_llm"),
    (["citer", "--judge", "tests"], "--judge: only of r2r"),
    (["citer", "--judge-model", "big"], "--judge-model: only of r2r"),
    (["r2r", "--rounds", "3"], "--rounds: only of citer"),
    (["r2r", "--rollouts", "0"], "--rollouts: only of citer"),
    (["r2r", "--marginal"], "--marginal: only of co_llm"),
    (["r2r", "--judge-model", "big"], "--judge-model: got 'big'; only with a URL as --judge, which is 'tests'"),
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
    missing = {"type": "llama_cpp", "weights": "/no/such.gguf"}
    with pytest.raises(UserError, match=r"train: .*/no/such\.gguf"):
        list(Processes(1)(Setup([missing]), [Item("a", "answer", [1], {})]))


def _told(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr."""
    monkeypatch.setattr(sys, "argv", ["tokenrouter", "train", *arguments])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_weights_that_hold_no_embedding_are_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, work = tmp_path / "bad.gguf", tmp_path / "work"
    weights.write_bytes(b"GGUF, but not really")
    monkeypatch.setattr("tools.training.command.locate_weights", lambda _: weights)
    assert f"weights: {weights}: " in _told(["r2r", "--work", str(work)], monkeypatch, capsys)
    assert not work.exists()


def test_a_tokenizer_without_a_chat_template_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class NoTemplate:
        def __init__(self, folder: Path) -> None:
            pass

        def encode_chat(self, messages: object) -> list[int]:
            raise ValueError("no chat template")

    header = SimpleNamespace(arrays={"tokenizer.ggml.tokens": SimpleNamespace(length=128)})
    for name in ("locate_weights", "locate_tokenizer"):
        monkeypatch.setattr(f"tools.training.command.{name}", Path)
    monkeypatch.setattr("tools.training.command.read_gguf_header", lambda _: header)
    monkeypatch.setattr("tools.training.command.Tokenizer", NoTemplate)
    line = _told(["co_llm", "--work", str(tmp_path / "work")], monkeypatch, capsys)
    assert line.startswith("tokenrouter: tokenizer: ") and line.endswith("as a conversation: no chat template")
    assert not (tmp_path / "work").exists()


def test_a_machine_without_a_sandbox_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unconfined(*_: object) -> None:
        raise SandboxError("no seccomp here")

    pair = Pair(("small", "large"), ({}, {}), CharacterTokenizer())  # type: ignore[arg-type]
    monkeypatch.setattr("tools.training.command._pair", lambda *_: (pair, VOCAB))
    monkeypatch.setattr("tools.training.command.train_router", unconfined)
    assert "no seccomp here" in _told(["co_llm", "--work", str(tmp_path / "work")], monkeypatch, capsys)


def test_a_missing_matplotlib_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = _told(["co_llm", "--work", str(tmp_path / "work")], monkeypatch, capsys)
    assert line == "tokenrouter: train: needs matplotlib, which isn't installed (pip install -e '.[train]')"
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "r.md"), "r.md: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "{work}: No space left on device"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line(
    error: OSError, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise error

    pair = Pair(("small", "large"), ({}, {}), CharacterTokenizer())  # type: ignore[arg-type]
    monkeypatch.setattr("tools.training.command._pair", lambda *_: (pair, VOCAB))
    monkeypatch.setattr("tools.training.command.train_router", full)
    work = tmp_path / "work"
    line = _told(["co_llm", "--work", str(work)], monkeypatch, capsys)
    assert line == f"tokenrouter: train: {told.format(work=work)}"


def test_a_picture_that_cannot_be_written_names_the_flag(tmp_path: Path) -> None:
    scores = np.array([0.1, 0.9, 0.2, 0.8])
    labels = np.array([0, 1, 0, 1], np.int8)
    judged = Judged(scores, scores.astype(np.float32), labels, labels == 1, np.arange(4))
    (tmp_path / "r.png").mkdir()
    with pytest.raises(UserError, match=r"^--output: .*r\.png: can't be written: Is a directory"):
        write_report(tmp_path, "r", "r", judged, 0.5, {"metrics": measure(judged, 0.5, 0)})
