# SPDX-License-Identifier: Apache-2.0
"""The command: the paced pair at B* on a real Triton, with the runtime's functions timed from outside."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.markdown import Markdown

from perf.hops.table import calls_of, hops_of, markdown, summary
from perf.hops.traced import FOLDER_VARIABLE
from perf.runtime.cases import NEWER
from perf.runtime.measure import Measured, Pair, measure
from python_backends.token_router.config import Transport
from python_backends.token_router.threshold.solve import solve
from tools.deployment import Deployment
from tools.supervisor import running_server

_PAPER = Pair()
_TRACED = "perf.hops.traced:TRACED"
_TRANSPORTS = get_args(Transport)
_ROOT = Path(__file__).resolve().parents[2]


def _deployment(pair: Pair, live: list[int], transport: Transport) -> Deployment:
    """The pair at B* for each N, its router the one that times."""
    table = {n: list(solve(pair.profile(), n).best) for n in live}
    given = pair.deployment({"threshold": table, "max_wait_ms": 60_000.0}, transport).model_dump(
        mode="json", exclude_unset=True
    )
    given["router"] |= {"name": _TRACED, "path": str(_ROOT)}
    return Deployment.model_validate(given)


def _run(
    pair: Pair, live: list[int], seconds: int, transport: Transport
) -> tuple[list[Any], dict[int, tuple[float, float, Measured]]]:
    """All notes, and for each N from when to when it was measured."""
    spans = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        with running_server(_deployment(pair, live, transport)) as server:
            for n in live:
                began_s = time.monotonic()
                measured = measure(server, n, seconds)
                spans[n] = began_s, time.monotonic(), measured
        files = sorted(Path(folder).glob("*.json"))
        names = {path.stem for path in files}
        if names != {"token_router", "slm", "llm"}:
            raise RuntimeError(f"notes of {sorted(names)} only: Triton did not finalize all models")
        return [note for path in files for note in json.loads(path.read_text())], spans


def _stem(pair: Pair, transport: str) -> str:
    """Of the results' files: what differs from the paper's pair by socket is in their names."""
    steps = [] if pair == _PAPER else ["newer"] if pair == NEWER else [f"{pair.slm_ms:g}-{pair.llm_ms:g}ms"]
    return "-".join(["hops", *steps, *([] if transport == _TRANSPORTS[0] else [transport])])


def main(
    live: Annotated[list[int] | None, typer.Option(min=1, help="clients at once; by default 1, then 8")] = None,
    seconds: Annotated[int, typer.Option(min=1, help="of each measurement")] = 15,
    steps_ms: Annotated[tuple[float, float], typer.Option(help="how long a step of the SLM and of the LLM takes")] = (
        _PAPER.slm_ms,
        _PAPER.llm_ms,
    ),
    transport: Annotated[str, typer.Option(help=f"of the steps: {' or '.join(_TRANSPORTS)}")] = _TRANSPORTS[0],
    output: Annotated[Path, typer.Option(help="the folder of the results")] = Path("perf/results"),
) -> None:
    """Where the time goes between the end of one model's step and the begin of the next."""
    if transport not in _TRANSPORTS:
        raise typer.BadParameter(f"{transport}: there are {' and '.join(_TRANSPORTS)}", param_hint="--transport")
    if not all(0 < ms < math.inf for ms in steps_ms):
        raise typer.BadParameter(f"{steps_ms}: both must be above 0, and finite", param_hint="--steps-ms")
    pair = Pair(slm_ms=steps_ms[0], llm_ms=steps_ms[1])
    console = Console()
    notes, spans = _run(pair, live or [1, 8], seconds, cast(Transport, transport))
    found = {n: summary(hops_of(calls_of(notes, begin, end))) for n, (begin, end, _) in spans.items()}
    page = markdown(found, transport, steps_ms)
    console.print(Markdown(page))
    rates = {n: measured.tokens_per_s for n, (_, _, measured) in spans.items()}
    output.mkdir(parents=True, exist_ok=True)
    stem = _stem(pair, transport)
    figures = {"steps_ms": steps_ms, "tokens_per_s": rates, "hops": found}
    (output / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n")
    (output / f"{stem}.md").write_text(page)
    console.print(f"wrote {output / stem}.json and .md; {rates} tokens/s while timed")


if __name__ == "__main__":
    typer.run(main)
