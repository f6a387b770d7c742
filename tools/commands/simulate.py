# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter simulate`: what each scheduling policy makes of a profile, beside what the Markov model says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.threshold.network import check_thresholds
from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.solve import evaluate, solve
from python_backends.token_router.threshold.steady import Steady
from tools.commands.options import SimulateOptions
from tools.commands.outputs import check_plot, check_writable, new_figure, save_figure
from tools.commands.threshold import MOST_LIVE, coarse_grid
from tools.config_errors import explain
from tools.errors import UserError
from tools.simulator.config import SimulationConfig
from tools.simulator.engine import Simulation
from tools.simulator.results import SimulationResult
from tools.simulator.trace import ChromeTrace

__all__ = ["POLICIES", "simulate"]

POLICIES = ("all", "async", "step_sync", "model_sync")
_TRACE_S = 5.0  # simulated; enough to look at, small enough to open
_WARM_UP = 0.05  # of the run
_FLAGS = {
    "concurrency": "--concurrency",
    "rate_per_s": "--rate",
    "max_live": "--max-live",
    "max_wait_ms": "--max-wait-ms",
    "lengths.mean": "--tokens",
    "prompt_tokens": "--prompt-tokens",
    "duration_s": "--duration",
}


@dataclass(frozen=True)
class _Row:
    """One run. markov: what the Markov model says of it, None where it doesn't cover it."""

    name: str
    threshold: tuple[int, ...] | None
    result: SimulationResult
    markov: Steady | None

    @property
    def predicted(self) -> float | None:
        """T(B), tokens/s."""
        return None if self.markov is None else self.markov.throughput

    def json(self) -> dict[str, Any]:
        result = self.result
        return {
            "policy": self.name,
            "threshold": self.threshold,
            "throughput": result.throughput,
            "half_width_95": result.half_width,
            "markov": self.predicted,
            "request_speed": result.request_speed,
            "latency_s": None if math.isnan(result.latency_s) else result.latency_s,
            "finished": result.finished,
            "waiting": result.waiting,
            "simulated_s": result.simulated_s,
            "session_steps": result.session_steps,
            "events": result.events,
            "models": {
                m.name: {
                    "mean_batch": m.mean_batch,
                    "admission_delay_ms": m.admission_delay_ms,
                    "utilisation": m.utilisation,
                    "steps": m.steps,
                }
                for m in result.models
            },
        }


def simulate(
    profile: Profile, options: SimulateOptions, *, as_json: bool = False, trace: Path | None, plot: Path | None
) -> None:
    """Run each policy and print a table of them. Raises UserError when an option is no good."""
    _check(options)
    config = _config(options)
    if trace is not None:
        check_writable("--trace", trace)
    if plot is not None:
        check_plot(plot)
    console = Console(highlight=False)
    rows: list[_Row] = []
    runs = _runs(profile, options)
    for i, (name, threshold, batching) in enumerate(runs):
        simulation = Simulation(profile, config.model_copy(update={"batching": batching}))
        chrome = None
        if trace is not None and i == len(runs) - 1:
            start = _WARM_UP * options.duration
            chrome = ChromeTrace(simulation, start, min(start + _TRACE_S, options.duration))
            simulation.observe(chrome)
        result = simulation.run()
        rows.append(_Row(name, threshold, result, _markov(profile, options, threshold)))
        if trace is not None and chrome is not None:
            try:
                chrome.write(trace)
            except OSError as error:
                raise UserError(f"--trace: {trace}: can't be written: {error.strerror}") from error
    if plot is not None:
        _plot(plot, profile, options, rows)
    notes = _notes(profile, options, rows)
    if as_json:
        runs_json = [row.json() for row in rows]
        print(json.dumps({"models": profile.models, "load": _load(options), "notes": notes, "runs": runs_json}))
        return
    console.print(_table(profile, options, rows))
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    if trace is not None:
        console.print(f"trace of {rows[-1].name}: {trace} (open it in https://ui.perfetto.dev)", markup=False)


def _notes(profile: Profile, options: SimulateOptions, rows: Sequence[_Row]) -> list[str]:
    """What one has to know of the numbers."""
    free = [name for name, latency in zip(profile.models, profile.latency, strict=True) if not latency.token_ms]
    notes = []
    if free and (options.prompt_tokens or not options.resume):
        have = "has" if len(free) == 1 else "have"
        notes.append(f"{' and '.join(free)} {have} no token_ms: there prefill, of prompts and without resume, is free")
    coarse = [note for row in rows if row.markov is not None and (note := coarse_grid(row.markov))]
    return notes + coarse[:1]  # the grid is the same for all


def _check(options: SimulateOptions) -> None:
    """What options say of each other."""
    if options.policy not in POLICIES:
        raise UserError(f"--policy: got {options.policy!r}; allowed: {', '.join(POLICIES)}")
    if options.threshold and options.policy not in ("all", "async"):
        raise UserError(f"--threshold: has no meaning with --policy {options.policy}; allowed with async and all")
    if options.max_wait_ms is not None and options.policy not in ("all", "async"):
        raise UserError(f"--max-wait-ms: has no meaning with --policy {options.policy}; allowed with async and all")
    if options.concurrency is not None and options.rate is not None:
        raise UserError(
            f"--rate: {options.rate} given beside --concurrency {options.concurrency}; allowed: one of them"
        )
    if options.rate is not None and options.tokens is None:
        raise UserError("--tokens: not given; requests that arrive at a --rate must end, so 1 or more")


def _runs(profile: Profile, options: SimulateOptions) -> list[tuple[str, tuple[int, ...] | None, BatchingConfig]]:
    """Name, B and batching of each run."""
    ones = (1,) * len(profile.models)
    thresholds = _thresholds(profile, options)
    chosen: list[tuple[str, str, tuple[int, ...] | None]] = []
    if options.policy in ("all", "step_sync"):
        chosen.append(("step-sync", "step_sync", None))
    if options.policy in ("all", "model_sync"):
        chosen.append(("model-sync", "model_sync", None))
    if options.policy == "all" or thresholds == ones:
        chosen.append(("eager", "async", ones))
    if options.policy in ("all", "async") and thresholds != ones:
        chosen.append(("delayed", "async", thresholds))
    return [(name, b, _batching(policy, b, options.resume)) for name, policy, b in chosen]


def _batching(policy: str, threshold: tuple[int, ...] | None, resume: bool) -> BatchingConfig:
    given: dict[str, Any] = {"policy": policy, "resume": resume}
    return BatchingConfig.model_validate(given if threshold is None else given | {"threshold": list(threshold)})


def _thresholds(profile: Profile, options: SimulateOptions) -> tuple[int, ...]:
    """B as given, or the best for a closed loop; without either, 1."""
    models = len(profile.models)
    given = tuple(options.threshold)
    live = _live(options)
    if given:
        if len(given) != models or min(given) < 1:
            raise UserError(
                f"--threshold: got {list(given)}; must be {models} numbers of 1 or more, one for each model"
            )
        if live is not None:
            try:
                check_thresholds(given, models, live)
            except ValueError as error:
                raise UserError(f"--threshold: {str(error).removeprefix('thresholds: ')}") from error
        return given
    if live is None or options.policy not in ("all", "async"):
        return (1,) * models
    if live > MOST_LIVE:
        raise UserError(
            f"--concurrency: got {options.concurrency}; the Markov model's best B is known for 1 to {MOST_LIVE} live"
            " requests, beyond it give --threshold"
        )
    try:
        return solve(profile, live).best
    except ValueError as error:
        raise UserError(f"{error}; give --threshold") from error


def _live(options: SimulateOptions) -> int | None:
    """N, where it is constant."""
    if options.concurrency is None:
        return None
    return min(options.concurrency, options.max_live or options.concurrency)


def _markov(profile: Profile, options: SimulateOptions, threshold: tuple[int, ...] | None) -> Steady | None:
    """The steady state of N requests that never end; prefill, the cap on a wait and barriers are not in the model."""
    live = _live(options)
    if threshold is None or live is None or options.max_wait_ms is not None or options.tokens is not None:
        return None
    if options.prompt_tokens or not options.resume:
        return None
    try:
        return evaluate(profile, live, threshold) if live <= MOST_LIVE else None
    except ValueError:  # it has no such grid, or not so many models
        return None


def _config(options: SimulateOptions) -> SimulationConfig:
    """All of it but the batching, in which the runs differ. Raises UserError."""
    given: dict[str, Any] = {
        "concurrency": options.concurrency,
        "rate_per_s": options.rate,
        "max_live": options.max_live,
        "max_wait_ms": options.max_wait_ms,
        "prompt_tokens": options.prompt_tokens,
        "duration_s": options.duration,
        "warm_up_s": _WARM_UP * options.duration if 0 < options.duration < math.inf else 0.0,
        "seed": options.seed,
    }
    if options.tokens is not None:
        given["lengths"] = {"kind": "geometric", "mean": options.tokens}
    try:
        return SimulationConfig.model_validate(given)
    except ValidationError as error:
        lines = [line.removeprefix("the file: ") for line in explain(error, SimulationConfig, given)]
        raise UserError([_with_flag(line) for line in lines]) from error


def _with_flag(line: str) -> str:
    path, colon, rest = line.partition(":")
    return f"{_FLAGS.get(path, path)}{colon}{rest}"


def _load(options: SimulateOptions) -> dict[str, Any]:
    return {
        "concurrency": options.concurrency,
        "rate_per_s": options.rate,
        "max_live": options.max_live,
        "tokens": options.tokens,
        "prompt_tokens": options.prompt_tokens,
        "resume": options.resume,
        "max_wait_ms": options.max_wait_ms,
        "duration_s": options.duration,
        "seed": options.seed,
    }


def _title(options: SimulateOptions) -> str:
    load = f"N = {options.concurrency}" if options.rate is None else f"{options.rate:g} requests/s"
    return f"{load}, {options.duration:g} s simulated"


def _table(profile: Profile, options: SimulateOptions, rows: Sequence[_Row]) -> Table:
    table = Table(title=_title(options), title_justify="left")
    for column in ("policy", "B", "tokens/s", "Markov", "each", "model", "batch", "wait ms", "busy"):
        table.add_column(column, justify="left" if column in ("policy", "B", "model") else "right")
    for row in rows:
        result, markov = row.result, row.predicted
        table.add_row(
            row.name,
            "-" if row.threshold is None else ",".join(map(str, row.threshold)),
            f"{result.throughput:.1f}\n± {result.half_width:.1f}",
            "-" if not markov else f"{markov:.1f}\n{100 * (result.throughput / markov - 1):+.1f} %",
            f"{result.request_speed:.1f}",
            "\n".join(profile.models),
            "\n".join(f"{m.mean_batch:.2f}" for m in result.models),
            "\n".join(f"{m.admission_delay_ms:.1f}" for m in result.models),
            "\n".join(f"{m.utilisation:.0%}" for m in result.models),
            end_section=True,
        )
    return table


def _plot(path: Path, profile: Profile, options: SimulateOptions, rows: Sequence[_Row]) -> None:
    """A bar for each run with its confidence interval, and a mark where the Markov model puts it."""
    figure = new_figure(7, 1.6 + 0.5 * len(rows))
    axes = figure.add_subplot()
    names = [r.name if r.threshold is None else f"{r.name}, B = {','.join(map(str, r.threshold))}" for r in rows]
    axes.barh(names, [r.result.throughput for r in rows], xerr=[r.result.half_width for r in rows], color="#76b900")
    known = [(name, r.predicted) for name, r in zip(names, rows, strict=True) if r.predicted is not None]
    axes.plot([t for _, t in known], [n for n, _ in known], "k|", markersize=18, label="Markov model T(B)")
    if known:
        figure.legend(loc="outside lower right")
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s")
    axes.set_title(f"{' + '.join(profile.models)}: {_title(options)}")
    save_figure(figure, path)
