# SPDX-License-Identifier: Apache-2.0
"""The folder of one run, and what a run that was killed has left behind.

A run is named by its folder: the shared memory of its stubs carries the name, and so do the command lines
of its processes. That is how they are found again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

import psutil

from tools.mps import Mps

__all__ = ["RunDirectory"]

_PREFIX = "tokenrouter-"
_LOCK = "lock"
_SHM = Path("/dev/shm")
_KILL_WAIT_S = 5.0


class RunDirectory:
    """path: the folder. It is held by a lock on a file in it, which the system lets go of when this process
    ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls) -> RunDirectory:
        """A new folder under the system's temporary one, after removing what dead runs have left."""
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            run = cls(path)
            if run._is_abandoned():
                run.remove()
        run = cls(Path(tempfile.mkdtemp(prefix=_PREFIX)))
        run._hold()
        return run

    @classmethod
    def running(cls) -> list[RunDirectory]:
        """This user's runs whose processes are there, of other supervisors too."""
        runs = [cls(path) for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))]
        return [run for run in runs if run._is_mine() and not run._is_abandoned() and run.processes()]

    @property
    def shm_prefix(self) -> str:
        """What the names of the run's shared-memory regions begin with."""
        return f"{self.path.name}_"

    @property
    def mps(self) -> Mps:
        """The run's own MPS, if it has one."""
        return Mps(self.path / "mps")

    def processes(self) -> list[psutil.Process]:
        """The run's tritonserver and stubs, even those that have lost their parent."""
        # What psutil has kept of an earlier process of the same number refuses to end this one.
        psutil.process_iter.cache_clear()
        return [p for p in psutil.process_iter(["cmdline"]) if self._is_of_run(p.info["cmdline"] or [])]

    def remove(self) -> None:
        """End the run's processes, its MPS too, and delete its shared memory and its folder."""
        left = self.processes()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=_KILL_WAIT_S)
        self.mps.stop()
        for region in _SHM.glob(f"{self.shm_prefix}*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _is_of_run(self, command: list[str]) -> bool:
        """Triton's processes name the folder itself: other programs may name something inside it."""
        root = f"{self.path}/"
        is_stub = bool(command) and command[0].startswith(root)
        return is_stub or f"--model-repository={root}model_repository" in command

    def _hold(self) -> None:
        """Under its own name the lock's file appears locked: another run's `create` may look at any time."""
        unlocked = self.path / f"{_LOCK}.new"
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)

    def _is_mine(self) -> bool:
        try:
            return self.path.stat().st_uid == os.getuid()
        except OSError:  # removed just now
            return False

    def _is_abandoned(self) -> bool:
        """Whether the folder is this user's and the process that made it is gone."""
        if not self._is_mine():
            return False
        try:
            with (self.path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held; or being made or removed just now
            return False
        return True
