# SPDX-License-Identifier: Apache-2.0
"""The way to the process that solves for B (`worker`): started when first asked, kept, replaced when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from abc import ABC, abstractmethod
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Any

from python_backends.token_router.threshold.controller import Answer, Question

__all__ = ["Solver", "SolverFailed", "SolverProcess", "interpreter"]

_WORKER = "python_backends.token_router.threshold.worker"
_START_S = 60.0
_SOLVE_S = 60.0
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
_LONGEST_LINE = 16 << 20  # bytes: the throughput of every B


class SolverFailed(Exception):
    """There is no answer. The message is one line."""


class Solver(ABC):
    """Answers questions, one at a time."""

    @abstractmethod
    async def solve(self, question: Question) -> Answer:
        """Raises SolverFailed."""

    @abstractmethod
    async def close(self) -> None:
        """End what runs for it. A question after that starts it again."""


def interpreter() -> Path:
    """The Python that has this package. Raises SolverFailed.

    Inside a Triton stub `sys.executable` is what the embedding found on PATH; the folder that the stub's own
    packages come from is sure (a venv's, or /usr in a container).
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(sys.prefix) / "bin"
    for path in (folder / f"python{version}", folder / "python3", Path(sys.executable or "python3")):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise SolverFailed(f"there is no Python {version} in {folder}")


class SolverProcess(Solver):
    """Of the event loop in which it is used. command: to start the worker with; None = this Python's."""

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the worker; None = it doesn't run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def solve(self, question: Question) -> Answer:
        try:
            process = await self._running()
            line = json.dumps(
                {"live": question.live, "profile": question.profile.model_dump(), "applied": question.applied}
            )
            return _parse(await self._exchange(process, line.encode() + b"\n"))
        except BaseException:
            await self.close()  # half an exchange would answer the next question with this one's
            raise

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.close()
        command = self._command or [str(interpreter()), "-I", "-m", _WORKER]
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=os.environ | _ONE_THREAD, limit=_LONGEST_LINE
            )
        except OSError as error:
            raise SolverFailed(f"{command[0]} can't be started: {error.strerror}") from error
        hello = await self._read(process, _START_S)
        if hello.get("ready") is not True:
            raise SolverFailed(f"{command[0]} can't solve: {hello.get('error', hello)}")
        return process

    async def _exchange(self, process: Process, line: bytes) -> dict[str, Any]:
        if process.stdin is None:
            raise RuntimeError("the process has no pipe")
        process.stdin.write(line)
        try:
            await process.stdin.drain()
        except ConnectionError as error:
            raise SolverFailed("the solver's process has ended") from error
        return await self._read(process, _SOLVE_S)

    async def _read(self, process: Process, timeout_s: float) -> dict[str, Any]:
        if process.stdout is None:
            raise RuntimeError("the process has no pipe")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
            answer = json.loads(line)
        except (asyncio.TimeoutError, TimeoutError):
            raise SolverFailed(f"the solver's process gave no answer within {timeout_s:g} s") from None
        except ValueError as error:
            what = "has ended" if process.stdout.at_eof() else f"answered what is no JSON: {error}"
            raise SolverFailed(f"the solver's process {what}") from error
        if not isinstance(answer, dict):
            raise SolverFailed(f"the solver's process answered {answer!r}")
        return answer


def _parse(answer: dict[str, Any]) -> Answer:
    if "error" in answer:
        raise SolverFailed(str(answer["error"]))
    try:
        throughput = {tuple(map(int, b.split(","))): float(value) for b, value in answer["throughput"].items()}
        best = tuple(int(b) for b in answer["best"])
        if best not in throughput:
            raise ValueError("best is not among those looked at")
        return Answer(best, throughput, str(answer["method"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SolverFailed(f"the solver's answer can't be read: {error!r}") from error
