# SPDX-License-Identifier: Apache-2.0
"""What `tokenrouter validate` finds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """path: the key in the deployment file. value: what stands there. allowed: what may. hint: what to do."""

    path: str
    value: str
    allowed: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path}: got {self.value}; {self.allowed}" + (f" ({self.hint})" if self.hint else "")
