# SPDX-License-Identifier: Apache-2.0
"""The command: run the cases, write JSON, a Markdown page and plots."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from perf.runtime import cases
from perf.runtime.cases import Row
from perf.runtime.report import markdown, plots

# case -> what runs it, and how many seconds each of its measurements takes
CASES: dict[str, tuple[Callable[[int, Callable[[str], None]], list[Row]], int]] = {
    "shares": (cases.shares, 5),
    "ablation": (cases.ablation, 4),
    "moving": (cases.moving, 10),
    "newer": (cases.newer, 4),
    "many": (cases.many, 5),
    "constants": (cases.constants, 10),
}
ON_REQUEST = ("constants",)  # would take too long with the others
_ONLY = f"which of {', '.join(CASES)}; default: all but {', '.join(ON_REQUEST)}"


def main(
    only: Annotated[list[str] | None, typer.Option(help=_ONLY)] = None,
    longer: Annotated[int, typer.Option(min=1, help="how many times as long each measurement takes")] = 1,
    output: Annotated[Path, typer.Option(help="the folder of the results")] = Path("perf/results"),
) -> None:
    """The runtime on a real Triton with paced models, against the Markov model and in comparison."""
    console = Console()
    for name in only or ():
        if name not in CASES:
            raise typer.BadParameter(f"{name}: there are {', '.join(CASES)}", param_hint="--only")
    began = time.monotonic()
    results: dict[str, list[Row]] = {}
    for name in only or [name for name in CASES if name not in ON_REQUEST]:
        case, seconds = CASES[name]
        results[name] = case(seconds * longer, lambda what, name=name: console.print(f"[dim]{name}: {what}"))  # type: ignore[misc]
    page = markdown(results)
    console.print(Markdown(page))
    output.mkdir(parents=True, exist_ok=True)
    took_s = time.monotonic() - began
    figures = {name: [row.model_dump() for row in rows] for name, rows in results.items()}
    stem = "-".join(["runtime", *(only or ())])  # some of the cases don't take the place of all
    (output / f"{stem}.json").write_text(json.dumps({"took_s": took_s, **figures}, indent=1) + "\n")
    (output / f"{stem}.md").write_text(page)
    for path in (output / f"{stem}.json", output / f"{stem}.md", *plots(results, output, stem)):
        console.print(f"wrote {path}")
    console.print(f"took {took_s:.0f} s")


if __name__ == "__main__":
    typer.run(main)
