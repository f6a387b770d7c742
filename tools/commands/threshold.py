# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter threshold`: T(B), the Markov model's throughput by threshold, with the best B marked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from python_backends.token_router.threshold.exact import TooLarge
from python_backends.token_router.threshold.profile import Profile, StepLatency
from python_backends.token_router.threshold.solve import Choice, Estimate, Solution, solve
from tools.commands.profile_options import ProfileOptions
from tools.config_errors import explain
from tools.errors import UserError

__all__ = ["ThresholdOptions", "given_profile", "threshold"]

_ROWS = 12  # of the table, when there are many B; --json has all
_MOST_LIVE = 1024


@dataclass(frozen=True)
class ThresholdOptions:
    """The command's options besides the profile's; concurrency: the numbers of live requests to solve for."""

    concurrency: Sequence[int] = (4,)
    delta_ms: float = 0.1
    method: str = "auto"
    seed: int = 0


def given_profile(options: ProfileOptions, matrix_p: str | None, matrix_c: str | None) -> Profile:
    """The profile from P and C as JSON and a step time for each model, or else from the options that `simulate`
    takes too. Raises UserError when they are no profile."""
    if matrix_p is None and matrix_c is None:
        return options.profile()
    if matrix_p is None or matrix_c is None:
        missing = "--matrix-p" if matrix_p is None else "--matrix-c"
        raise UserError(f"{missing}: not given; --matrix-p and --matrix-c go together")
    if replace(options, latency_ms=None) != ProfileOptions():
        raise UserError("--matrix-p: given beside a profile's file, an algorithm or its rates; allowed: one of them")
    return _matrix_profile(matrix_p, matrix_c, options.latency_ms or [])


def _matrix_profile(p: str, c: str, latency_ms: Sequence[float]) -> Profile:
    data: dict[str, Any] = {"p": _matrix("--matrix-p", p), "c": _matrix("--matrix-c", c)}
    models = len(data["p"])
    if len(latency_ms) != models or any(not 0 < ms < float("inf") for ms in latency_ms):
        raise UserError(
            f"--latency-ms: got {list(latency_ms)}; must be {models} numbers above 0, one for each row of --matrix-p"
        )
    data["models"] = [f"model{i}" for i in range(models)]
    data["latency"] = [StepLatency.constant(ms) for ms in latency_ms]
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        # The profile's own check of a whole has no path, only a message that begins with the field.
        lines = [line.removeprefix("the file: ") for line in explain(error, Profile, data)]
        raise UserError([f"--matrix-{line}" if line.startswith(("p", "c")) else line for line in lines]) from error


def _matrix(flag: str, text: str) -> list[list[float]]:
    try:
        rows = json.loads(text)
    except ValueError:
        rows = None
    numbers = isinstance(rows, list) and all(
        isinstance(row, list) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in row)
        for row in rows
    )
    if not numbers or not rows:
        raise UserError(f"{flag}: got {text!r}; must be a JSON list of rows of numbers, such as [[0.65, 0.35], [1, 0]]")
    return cast(list[list[float]], rows)


def threshold(profile: Profile, options: ThresholdOptions, *, as_json: bool = False, plot: Path | None = None) -> None:
    """Solve for each number of live requests and print. Raises UserError when an option is no good."""
    _check(options)
    method = cast(Choice, options.method)
    solutions: list[Solution] = []
    for live in options.concurrency:
        try:
            solutions.append(solve(profile, live, delta_ms=options.delta_ms, method=method, seed=options.seed))
        except TooLarge as error:
            raise UserError(f"--method: exact at --concurrency {live}: {error}; allowed: auto, sampled") from error
    if plot is not None:
        _plot(plot, profile, solutions)
    if as_json:
        # One N: its object. Several: an object of them, by N.
        objects = {str(s.live): _json(s) for s in solutions}
        print(json.dumps(objects if len(solutions) > 1 else objects[str(solutions[0].live)]))
        return
    console = Console(highlight=False)
    for solution in solutions:
        _print(console, profile, solution)


def _check(options: ThresholdOptions) -> None:
    for live in options.concurrency:
        if not 1 <= live <= _MOST_LIVE:
            raise UserError(f"--concurrency: got {live}; allowed: 1 to {_MOST_LIVE}")
    if len(set(options.concurrency)) < len(options.concurrency):
        raise UserError(f"--concurrency: got {list(options.concurrency)}; must be different numbers")
    if not 0 < options.delta_ms < float("inf"):
        raise UserError(f"--delta-ms: got {options.delta_ms}; must be above 0")
    if options.method not in get_args(Choice):
        raise UserError(f"--method: got {options.method!r}; allowed: {', '.join(get_args(Choice))}")
    if options.seed < 0:
        raise UserError(f"--seed: got {options.seed}; must be 0 or more")


def _name(b: Sequence[int]) -> str:
    return ",".join(map(str, b))


def _json(solution: Solution) -> dict[str, Any]:
    steady = solution.steady
    estimates = {_name(b): e for b, e in solution.throughput.items()}
    return {
        "concurrency": solution.live,
        "best": list(solution.best),
        "throughput": {b: e.throughput for b, e in estimates.items()},
        "error": {b: e.error for b, e in estimates.items()},
        "method": {b: e.method for b, e in estimates.items()},
        "steady": {
            "throughput": steady.throughput,
            "error": steady.error,
            "mean_batch": list(steady.batch),
            "admission_delay_ms": list(steady.delay_ms),
            "utilisation": list(steady.utilisation),
            "steps_per_s": list(steady.steps_s),
            "method": steady.method,
            "states": steady.states,
            "delta_ms": steady.delta_ms,
            "phase_distance": steady.phase_distance,
        },
    }


def _print(console: Console, profile: Profile, solution: Solution) -> None:
    steady = solution.steady
    table = Table("B", "", title=f"N = {solution.live}", title_justify="left")
    for column in ("tokens/s", "against B = 1", "method"):
        table.add_column(column, justify="right")
    eager = solution.throughput.get((1,) * len(profile.models))
    shown = _shown(solution)
    for b in shown:
        estimate = solution.throughput[b]
        table.add_row(
            _name(b),
            "*" if b == solution.best else "",
            _rate(estimate),
            "-" if eager is None else f"{100 * (estimate.throughput / eager.throughput - 1):+.1f} %",
            estimate.method,
            style="bold" if b == solution.best else None,
        )
    console.print(table)
    if hidden := len(solution.throughput) - len(shown):
        console.print(f"and {hidden} lower ones (--json has all)")
    way = f"{steady.states} {'states' if steady.method == 'exact' else 'transitions'}, {steady.method}"
    console.print(f"* best: B = {_name(solution.best)}, {_rate(solution.throughput[solution.best])} tokens/s ({way})")
    for i, name in enumerate(profile.models):
        console.print(
            f"  {name}: {steady.batch[i]:.2f} requests a batch, waits {steady.delay_ms[i]:.1f} ms for it,"
            f" busy {steady.utilisation[i]:.0%}",
            markup=False,
        )
    if steady.phase_distance > 0:
        console.print(f"  run lengths fitted by phases to a total variation of {steady.phase_distance:.2g}")


def _shown(solution: Solution) -> list[tuple[int, ...]]:
    """All B, or the highest ones and B = 1."""
    every = list(solution.throughput)
    if len(every) <= _ROWS:
        return every
    top = sorted(every, key=lambda b: (b != solution.best, -solution.throughput[b].throughput))[:_ROWS]
    return sorted({*top, min(every)})


def _rate(estimate: Estimate) -> str:
    error = f" ± {estimate.error:.1f}" if estimate.method == "sampled" else ""
    return f"{estimate.throughput:.1f}{error}"


def _plot(path: Path, profile: Profile, solutions: Sequence[Solution]) -> None:
    """A line for each N: the best T by the last model's B, over the other models'; B* is marked."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--plot: needs matplotlib, which isn't installed (pip install 'tokenrouter[perf]')") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for solution in solutions:
        best_by_last: dict[int, Estimate] = {}
        for b, estimate in solution.throughput.items():
            if b[-1] not in best_by_last or estimate.throughput > best_by_last[b[-1]].throughput:
                best_by_last[b[-1]] = estimate
        at = sorted(best_by_last)
        rates, errors = ([getattr(best_by_last[b], name) for b in at] for name in ("throughput", "error"))
        (line, *_) = axes.errorbar(at, rates, yerr=errors, marker=".", label=f"N = {solution.live}")
        axes.plot(solution.best[-1], solution.steady.throughput, marker="*", markersize=14, color=line.get_color())
    axes.set_xlabel(f"B of {profile.models[-1]}, with the best B of the others; star: B*")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_title(" + ".join(profile.models))
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot: {path}: can't be written: {error}") from error
