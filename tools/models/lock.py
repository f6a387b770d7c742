# SPDX-License-Identifier: Apache-2.0
"""One fetch at a time on one cache."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_lock"]


@contextmanager
def cache_lock(root: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the cache at `root` (made if absent). While another process holds it: `on_wait` once, then wait.

    The lock is the kernel's and ends with its process, so a killed fetch blocks nobody.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / "fetch.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
