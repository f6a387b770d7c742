# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter threshold`: T(B), the Markov model's throughput by threshold, with the best B marked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.table import Table

from python_backends.token_router.threshold.exact import TooLarge
from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.solve import Choice, Estimate, Solution, solve
from python_backends.token_router.threshold.steady import Steady
from tools.commands.options import ThresholdOptions
from tools.commands.outputs import check_plot, new_figure, save_figure
from tools.errors import UserError

__all__ = ["MOST_LIVE", "coarse_grid", "threshold"]

MOST_LIVE = 1024
_ROWS = 12  # of the table, when there are many B; --json has all
_LEAST_DELTA_MS = 1e-6  # a nanosecond, the simulator's grid
_MOST_ROUNDING = 0.01  # of a step time; more is said


def threshold(profile: Profile, options: ThresholdOptions, *, as_json: bool = False, plot: Path | None = None) -> None:
    """Solve for each number of live requests and print. Raises UserError when an option is no good."""
    _check(profile, options)
    if plot is not None:
        check_plot(plot)
    method = cast(Choice, options.method)
    solutions: list[Solution] = []
    for live in options.concurrency:
        try:
            solutions.append(solve(profile, live, delta_ms=options.delta_ms, method=method, seed=options.seed))
        except TooLarge as error:
            raise UserError(f"--method: exact at --concurrency {live}: {error}; allowed: auto, sampled") from error
        except ValueError as error:
            raise UserError(str(error)) from error
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


def _check(profile: Profile, options: ThresholdOptions) -> None:
    for live in options.concurrency:
        if not 1 <= live <= MOST_LIVE:
            raise UserError(f"--concurrency: got {live}; allowed: 1 to {MOST_LIVE}")
    if len(set(options.concurrency)) < len(options.concurrency):
        raise UserError(f"--concurrency: got {list(options.concurrency)}; must be different numbers")
    shortest = min(min(latency.batch_ms.values()) for latency in profile.latency)
    delta_ms = options.delta_ms
    if delta_ms is not None and not _LEAST_DELTA_MS <= delta_ms <= max(shortest, _LEAST_DELTA_MS):
        raise UserError(
            f"--delta-ms: got {delta_ms:g}; must be from {_LEAST_DELTA_MS:g} to the shortest step, {shortest:g}"
        )
    if options.method not in get_args(Choice):
        raise UserError(f"--method: got {options.method!r}; allowed: {', '.join(get_args(Choice))}")
    if options.seed < 0:
        raise UserError(f"--seed: got {options.seed}; must be 0 or more")


def coarse_grid(steady: Steady) -> str | None:
    """What the grid does to step times, where that is so much that T(B) may be wrong by as much."""
    if steady.rounding <= _MOST_ROUNDING:
        return None
    return (
        f"the grid of {steady.delta_ms:g} ms changes a step time by up to {steady.rounding:.1%}: T(B) may be as far off"
    )


def _name(b: Sequence[int]) -> str:
    return ",".join(map(str, b))


def _json(solution: Solution) -> dict[str, Any]:
    steady = solution.steady
    estimates = {_name(b): e for b, e in solution.throughput.items()}
    return {
        "concurrency": solution.live,
        "warning": coarse_grid(steady),
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
            "rounding": steady.rounding,
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
            "-" if not (eager and eager.throughput) else f"{100 * (estimate.throughput / eager.throughput - 1):+.1f} %",
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
    if warning := coarse_grid(steady):
        console.print(f"  {warning}", soft_wrap=True)
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
    figure = new_figure(7, 4.5)
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
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # room for the stars
    axes.set_title(" + ".join(profile.models))
    axes.legend()
    save_figure(figure, path)
