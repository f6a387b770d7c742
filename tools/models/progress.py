# SPDX-License-Identifier: Apache-2.0
"""How far a download has come, seen from the outside: by the size of what lies in its folder."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Report", "folder_bytes", "watching"]

Report = Callable[[int], None]
"""Called now and then with the bytes that are there so far."""

_POLL_S = 0.2


def folder_bytes(folder: Path) -> int:
    """The size of all files under `folder`, in bytes; 0 if there is none."""
    total = 0
    for parent, _, names in os.walk(folder):  # which goes past folders that are gone
        for name in names:
            with contextlib.suppress(OSError):  # the download renames and removes files as it goes
                total += os.path.getsize(os.path.join(parent, name))
    return total


@contextmanager
def watching(folder: Path, report: Report) -> Iterator[None]:
    """Report the size of `folder` while the body runs.

    Neither pip nor the hub's library has a progress interface that is the same in all their versions;
    the bytes on the disk are.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            report(folder_bytes(folder))

    thread = threading.Thread(target=watch, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
