# SPDX-License-Identifier: Apache-2.0
"""The one exception for what a user can put right."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["UserError"]


class UserError(Exception):
    """Something a user can put right. Each line stands for itself: the command prints them and exits with 1."""

    def __init__(self, lines: str | Iterable[str]) -> None:
        self.lines = [lines] if isinstance(lines, str) else list(lines)
        super().__init__("\n".join(self.lines))
