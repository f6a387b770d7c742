# SPDX-License-Identifier: Apache-2.0
"""One process at a time in a folder whose files are added to line by line: of two, each would drop the line that the
other one is writing."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.errors import UserError

__all__ = ["alone"]


@contextmanager
def alone(file: Path, refused: str) -> Iterator[None]:
    """Hold the folder's `file` (made if absent, never changed). Raises UserError(refused) when another process holds
    it, and OSError. The lock is the kernel's and ends with its process."""
    with file.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(refused) from None
        yield
