# SPDX-License-Identifier: Apache-2.0
"""The LLM on another host, behind a link with a delay, beside the same pair on one host: `python -m perf.remote`.

Paced models at GPU step times and the paper's share of delegated tokens, closed-loop clients. The far host is a
network namespace (perf.far_host: Linux, root, iproute2); its processes share this machine's cores with the others.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markdown import Markdown

from perf.far_host import far_host, why_not
from perf.far_server import far_server, with_far_models
from perf.runtime.measure import Measured, Pair, measure
from tools.supervisor import RunningServer, running_server

__all__ = ["Row", "main", "markdown"]

_BATCHING = {"max_wait_ms": 60_000.0}


class Row(BaseModel):
    """One measurement. one_way_ms: None = on one host. round_trip_ms: as token_router has measured it."""

    one_way_ms: float | None
    live: int
    round_trip_ms: float
    measured: Measured


@contextmanager
def _serving(pair: Pair, one_way_ms: float | None) -> Iterator[RunningServer]:
    """The pair, with its LLM so far away; None = here."""
    deployment = pair.deployment(_BATCHING)
    with ExitStack() as stack:
        if one_way_ms is not None:
            far = stack.enter_context(far_host(one_way_ms))
            deployment = with_far_models(deployment, far, ["llm"])
            config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "far.yaml"
            stack.enter_context(far_server(deployment, far, config, "llm"))
        yield stack.enter_context(running_server(deployment))


def markdown(rows: list[Row]) -> str:
    """A table: a row for each N, a column for each distance."""
    ways = list(dict.fromkeys(row.one_way_ms for row in rows))
    by = {(row.one_way_ms, row.live): row for row in rows}
    heads = ["one host" if way is None else f"{way:g} ms each way" for way in ways]
    lines = [
        "# The LLM on another host",
        "",
        "Paced pair (6 and 27.9 ms a step, a token in 0.35 is the LLM's), B = 1, N closed-loop clients. Tokens/s with"
        " the standard error; in brackets the share of one host. The other host is a network namespace behind a link"
        " that delays every packet; all processes share this machine's cores.",
        "",
        "| N | " + " | ".join(heads) + " |",
        "|---" * (1 + len(ways)) + "|",
    ]
    for live in dict.fromkeys(row.live for row in rows):
        here = by[ways[0], live].measured.tokens_per_s
        cells = []
        for way in ways:
            got = by[way, live].measured
            share = "" if way is ways[0] else f" ({got.tokens_per_s / here:.1%})"
            cells.append(f"{got.tokens_per_s:.1f} ± {got.error:.1f}{share}")
        lines.append(f"| {live} | " + " | ".join(cells) + " |")
    trips = ", ".join(
        f"{way:g} ms: {max(row.round_trip_ms for row in rows if row.one_way_ms == way):.1f} ms"
        for way in ways
        if way is not None
    )
    return "\n".join([*lines, "", f"The round trip as token_router measures it: {trips}.", ""])


def main(
    live: Annotated[list[int] | None, typer.Option(help="clients at once, one number or several; 1, 4 and 16")] = None,
    one_way_ms: Annotated[list[float] | None, typer.Option(help="delays of the link; 0, 1 and 5")] = None,
    seconds: Annotated[int, typer.Option(min=1, help="of each measurement")] = 10,
    output: Annotated[Path, typer.Option(help="the folder of the results")] = Path("perf/results"),
) -> None:
    """Throughput with the LLM on another host, beside the same pair on one host."""
    console = Console()
    if (reason := why_not()) is not None:
        raise typer.BadParameter(f"no network namespaces here: {reason}")
    began = time.monotonic()
    rows: list[Row] = []
    for way in (None, *(one_way_ms or (0.0, 1.0, 5.0))):
        with _serving(Pair(), way) as server:
            for clients in live or (1, 4, 16):
                measured = measure(server, clients, seconds)
                round_trip_ms = server.control.status().models["llm"]["round_trip_ms"]
                rows.append(Row(one_way_ms=way, live=clients, round_trip_ms=round_trip_ms, measured=measured))
                console.print(f"[dim]{way} ms, N = {clients}: {measured.tokens_per_s:.1f} tokens/s")
    page = markdown(rows)
    console.print(Markdown(page))
    output.mkdir(parents=True, exist_ok=True)
    figures = {"took_s": time.monotonic() - began, "rows": [row.model_dump() for row in rows]}
    (output / "remote.json").write_text(json.dumps(figures, indent=1) + "\n")
    (output / "remote.md").write_text(page)


if __name__ == "__main__":
    typer.run(main)
