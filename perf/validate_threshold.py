# SPDX-License-Identifier: Apache-2.0
"""The simulator against the Markov model, over a grid: is T(B) what the runtime's queues and policy then do?

The model computes a stationary distribution; the simulator moves requests one by one through the runtime's own
queue and scheduler. What they share is the profile.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.threshold.forms import Form, me, r2r, rstitch
from python_backends.token_router.threshold.profile import Profile, StepLatency
from python_backends.token_router.threshold.solve import evaluate
from python_backends.token_router.threshold.steady import Steady
from tools.simulator.config import SimulationConfig
from tools.simulator.engine import simulate
from tools.simulator.results import SimulationResult

BAR = 0.01
PAPER = "paper"  # constant latency, geometric runs, devices of their own: the bar holds for it
SESSION_STEPS = 150_000  # of a simulation, or as many more as its standard error then asks for
ERROR = 0.002  # of a simulation, relative
_MOST = 10.0  # times SESSION_STEPS
_STUDENT = 2.0  # half the simulator's interval in standard errors, nearly
console = Console()


@dataclass(frozen=True)
class Case:
    """One point: a profile, N and B. kind: PAPER, or the assumption that it lifts."""

    kind: str
    name: str
    profile: Profile
    live: int
    threshold: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """What both say of a case, tokens/s. error: relative, of the model to the simulator. noise: the simulator's
    relative standard error, the model's when it is sampled added. batch_error, delay_error_ms: the largest of any
    model, of the mean batch (relative) and the mean admission delay."""

    kind: str
    name: str
    live: int
    threshold: tuple[int, ...]
    markov: float
    method: str
    simulated: float
    error: float
    noise: float
    batch_error: float
    delay_error_ms: float
    seconds: float


def profile_of(form: Form, *latency_ms: float, **more: Any) -> Profile:
    """A profile with constant latencies, or what `more` has in their place."""
    names = [f"m{i}" for i in range(len(form.p))]
    latency = [StepLatency.constant(ms) for ms in latency_ms]
    return Profile.model_validate({"models": names, "p": form.p, "c": form.c, "latency": latency} | more)


def paper_cases() -> Iterator[Case]:
    """Both algorithms' forms with two models, and ME with three."""
    for p, slm, llm in ((0.35, 6.0, 27.9), (0.1, 6.0, 27.9), (0.6, 2.0, 12.0), (0.35, 10.0, 10.0)):
        yield from _grid(PAPER, f"r2r p={p} L={slm}/{llm}", profile_of(r2r(p), slm, llm), (1, 2, 3, 4, 8, 16))
    for p, q, slm, llm in ((0.2, 0.3, 6.0, 27.9), (0.5, 0.1, 2.0, 12.0)):
        name = f"rstitch p={p} q={q} L={slm}/{llm}"
        yield from _grid(PAPER, name, profile_of(rstitch(p, q), slm, llm), (2, 4, 16))
    for weights, latency in (((0.5, 0.3, 0.2), (6.0, 12.0, 27.9)), ((1.0, 1.0, 1.0), (5.0, 10.0, 10.0))):
        name = f"me {weights} L={latency}"
        yield from _grid(PAPER, name, profile_of(me(weights), *latency), (1, 2, 4, 8, 16))


def general_cases() -> Iterator[Case]:
    """Each assumption lifted by itself, then all together."""
    lives = (2, 4, 16)
    grows: dict[str, Any] = {
        "latency": [
            StepLatency(batch_ms={1: 6.0, 4: 7.5, 16: 12.0}),
            StepLatency(batch_ms={1: 27.9, 2: 28.5, 8: 36.0, 16: 52.0}),
        ]
    }
    suffix: dict[str, Any] = {
        "latency": [StepLatency(batch_ms={1: 6.0}, token_ms=0.2), StepLatency(batch_ms={1: 27.9}, token_ms=1.5)]
    }
    # Bursts: a request stays for a token or two, or for a dozen. Regular: for seven to nine.
    bursts: dict[str, Any] = {"run_lengths": [[0.5, 0.1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.2, 0.2], None]}
    regular: dict[str, Any] = {"run_lengths": [[0, 0, 0, 0, 0, 0, 0.25, 0.5, 0.25], None]}
    slows: dict[str, Any] = {"slowdown": [[1, 1.8], [1.3, 1]]}
    everything: dict[str, Any] = {
        "latency": [
            StepLatency(batch_ms={1: 6.0, 4: 7.5, 16: 12.0}, token_ms=0.2),
            StepLatency(batch_ms={1: 27.9, 2: 28.5, 8: 36.0, 16: 52.0}, token_ms=1.5),
        ],
        **bursts,
        **slows,
    }
    two = {"r2r p=0.35": r2r(0.35), "rstitch p=0.2 q=0.3": rstitch(0.2, 0.3)}
    for kind, more in (
        ("latency by batch", grows),
        ("suffix cost", suffix),
        ("run lengths, bursts", bursts),
        ("run lengths, regular", regular),
        ("slowdown", slows),
        ("all together", everything),
    ):
        for name, form in two.items():
            yield from _grid(kind, name, profile_of(form, 6.0, 27.9, **more), lives)


def _grid(kind: str, name: str, profile: Profile, lives: Sequence[int]) -> Iterator[Case]:
    """For each N: eager; the last model delayed by half and as long as it goes; every model delayed."""
    models = len(profile.models)
    for live in lives:
        last = {(1,) * (models - 1) + (b,) for b in (1, -(-live // 2), live)}
        every = (1 + (live - 1) // models,) * models
        for threshold in sorted(last | {every}):
            yield Case(kind, name, profile, live, threshold)


def point(case: Case, seed: int, session_steps: int) -> Point:
    """Both of them on one case."""
    began = time.monotonic()
    steady = evaluate(case.profile, case.live, case.threshold, seed=seed)
    result = _simulated(case, steady, seed, session_steps)
    off = _relative_error(result) / ERROR
    if off > 1:
        result = _simulated(case, steady, seed, session_steps * min(_MOST, 1.2 * off**2))
    return Point(
        kind=case.kind,
        name=case.name,
        live=case.live,
        threshold=case.threshold,
        markov=steady.throughput,
        method=steady.method,
        simulated=result.throughput,
        error=steady.throughput / result.throughput - 1,
        noise=math.hypot(_relative_error(result), steady.error / steady.throughput),
        batch_error=max(abs(b / m.mean_batch - 1) for b, m in zip(steady.batch, result.models, strict=True)),
        delay_error_ms=max(abs(d - m.admission_delay_ms) for d, m in zip(steady.delay_ms, result.models, strict=True)),
        seconds=time.monotonic() - began,
    )


def _simulated(case: Case, steady: Steady, seed: int, session_steps: float) -> SimulationResult:
    duration = session_steps / sum(b * s for b, s in zip(steady.batch, steady.steps_s, strict=True))
    return simulate(
        case.profile,
        SimulationConfig(
            concurrency=case.live,
            batching=BatchingConfig(threshold=list(case.threshold)),
            warm_up_s=0.02 * duration,
            duration_s=1.02 * duration,
            seed=seed,
        ),
    )


def _relative_error(result: SimulationResult) -> float:
    return result.half_width / _STUDENT / result.throughput


def summary(points: Sequence[Point]) -> list[dict[str, Any]]:
    """A row for each kind of case."""
    rows = []
    for kind in dict.fromkeys(p.kind for p in points):
        some = [p for p in points if p.kind == kind]
        worst = max(some, key=lambda p: abs(p.error))
        rows.append(
            {
                "kind": kind,
                "points": len(some),
                "worst_error": worst.error,
                "worst_at": f"{worst.name}, N = {worst.live}, B = {','.join(map(str, worst.threshold))}",
                "rms_error": math.sqrt(sum(p.error**2 for p in some) / len(some)),
                "rms_noise": math.sqrt(sum(p.noise**2 for p in some) / len(some)),
                "within_bar": sum(abs(p.error) <= BAR for p in some),
                "worst_batch_error": max(p.batch_error for p in some),
                "worst_delay_error_ms": max(p.delay_error_ms for p in some),
            }
        )
    return rows


_COLUMNS = ("case", "points", "within 1 %", "worst", "at", "rms", "rms of noise", "worst batch", "worst delay, ms")


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["kind"],
        str(row["points"]),
        str(row["within_bar"]),
        f"{row['worst_error']:+.2%}",
        row["worst_at"],
        f"{row['rms_error']:.2%}",
        f"{row['rms_noise']:.2%}",
        f"{row['worst_batch_error']:.2%}",
        f"{row['worst_delay_error_ms']:.2f}",
    ]


def markdown(rows: Sequence[dict[str, Any]], session_steps: int, seconds: float) -> str:
    """The summary as a page."""
    lines = [
        "# The Markov model against the simulator",
        "",
        f"`perf/validate_threshold.py`: {sum(r['points'] for r in rows)} points, {session_steps:,} session steps"
        f" each or more, {seconds:.0f} s. Errors are the model's throughput relative to the simulator's; noise is"
        " the standard error of one comparison. Every point is in `threshold_validation.json`.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
        *("| " + " | ".join(_cells(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main(
    output: Annotated[Path, typer.Option(help="the folder of the results")] = Path("perf/results"),
    seed: Annotated[int, typer.Option(help="of the first point; each has its own")] = 0,
    session_steps: Annotated[int, typer.Option(min=10_000, help="of each simulation, at least")] = SESSION_STEPS,
    kind: Annotated[str | None, typer.Option(help="only the cases of this kind; writes nothing")] = None,
) -> None:
    """Compare both over the grid; the exit status is 1 when the paper's case is off by more than 1 %."""
    began = time.monotonic()
    points = []
    cases = [*paper_cases(), *general_cases()]
    kinds = dict.fromkeys(case.kind for case in cases)
    if kind is None:
        output.mkdir(parents=True, exist_ok=True)
    elif kind not in kinds:
        raise typer.BadParameter(f"{kind}: there are {'; '.join(kinds)}", param_hint="--kind")
    for i, case in enumerate(cases):
        if kind is None or case.kind == kind:
            points.append(point(case, seed + i, session_steps))
            if abs(points[-1].error) > BAR:
                console.print(
                    f"off by {points[-1].error:+.2%}: {case.kind}, {case.name}, {case.live}, {case.threshold}"
                )
    rows, seconds = summary(points), time.monotonic() - began
    table = Table(*_COLUMNS, title=f"Markov model against simulator, {seconds:.0f} s")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    if kind is None:
        data = {
            "session_steps": session_steps,
            "seed": seed,
            "seconds": seconds,
            "summary": rows,
            "points": [asdict(p) for p in points],
        }
        (output / "threshold_validation.json").write_text(json.dumps(data, indent=2) + "\n")
        (output / "threshold_validation.md").write_text(markdown(rows, session_steps, seconds))
    if any(row["kind"] == PAPER and row["within_bar"] < row["points"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
