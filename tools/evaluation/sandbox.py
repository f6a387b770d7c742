# SPDX-License-Identifier: Apache-2.0
"""Running a program that a model wrote: in a process of its own, which can compute and nothing else.

What is isolated, and how: `sandboxed`. What isn't: it may read whatever this user may read, which it has no way to
tell anybody. It is made against mistakes of a model, not against somebody who attacks the kernel.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

__all__ = ["DEFAULT_LIMITS", "Limits", "Outcome", "SandboxError", "Verdict", "run"]

_INSIDE = Path(__file__).with_name("sandboxed.py")
_OUT_OF_TIME = (-signal.SIGXCPU, -signal.SIGKILL)  # at the soft limit of CPU time, and at the hard one


class SandboxError(RuntimeError):
    """This machine can't confine a program: it isn't Linux on x86_64 or aarch64, its kernel has no seccomp, or this
    user's own limits are below the program's."""


class Verdict(str, Enum):
    """FAILED: an assertion; ERROR: another exception, a crash, or it ended itself."""

    PASSED = "passed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    ERROR = "error"


@dataclass(frozen=True)
class Limits:
    """cpu_s: of CPU time. wall_s: for a program that waits, or a machine that is busy with others. memory_mib: of
    address space, the interpreter's included."""

    cpu_s: int = 10
    wall_s: float = 60.0
    memory_mib: int = 1024


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """detail: one line on what went wrong; empty when it passed. seconds: it took, of wall time."""

    verdict: Verdict
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.PASSED


def run(program: str, limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Runs Python source with the standard library; it passes when its last line has run.

    `__name__` is "program", so what stands under `if __name__ == "__main__"` doesn't run. Its input is empty, what it
    prints is dropped, its folder is an empty one. Raises SandboxError.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokenrouter-sandbox-") as folder, tempfile.TemporaryFile() as given:
        given.write(program.encode(errors="replace"))
        given.seek(0)
        with tempfile.TemporaryFile() as answered:
            process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-B", _INSIDE, str(limits.memory_mib << 20), str(limits.cpu_s)],
                stdin=given,
                stdout=answered,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PYTHONHASHSEED": "0"},  # sets have the same order every time
                start_new_session=True,
            )
            try:
                returncode = process.wait(limits.wall_s)
            except subprocess.TimeoutExpired:
                returncode = None
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            answered.seek(0)
            answer = answered.read()
    verdict, detail = _judged(returncode, answer, limits)
    return Outcome(verdict, " ".join(detail.split()), time.monotonic() - began)


def _judged(returncode: int | None, answer: bytes, limits: Limits) -> tuple[Verdict, str]:
    if returncode is None:
        return Verdict.TIMEOUT, f"not over after {limits.wall_s:g} s"
    if returncode in _OUT_OF_TIME:
        return Verdict.TIMEOUT, f"not over after {limits.cpu_s} s of CPU time"
    try:
        verdict, detail = map(str, json.loads(answer))
        if verdict == "unconfined":
            raise SandboxError(detail)
        return Verdict(verdict), detail
    except (ValueError, TypeError, RecursionError):  # nothing, or what the program itself wrote there
        how = signal.Signals(-returncode).name if returncode < 0 else f"exit status {returncode}"
        return Verdict.ERROR, f"it ended without a verdict: {how}"
