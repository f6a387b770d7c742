# SPDX-License-Identifier: Apache-2.0
"""Running the steps of a build, each only when what it reads or says has changed since."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.building.steps import Step
from tools.errors import UserError

__all__ = ["STAMP", "is_built", "run"]

STAMP = ".tokenrouter-build.json"  # in the folder that a step makes: what it was made of


def run(steps: Sequence[Step], tell: Callable[[str], None]) -> None:
    """One after another; what they print goes to the terminal. tell: gets a line about each.

    A folder that an earlier build made is made anew. Raises UserError at the first that fails, can't be started, or
    would write into a folder with files of others.
    """
    for step in steps:
        if is_built(step):
            tell(f"{step.title}: {step.output} is up to date")
            continue
        tell(f"{step.title}: {shlex.join(step.command)}")
        _run(step)


def is_built(step: Step) -> bool:
    """Whether the step's folder was made by this command from the files that it would read now."""
    try:
        stamp = json.loads((step.output / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(stamp == _stamp(step))


def _run(step: Step) -> None:
    output = step.output
    try:
        if output.is_dir() and any(output.iterdir()):
            if not (output / STAMP).exists():
                raise UserError(f"{output}: has files that tokenrouter build didn't make; remove it, or name another")
            shutil.rmtree(output)
        output.mkdir(parents=True, exist_ok=True)
        (output / STAMP).write_text("{}\n", encoding="utf-8")  # the folder is ours, and not done
        script = next((Path(part) for part in step.command if part.endswith(".py")), None)
        if script is not None and not script.is_file():
            raise UserError(f"{script}: is missing; build.examples must name TensorRT-LLM's folder of examples")
        code = subprocess.run(step.command, check=False).returncode
        if code:
            raise UserError(f"{step.title}: {step.command[0]} failed with exit status {code}; its output is above")
        (output / STAMP).write_text(json.dumps(_stamp(step)) + "\n", encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(
            f"{step.title}: {step.command[0]} is not on PATH; run this in the Triton image for TensorRT-LLM"
        ) from error
    except OSError as error:
        raise UserError(f"{step.title}: {error}") from error


def _stamp(step: Step) -> dict[str, Any]:
    """The command, and the files that it reads: name, bytes, time."""
    files = sorted(path for path in step.source.rglob("*") if path.is_file())
    found = [[str(p.relative_to(step.source)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    return {"command": list(step.command), "files": found}
