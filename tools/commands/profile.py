# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter profile`: what a deployment's traffic is and how long its steps take, measured, as a `Profile`.

For each number of requests N of a sweep, the last model waits for all N before it steps (B = N), so that batches are as
large as they get and the models take turns, each alone on the device. Between them come points with B = 1, where models
step side by side: what a step then takes longer is the slowdown. A server that runs already is measured with
the B that it has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.threshold.network import fit_phases
from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.routing_rates import length_distribution
from tools.client import GenerationError
from tools.commands.options import MeasureOptions
from tools.commands.outputs import check_writable
from tools.commands.profile_load import PROMPTS, ClosedLoop, Requests
from tools.control import ControlClient, ControlError
from tools.deployment import Deployment, load_deployment
from tools.errors import UserError
from tools.own_server import own_server_of
from tools.running import find_server

__all__ = ["for_measuring", "profile", "sweep", "whole"]

_SETTLE_S = 0.5  # at the begin of a point, not counted
_POLL_S = 0.1
_PATIENCE_MS = 60_000.0  # a model that gathers requests waits for them, however long they take
_MOST_BY_DEFAULT = 16


@dataclass(frozen=True)
class _Point:
    """N requests at once. gathers: whether the last model waits for all of them; else B = 1."""

    live: int
    gathers: bool


def profile(config: str | None, output: Path, options: MeasureOptions) -> None:
    """Measure and write `output`. Raises UserError when there is nothing to measure, or no place to write it."""
    _check(options, output)
    deployment = load_deployment(config)
    points = sweep(options.concurrency, deployment.limits.max_live)
    requests = Requests.of(deployment.router, _prompts(deployment, options), options.max_tokens, options.seed)
    console = Console(highlight=False)
    try:
        with _serving(deployment, points, options, console) as (control, grpc_url):
            measured = _measure(
                control, grpc_url, points, requests, options.seconds, console, own_b=options.server is not None
            )
    except GenerationError as error:
        raise UserError(error.told()) from error
    except ControlError as error:
        raise UserError(str(error)) from error
    found = whole(measured, deployment, options, points)
    try:
        output.write_text(found.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: can't be written: {error.strerror}") from error
    _print(found, console)
    console.print(f"wrote {output}; next: tokenrouter threshold {output}", markup=False, soft_wrap=True)


def sweep(concurrency: Sequence[int] | None, max_live: int) -> list[_Point]:
    """The points to measure. Raises UserError when one has more requests than are admitted."""
    if concurrency is None:
        most = min(max_live, _MOST_BY_DEFAULT)
        gathering = [1 << n for n in range(most.bit_length())]
        gathering += [most] if most not in gathering else []
    else:
        gathering = sorted(set(concurrency))
        if any(not 1 <= n <= max_live for n in gathering):
            raise UserError(f"--concurrency: got {gathering}; must be 1 to limits.max_live = {max_live}")
    between = {(a + b) // 2 for a, b in pairwise(gathering)} | {gathering[-1] + 1}
    eager = {n for n in between if 1 < n <= max_live and n not in gathering}
    return [_Point(n, n in gathering) for n in sorted({*gathering, *eager})]


def _check(options: MeasureOptions, output: Path) -> None:
    if not 1 <= options.seconds <= 3600:
        raise UserError(f"--seconds: got {options.seconds:g}; must be 1 to 3600")
    if options.max_tokens < 1:
        raise UserError(f"--max-tokens: got {options.max_tokens}; must be 1 or more")
    if output.exists():
        try:
            Profile.model_validate_json(output.read_bytes())
        except (OSError, ValidationError):
            raise UserError(f"--output: {output} is there, and is no profile: it isn't overwritten") from None
    check_writable("--output", output)


def _prompts(deployment: Deployment, options: MeasureOptions) -> Sequence[str] | None:
    if options.prompts is None:
        return None if deployment.tokenizer is None else PROMPTS
    if deployment.tokenizer is None:
        raise UserError("--prompts: the deployment has no tokenizer, it takes token ids only")
    try:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts: {options.prompts}: can't be read: {error}") from error
    if not (prompts := [line for line in lines if line.strip()]):
        raise UserError(f"--prompts: {options.prompts}: has no prompt")
    return prompts


@contextmanager
def _serving(
    deployment: Deployment, points: Sequence[_Point], options: MeasureOptions, console: Console
) -> Iterator[tuple[ControlClient, str]]:
    """The server to measure: the way to its token_router, and its gRPC address."""
    if options.server is not None:
        found = find_server(options.server)
        there = found.control.status().models
        if set(there) != set(deployment.model_names):
            raise UserError(
                f"--server: it serves {', '.join(there)}, but the deployment has {', '.join(deployment.model_names)};"
                " give the deployment that it was started with"
            )
        yield found.control, found.grpc_url
        return
    with own_server_of(for_measuring(deployment, points), console) as server:
        yield server.control, server.grpc_url


def for_measuring(deployment: Deployment, points: Sequence[_Point]) -> Deployment:
    """With the B of every point, and nothing that blurs what a step takes."""
    models = len(deployment.models)
    table = {p.live: [1] * (models - 1) + [p.live if p.gathers else 1] for p in points}
    table |= {n + 1: [1] * models for n in table if n + 1 not in table}  # an entry reaches to the next one
    batching = BatchingConfig(threshold=table, max_wait_ms=_PATIENCE_MS, llm_prefill=deployment.batching.llm_prefill)
    return deployment.model_copy(update={"batching": batching})


def _measure(
    control: ControlClient,
    grpc_url: str,
    points: Sequence[_Point],
    requests: Requests,
    seconds: float,
    console: Console,
    own_b: bool = False,
) -> dict[str, Any]:
    """What the server has measured under the load (`Runtime.measured`), the counts only those of the load.

    own_b: the server keeps the B that it has, instead of those of the points.
    """
    before = control.traffic()["counts"]
    bar = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*bar, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(points) * (seconds + _SETTLE_S))
        for point in points:
            progress.update(task, description=_described(point, own_b))
            with ClosedLoop(grpc_url, point.live, requests) as load:
                ends = time.monotonic() + seconds + _SETTLE_S
                while (left := ends - time.monotonic()) > 0:
                    time.sleep(min(_POLL_S, left))
                    load.check()
                    progress.advance(task, _POLL_S)
    measured = control.traffic()
    counts = {
        name: _less(measured["counts"][name], before[name]) for name in ("outcomes", "tokens", "steps", "sessions")
    }
    return {**measured, "counts": counts}


def _described(point: _Point, own_b: bool) -> str:
    """What happens at a point, for the progress bar. own_b: by the B that the server has."""
    many = "1 request" if point.live == 1 else f"{point.live} requests"
    how = "with the server's own B" if own_b else "in turns" if point.gathers else "side by side"
    return f"{many:>12}, {how}"


def _less(now: Any, before: Any) -> Any:
    if isinstance(now, list):
        return [_less(a, b) for a, b in zip(now, before, strict=True)]
    return now - before


def whole(
    measured: Mapping[str, Any], deployment: Deployment, options: MeasureOptions, points: Sequence[_Point]
) -> Profile:
    """P and C from all outcomes of the load, the rest as the server has estimated it."""
    counts, names = measured["counts"], deployment.model_names
    outcomes, tokens = counts["outcomes"], counts["tokens"]
    if measured["profile"] is None or not all(sum(row) for row in outcomes):
        seen = ", ".join(f"{name} {sum(row)}" for name, row in zip(names, outcomes, strict=True))
        raise UserError(f"too little traffic to say anything (steps: {seen}): raise --seconds, or let the router route")
    p = [[n / sum(row) for n in row] for row in outcomes]
    c = [[made / n if n else 0.0 for made, n in zip(*rows, strict=True)] for rows in zip(tokens, outcomes, strict=True)]
    source = {
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "router": deployment.router.name,
        "router_params": deployment.router.params,
        "concurrency": [point.live for point in points],
        "seconds": options.seconds,
        "outcomes": outcomes,
        "steps": counts["steps"],
        "mean_batch": [s / n if n else 0.0 for s, n in zip(counts["sessions"], counts["steps"], strict=True)],
    }
    lengths = measured["profile"]["run_lengths"] or [None] * len(p)
    lengths = [_with_mean_of(row[i], runs) for i, (row, runs) in enumerate(zip(p, lengths, strict=True))]
    changed = {"p": p, "c": c, "run_lengths": lengths, "source": json.loads(json.dumps(source))}
    return Profile.model_validate({**measured["profile"], **changed})


def _with_mean_of(stays: float, runs: list[float] | None) -> list[float] | None:
    """The server's distribution, which is that of the last runs, with the mean that all outcomes give."""
    if runs is None or stays == 1:
        return None
    return length_distribution(fit_phases(runs).hazards[:-1], 1 / (1 - stays))


def _print(found: Profile, console: Console) -> None:
    table = Table("model", *(f"to {name}" for name in found.models), "L(1)", "L(most)", "a token more", "runs")
    for i, name in enumerate(found.models):
        latency, lengths = found.latency[i], (found.run_lengths or [None] * len(found.models))[i]
        most = max(latency.batch_ms)
        table.add_row(
            name,
            *(f"{x:.3f}" for x in found.p[i]),
            f"{latency.ms(1):.2f} ms",
            f"{latency.ms(most):.2f} ms at {most}",
            f"{latency.token_ms:.3f} ms",
            "geometric" if lengths is None else f"{sum(n * x for n, x in enumerate(lengths, 1)):.1f} steps",
        )
    console.print(table)
    for i, row in enumerate(found.slowdown or []):
        for j, factor in enumerate(row):
            if factor > 1:
                console.print(f"{found.models[i]} takes {factor:.2f} times as long while {found.models[j]} is busy")
