# SPDX-License-Identifier: Apache-2.0
"""The process that solves: it answers, it may die, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from python_backends.token_router.threshold.controller import Question
from python_backends.token_router.threshold.profile import Profile, StepLatency
from python_backends.token_router.threshold.solver_process import SolverFailed, SolverProcess, interpreter

QUESTION = Question(
    live=4,
    profile=Profile(
        models=["slm", "llm"],
        p=[[0.65, 0.35], [1.0, 0.0]],
        c=[[1.0, 0.0], [1.0, 0.0]],
        latency=[StepLatency.constant(6.0), StepLatency.constant(27.9)],
    ),
    applied=(1, 2),
)


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_it_answers_is_replaced_when_it_dies_and_ends_when_told() -> None:
    async def main() -> None:
        solver = SolverProcess()
        assert solver.pid is None  # nothing runs before it is needed
        answer = await solver.solve(QUESTION)
        assert answer.best == (1, 3)  # the paper's figure 10
        assert answer.throughput[1, 3] == pytest.approx(207.9, abs=0.2)
        assert answer.throughput[1, 2] == pytest.approx(195.4, abs=0.2)
        first = solver.pid
        assert first is not None
        assert psutil.Process(first).nice() == 19
        await solver.solve(QUESTION)
        assert solver.pid == first
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SolverFailed, match="has ended"):
            await solver.solve(QUESTION)
        assert (await solver.solve(QUESTION)).best == (1, 3)
        second = solver.pid
        assert second not in (None, first)
        await solver.close()
        assert solver.pid is None
        assert gone(second or 0)

    asyncio.run(main())


def test_a_question_without_an_answer_says_why() -> None:
    async def main() -> None:
        solver = SolverProcess()
        with pytest.raises(SolverFailed, match="live"):
            await solver.solve(Question(0, QUESTION.profile, (1, 1)))
        await solver.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/nowhere/python"], "/nowhere/python can't be started: No such file"),
        ([sys.executable, "-c", "pass"], "has ended"),
        ([sys.executable, "-c", "print('hello', flush=True); input()"], "answered what is no JSON"),
        ([sys.executable, "-c", "print('[]', flush=True); input()"], r"answered \[\]"),
        ([sys.executable, "-c", 'print(\'{"error": "no scipy"}\', flush=True)'], "can't solve: no scipy"),
        (
            [sys.executable, "-c", "print('{\"ready\": true}', flush=True); input(); print('{\"best\": 3}')"],
            "can't be read",
        ),
    ],
)
def test_what_is_no_solver_is_a_failure(command: list[str], why: str) -> None:
    async def main() -> None:
        solver = SolverProcess(command)
        with pytest.raises(SolverFailed, match=why):
            await solver.solve(QUESTION)
        assert solver.pid is None

    asyncio.run(main())


def test_it_dies_with_its_parent_even_when_that_is_killed() -> None:
    code = (
        "import asyncio, time\n"
        "from tests.unit.threshold.test_solver_process import QUESTION, SolverProcess\n"
        "async def main():\n"
        "    solver = SolverProcess()\n"
        "    await solver.solve(QUESTION)\n"
        "    print(solver.pid, flush=True)\n"
        "    time.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert psutil.pid_exists(worker)
        parent.kill()
    assert gone(worker)


def test_the_interpreter_has_this_package() -> None:
    code = "import python_backends, sys; print(sys.version_info[:2])"
    ran = subprocess.run([interpreter(), "-I", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(sys.version_info[:2])
