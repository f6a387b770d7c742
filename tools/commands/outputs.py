# SPDX-License-Identifier: Apache-2.0
"""The files that a command is asked to write: checked before the work begins; charts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tools.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot", "check_writable", "new_figure", "save_figure"]


def check_writable(flag: str, path: Path) -> None:
    """Raises UserError when `path` is a folder, in none, or not to be written by this user."""
    if path.is_dir():
        raise UserError(f"{flag}: {path}: can't be written: it is a folder")
    if not path.parent.is_dir():
        raise UserError(f"{flag}: {path}: can't be written: {path.parent} is not a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{flag}: {path}: can't be written: permission denied")


def check_plot(path: Path) -> None:
    """The same of --plot, and when there is no matplotlib or it has no such format."""
    kinds = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise UserError(f"--plot: got {path}; must end with one of {', '.join(f'.{kind}' for kind in sorted(kinds))}")
    check_writable("--plot", path)


def new_figure(width: float, height: float, wanted: str = "--plot", extra: str = "perf") -> Figure:
    """In inches. An own Figure: pyplot would keep it. Raises UserError when there is no matplotlib: what `wanted` it,
    and the extra that has it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"{wanted}: needs matplotlib, which isn't installed (pip install -e '.[{extra}]')") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path, flag: str = "--plot") -> None:
    """Raises UserError that names the flag which said where."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"{flag}: {path}: can't be written: {error.strerror}") from error
