# SPDX-License-Identifier: Apache-2.0
"""The `tokenrouter` command: exit status, and what goes to stdout and stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.cli import main

GOOD = "models: [{name: a, engine: {type: paced}}]\nrouter: {name: single}\nlimits: {max_live: 4}\n"
BAD = GOOD.replace("single", "random")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["tokenrouter", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "d.yaml"


def test_a_sound_deployment_is_ok(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(GOOD)
    assert run(monkeypatch, "validate", str(config)) == 0
    assert capsys.readouterr().out.startswith("ok: a, router single, context 4096 tokens")


def test_a_warning_is_a_line_and_no_failure(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(GOOD)
    monkeypatch.setattr("tools.commands.validate.machine_warnings", lambda _: ["models[0]: may differ"])
    assert run(monkeypatch, "validate", str(config)) == 0
    assert capsys.readouterr().out.endswith("memory\nwarning: models[0]: may differ\n")


def test_problems_are_a_table_and_a_status(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(BAD)
    assert run(monkeypatch, "validate", str(config)) == 1
    out = capsys.readouterr().out
    assert "1 to put right" in out and "models" in out and "router 'random'" in out


@pytest.mark.parametrize("command", ["validate", "prepare", "serve"])
@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, ": no such file; the shipped deployments are default, paced, smollm2\n"),
        ("models: 3", ": models: got 3; input should be a valid list\n"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    text: str | None,
    error: str,
) -> None:
    if text is not None:
        config.write_text(text)
    assert run(monkeypatch, command, str(config)) == 1
    assert capsys.readouterr().err == f"tokenrouter: {config}{error}"


def test_prepare_renders_and_refuses(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(GOOD)
    assert run(monkeypatch, "prepare", str(config), "--output", str(tmp_path / "r")) == 0
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == ["a", "ensemble", "token_router"]
    assert run(monkeypatch, "prepare", str(config), "--output", str(tmp_path)) == 1
    assert "--force writes into it anyway" in capsys.readouterr().err
    config.write_text(BAD)
    assert run(monkeypatch, "prepare", str(config), "--output", str(tmp_path / "r")) == 1
    assert "tokenrouter: models: got ['a']; router 'random'" in capsys.readouterr().err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['tokenrouter', '--help']\n"
        "heavy = {'torch', 'transformers', 'grpc', 'llama_cpp'}\n"
        "import atexit; atexit.register(lambda: print(heavy & set(sys.modules)))\n"
        "from tools.cli import main; main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "serve" in ran.stdout and ran.stdout.endswith("set()\n")
