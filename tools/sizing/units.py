# SPDX-License-Identifier: Apache-2.0
"""Sizes as people read them."""

from __future__ import annotations

__all__ = ["gib"]


def gib(size: int) -> str:
    """A size in bytes as text."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 24 else f"{size:,} bytes"
