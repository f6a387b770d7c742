# SPDX-License-Identifier: Apache-2.0
"""The command: run the cases, write JSON, a Markdown page and plots."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
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
    again: Annotated[Path | None, typer.Option(help="the JSON of an earlier run, to be written anew")] = None,
    output: Annotated[Path, typer.Option(help="the folder of the results")] = Path("perf/results"),
) -> None:
    """The runtime on a real Triton with paced models, against the Markov model and in comparison."""
    console = Console()
    for name in only or ():
        if name not in CASES:
            raise typer.BadParameter(f"{name}: there are {', '.join(CASES)}", param_hint="--only")
    if again is not None:
        if only or longer > 1:
            raise typer.BadParameter("measures nothing: goes with neither --only nor --longer", param_hint="--again")
        _write(console, *_read(again), output, again.stem)
        return
    began = time.monotonic()
    results: dict[str, list[Row]] = {}
    for name in only or [name for name in CASES if name not in ON_REQUEST]:
        case, seconds = CASES[name]
        results[name] = case(seconds * longer, lambda what, name=name: console.print(f"[dim]{name}: {what}"))  # type: ignore[misc]
    stem = "-".join(["runtime", *(only or ())])  # some of the cases don't take the place of all
    _write(console, results, time.monotonic() - began, output, stem)


def _read(path: Path) -> tuple[dict[str, list[Row]], float]:
    """What a run has written: its rows by case, and how many seconds it took."""
    try:
        figures = json.loads(path.read_text())
        took_s = float(figures.pop("took_s"))
        if unknown := figures.keys() - CASES.keys():
            raise ValueError(f"unknown cases {', '.join(sorted(unknown))}")
        return {name: [Row.model_validate(row) for row in rows] for name, rows in figures.items()}, took_s
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise typer.BadParameter(f"{path}: not the JSON of a run: {error}", param_hint="--again") from None


def _write(console: Console, results: Mapping[str, Sequence[Row]], took_s: float, output: Path, stem: str) -> None:
    """JSON, a page and plots, OUTPUT/STEM and what follows it."""
    page = markdown(results)
    console.print(Markdown(page))
    output.mkdir(parents=True, exist_ok=True)
    figures = {name: [row.model_dump() for row in rows] for name, rows in results.items()}
    (output / f"{stem}.json").write_text(json.dumps({"took_s": took_s, **figures}, indent=1) + "\n")
    (output / f"{stem}.md").write_text(page)
    for path in (output / f"{stem}.json", output / f"{stem}.md", *plots(results, output, stem)):
        console.print(f"wrote {path}")
    console.print(f"took {took_s:.0f} s")


if __name__ == "__main__":
    typer.run(main)
