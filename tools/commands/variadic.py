# SPDX-License-Identifier: Apache-2.0
"""Options that take several numbers: `--latency-ms 6.0 27.9`. To click that is an option given twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from typer.core import TyperCommand

__all__ = ["NumbersCommand", "spread"]


class NumbersCommand(TyperCommand):
    """A command whose list options take all the numbers that follow them (`app.command(cls=NumbersCommand)`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        return super().parse_args(ctx, list(spread(args, options)))


def spread(args: Iterable[str], options: Collection[str]) -> Iterable[str]:
    """The arguments, with the option repeated before each further number."""
    option, values = None, 0
    for arg in args:
        name, equals, _ = arg.partition("=")
        if name in options:
            option, values = name, int(bool(equals))
        elif option is not None:
            if values and _is_number(arg):
                yield option
            elif values:
                option = None
            values += 1
        yield arg


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
