# SPDX-License-Identifier: Apache-2.0
"""What a program in the sandbox can and can't do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tools.evaluation.sandbox import Limits, SandboxError, Verdict, run
from tools.evaluation.sandboxed import filter_program

LIMITS = Limits(cpu_s=1, wall_s=20.0, memory_mib=512)
ROOT = Path(__file__).parents[3]


def refused(program: str) -> bool:
    """Whether the program got EPERM, and nothing else."""
    outcome = run(
        f"try:\n    {program}\nexcept PermissionError as error:\n    assert error.errno == 1\nelse:\n    1 / 0"
    )
    return outcome.passed


@pytest.mark.parametrize(
    ("program", "verdict", "detail"),
    [
        ("assert sorted([2, 1]) == [1, 2]", Verdict.PASSED, ""),
        ("assert 1 == 2, 'no'", Verdict.FAILED, "AssertionError: no"),
        ("1 / 0", Verdict.ERROR, "ZeroDivisionError: division by zero"),
        ("def f(:", Verdict.ERROR, "SyntaxError: invalid syntax (program, line 1)"),
        ("raise SystemExit", Verdict.ERROR, "SystemExit: it ended itself"),
        ("import os; os._exit(0)", Verdict.ERROR, "it ended without a verdict: exit status 0"),
        ("import os; os.write(3, b'1'); os._exit(0)", Verdict.ERROR, "it ended without a verdict: exit status 0"),
        ("import os; os.write(3, b'[1, 2]'); os._exit(0)", Verdict.ERROR, "it ended without a verdict: exit status 0"),
        ("import os; os.abort()", Verdict.ERROR, "it ended without a verdict: SIGABRT"),
        ("def f(): return f()\nf()", Verdict.ERROR, "RecursionError: maximum recursion depth exceeded"),
        ("[0] * 10**9", Verdict.MEMORY, "MemoryError"),
        ("while True: pass", Verdict.TIMEOUT, "not over after 1 s of CPU time"),
        ("input()", Verdict.ERROR, "EOFError: EOF when reading a line"),
        ("print('x' * 10**7)", Verdict.PASSED, ""),
        ("if __name__ == '__main__': 1 / 0", Verdict.PASSED, ""),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nassert A(1).x == 1", Verdict.PASSED, ""),
    ],
)
def test_verdicts(program: str, verdict: Verdict, detail: str) -> None:
    outcome = run(program, LIMITS)
    assert (outcome.verdict, outcome.detail) == (verdict, detail)


def test_a_program_that_waits_is_ended() -> None:
    outcome = run("import time; time.sleep(100)", Limits(wall_s=0.5))
    assert outcome.verdict is Verdict.TIMEOUT
    assert outcome.detail == "not over after 0.5 s"


def test_a_program_that_ignores_the_signal_and_swallows_everything_is_ended() -> None:
    program = """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True:
    try:
        [0] * 10**9
    except BaseException:
        pass
"""
    assert run(program, LIMITS).verdict is Verdict.TIMEOUT


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import multiprocessing as m; m.get_context('fork').Process().start()",
        "open('here', 'w')",
        "open('/tmp/there', 'x')",
        "import tempfile; tempfile._get_default_tempdir = lambda: '/tmp'; tempfile.TemporaryFile(dir='/tmp')",
        "import os; os.mkdir('folder')",
        "import os; os.unlink('/etc/hostname')",
        "import os; os.rename('/etc/hostname', '/etc/other')",
        "import os; os.chmod('.', 0o777)",
        "import os; os.truncate('/etc/hostname', 0)",
        "import os; os.symlink('a', 'b')",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM)",
        "import os, signal; os.kill(-1, 0)",
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], 10, 9)",  # F_SETSIG: what is sent to that owner
        "import os; os.setsid()",
        "import os; os.setuid(1)",
        "import os; os.chroot('/')",
    ],
)
def test_what_is_not_computing_is_refused(program: str) -> None:
    assert refused(program)


def test_limits_cannot_be_raised() -> None:
    program = """
import resource
for limit in (100, resource.RLIM_INFINITY):
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    except (OSError, ValueError):
        continue
    1 / 0
"""
    assert run(program).passed


def test_threads_run_and_are_bounded_by_memory() -> None:
    few = """
import threading
threads = [threading.Thread(target=int) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    assert run(few, LIMITS).passed
    bomb = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,), daemon=True).start()"
    outcome = run(bomb, LIMITS)
    assert outcome.verdict is Verdict.ERROR
    assert "can't start new thread" in outcome.detail


def test_it_sees_none_of_our_environment_and_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    program = f"""
import os
assert "SECRET" not in os.environ
assert os.listdir(".") == []
try:
    os.write({writing}, b"x")
except OSError:
    pass
else:
    1 / 0
"""
    try:
        assert run(program).passed
    finally:
        os.close(reading)
        os.close(writing)


def test_packages_that_happen_to_be_installed_are_not_there() -> None:
    assert run("import numpy").detail == "ModuleNotFoundError: No module named 'numpy'"


def test_sets_have_one_order() -> None:
    program = "import sys; assert str({'a', 'b', 'c', 'd'}) == 0, {'a', 'b', 'c', 'd'}"
    assert len({run(program).detail for _ in range(3)}) == 1


def test_reading_is_not_isolated() -> None:
    """As the module says: whoever relies on it should know."""
    assert run(f"assert 'name = \"tokenrouter\"' in open({str(ROOT / 'pyproject.toml')!r}).read()").passed


def test_it_dies_with_whoever_runs_it(tmp_path: Path) -> None:
    code = "from tools.evaluation.sandbox import run; run('import time; time.sleep(50.25)')"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        deadline = time.monotonic() + 20
        while not (children := _children(parent.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)  # until it has asked to die with its parent
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "it outlives its parent"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_many_at_once() -> None:
    outcomes: list[bool] = []
    threads = [threading.Thread(target=lambda: outcomes.append(run("assert 1").passed)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 8


def test_a_machine_it_does_not_know_is_refused() -> None:
    with pytest.raises(OSError, match="knows the system calls of x86_64 and aarch64; this machine is riscv64"):
        filter_program("riscv64", 1)


def test_a_program_that_cannot_be_confined_is_not_run() -> None:
    with pytest.raises(SandboxError, match=r"RLIMIT_CPU: can't be set to \(-1, 0\): current limit exceeds maximum"):
        run("pass", Limits(cpu_s=-1))  # no limit, below a limit of 0
