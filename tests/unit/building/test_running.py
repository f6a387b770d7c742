# SPDX-License-Identifier: Apache-2.0
"""Running a build, with stand-ins for python3 and trtllm-build on PATH."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.building.test_steps import model
from tools.building.running import STAMP, is_built, run
from tools.building.steps import Step, steps
from tools.cli import main
from tools.errors import UserError

# each notes its arguments, says something, and makes a file in the folder after --output_dir
STAND_IN = """#!/bin/sh
echo "$0 $@" >> {calls}
echo "working"
while [ "$1" != --output_dir ]; do shift; done
echo made > "$2/rank0"
exit {code}
"""


class Tools:
    """The stand-ins, and how often they were called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self.calls = folder / "calls"
        for name in ("python3", "trtllm-build"):
            self.put(name)
        monkeypatch.setenv("PATH", str(self.folder), prepend=os.pathsep)

    def put(self, name: str, code: int = 0) -> None:
        path = self.folder / name
        path.write_text(STAND_IN.format(calls=self.calls, code=code))
        path.chmod(0o755)

    def called(self) -> list[str]:
        """The programs called, in order."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [Path(line.split()[0]).name for line in lines]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return Tools(tmp_path, monkeypatch)


@pytest.fixture
def todo(tmp_path: Path) -> list[Step]:
    examples = tmp_path / "examples"
    for name in ("qwen", "llama"):
        script = examples / "models" / "core" / name / "convert_checkpoint.py"
        script.parent.mkdir(parents=True)
        script.touch()
    return steps(model(tmp_path, "Qwen3-8B", 2, {"examples": str(examples)}))


def test_what_is_built_is_not_built_again(tools: Tools, todo: list[Step], capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    run(todo, told.append)
    assert tools.called() == ["python3", "trtllm-build"]
    assert [line.split(": ")[1] for line in told] == ["checkpoint", "engine"]
    assert capfd.readouterr().out == "working\nworking\n"
    assert all(map(is_built, todo))
    run(todo, told.append)
    assert tools.called() == ["python3", "trtllm-build"]
    assert told[-1] == f"llm: engine: {todo[1].output} is up to date"


def test_what_has_changed_is_built_again(tools: Tools, todo: list[Step]) -> None:
    run(todo, lambda _: None)
    (todo[1].output / "of before").touch()
    (todo[0].source / "new.safetensors").touch()
    run(todo, lambda _: None)
    assert tools.called() == ["python3", "trtllm-build"] * 2
    assert sorted(path.name for path in todo[1].output.iterdir()) == [STAMP, "rank0"]


def test_another_command_is_another_build(tools: Tools, todo: list[Step]) -> None:
    run(todo, lambda _: None)
    other = Step(todo[1].title, (*todo[1].command, "--fast_build"), todo[1].source, todo[1].output)
    run([todo[0], other], lambda _: None)
    assert tools.called() == ["python3", "trtllm-build", "trtllm-build"]


def test_the_first_failure_ends_it_and_is_tried_again(tools: Tools, todo: list[Step]) -> None:
    tools.put("python3", code=3)
    with pytest.raises(UserError, match="llm: checkpoint: python3 failed with exit status 3; its output is above"):
        run(todo, lambda _: None)
    assert tools.called() == ["python3"] and not is_built(todo[0])
    tools.put("python3")
    run(todo, lambda _: None)
    assert tools.called() == ["python3", "python3", "trtllm-build"]


def test_files_of_others_are_left_alone(tools: Tools, todo: list[Step]) -> None:
    todo[0].output.mkdir(parents=True)
    (todo[0].output / "thesis.tex").touch()
    with pytest.raises(UserError, match="has files that tokenrouter build didn't make"):
        run(todo, lambda _: None)
    assert tools.called() == []


def test_a_missing_program_or_script_is_named(
    tools: Tools, todo: list[Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(todo[:1], lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="llm: engine: trtllm-build is not on PATH; run this in the Triton image"):
        run(todo[1:], lambda _: None)
    elsewhere = steps(model(tmp_path, "Qwen3-0.6B", 1, {"examples": str(tmp_path / "no")}))
    with pytest.raises(UserError, match=r"convert_checkpoint.py: is missing; build\.examples must name"):
        run(elsewhere, lambda _: None)


def _command(monkeypatch: pytest.MonkeyPatch, folder: Path, models: list[dict[str, Any]], *more: str) -> int:
    """Its exit status."""
    config = folder / "d.yaml"
    config.write_text(json.dumps({"models": models, "router": {"name": "random"}}))
    monkeypatch.setattr("sys.argv", ["tokenrouter", "build", str(config), *more])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_what_is_wrong_with_the_last_model_is_said_before_the_first_is_built(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").mkdir()
    build = {"examples": str(tmp_path / "examples")}
    first, second = (model(tmp_path, n, 1, build).model_dump(mode="json") for n in ("Qwen3-0.6B", "Qwen3-8B"))
    (tmp_path / "models" / "Qwen3-8B" / "config.json").unlink()
    assert _command(monkeypatch, tmp_path, [first, {**second, "name": "second"}]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "Qwen3-8B/config.json: can't be read" in err and tools.called() == []


def test_two_engines_need_two_folders(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "engine")
    made = [model(tmp_path, name, 1, engine_dir=folder).model_dump(mode="json") for name in ("Qwen3-0.6B", "Qwen3-8B")]
    assert _command(monkeypatch, tmp_path, [made[0], {**made[1], "name": "other"}], "--dry-run") == 1
    assert f"model 'other': engine.engine_dir: {folder}-checkpoint is where model 'llm' has" in capsys.readouterr().err
    assert _command(monkeypatch, tmp_path, [made[0], {**made[0], "name": "other"}], "--dry-run") == 0  # they share it


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_command(
    tools: Tools,
    todo: list[Step],
    tmp_path: Path,
    dry_run: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = model(tmp_path, "Qwen3-8B", 2, {"examples": str(tmp_path / "examples")}).model_dump(mode="json")
    other = {"name": "slm", "engine": {"type": "tensorrt_llm", "weights": "/models/slm"}}
    assert _command(monkeypatch, tmp_path, [other, made], *(["--dry-run"] if dry_run else [])) == 0
    out = capsys.readouterr().out
    assert "# slm: nothing to build; the engine tensorrt_llm loads /models/slm as it is\n" in out
    assert "trtllm-build --checkpoint_dir" in out
    assert tools.called() == ([] if dry_run else ["python3", "trtllm-build"])
