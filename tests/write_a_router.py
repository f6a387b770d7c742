# SPDX-License-Identifier: Apache-2.0
"""docs/write_a_router.md as its reader has it: the files that it shows, and the examples that are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "write_a_router.md"
_BLOCK = re.compile(r"^```(?P<language>\S+)(?: (?P<kind>file|name)=(?P<name>\S+))?\n(?P<code>.*?)^```$", re.S | re.M)


def blocks(kind: str | None) -> dict[str, tuple[str, str]]:
    """Name -> (language, code) of the fenced blocks of a kind: "file", "name" = an example; None = neither."""
    found = _BLOCK.finditer(PAGE.read_text(encoding="utf-8"))
    return {str(m["name"]): (m["language"], m["code"]) for m in found if m["kind"] == kind}


def write_files(folder: Path) -> None:
    """Every file of the page."""
    for name, (_, code) in blocks("file").items():
        (folder / name).write_text(code, encoding="utf-8")


def run_example(name: str, folder: Path, timeout_s: float, **environment: str) -> str:
    """Run an example in the folder of the page's files; returns what it printed. It must succeed."""
    language, code = blocks("name")[name]
    command = [sys.executable, "-W", "error", "-c", code] if language == "python" else ["bash", "-euc", code]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": path, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
