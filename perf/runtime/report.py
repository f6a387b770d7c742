# SPDX-License-Identifier: Apache-2.0
"""The benchmark's rows as Markdown tables and as pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from perf.runtime.cases import Row
from perf.runtime.findings import against, best_thresholds, follows_p
from tools.deployment import ROUTER

__all__ = ["TITLES", "markdown", "plots"]

TITLES = {
    "shares": "Share of the Markov model's T(B*), steps of 6.0 and 27.9 ms, p = 0.35",
    "ablation": "Ablation, the same steps, prefill charged (0.01 and 0.2 ms a token), answers of 300 tokens",
    "moving": "p = 0.1, 0.5, 0.1 in turn, N = 4",
    "constants": "p = 0.1, 0.5, 0.1 in turn, N = 4, every constant B",
    "newer": "Steps of 2 and 12 ms, p = 0.35",
    "many": "Many requests at once",
}
_ONE_RUN = (
    "Each setting is one run with one seed: what another draw of the routes would change is in the errors only as far"
    " as it shows within the phases."
)
_NOTES = {
    "moving": _ONE_RUN,
    "constants": _ONE_RUN,
    "ablation": "no resume runs as eager does, with B = 1. What a prefill costs is assumed; how much no resume loses"
    " follows from it. step-sync and model-sync never send a call ahead, which costs them about 1 ms a step: what the"
    " policy itself does is the difference from eager without that.",
    "many": "All processes share the machine's cores, so that the rows say which of them, and which threads of"
    " token_router, use how much of these.",
}
_FINDINGS: Mapping[str, Callable[[Sequence[Row]], list[str]]] = {
    "shares": best_thresholds,
    "moving": follows_p,
    "constants": follows_p,
}
_THREADS = 3  # of token_router, shown


def markdown(results: Mapping[str, Sequence[Row]]) -> str:
    """A table for each case that was run, and what it says."""
    parts = [
        "# The runtime on a real Triton, paced models",
        "",
        "Errors are standard errors, from the spread of the seconds, larger where successive ones are alike"
        " (perf/runtime/errors.py); of less than about 20 s they are too small. A difference is of the tokens in the"
        " same seconds of two settings, which drew the same routes.",
        "",
    ]
    for case, rows in results.items():
        parts += [f"## {TITLES[case]}", "", *([_NOTES[case], ""] if case in _NOTES else []), *_table(case, rows), ""]
        if case in _FINDINGS:
            parts += [*(f"- {line}" for line in _FINDINGS[case](rows)), ""]
    return "\n".join(parts)


def _table(case: str, rows: Sequence[Row]) -> list[str]:
    columns: dict[str, list[str]] = {"N": [str(r.live) for r in rows], "setting": [r.name for r in rows]}
    if any(r.threshold for r in rows):
        columns["B"] = [",".join(map(str, r.threshold)) if r.threshold else "" for r in rows]
    columns["tokens/s"] = [f"{r.measured.tokens_per_s:.1f} ± {r.measured.error:.1f}" for r in rows]
    if any(r.against for r in rows):
        apart = [against(r, rows) for r in rows]
        columns["difference"] = [
            f"{d} from {r.against}" if d is not None else "" for r, d in zip(rows, apart, strict=True)
        ]
    if any(len(r.measured.phases) > 1 for r in rows):
        columns["by phase"] = [", ".join(f"{x:.1f}" for x in r.measured.phases) for r in rows]
    if any(r.predicted for r in rows):
        columns["T(B)"] = [_number(r.predicted) for r in rows]
    if any(r.theory for r in rows):
        columns["T(B*)"] = [_number(r.theory) for r in rows]
        columns["share of T(B*)"] = [f"{r.share:.1%}" if r.share else "" for r in rows]
    if any(r.paper for r in rows):
        columns["the paper's (A100)"] = [_number(r.paper) for r in rows]
    for model in ("slm", "llm"):
        columns[f"{model} cost of a step, ms"] = [_number(r.measured.models[model]["overhead_ms_p50"], 2) for r in rows]
    if case == "many":
        columns["cores in use"] = [_cores(r) for r in rows]
    columns["server CPU, ms/token"] = [f"{r.measured.server_cpu_ms:.2f}" for r in rows]
    columns["client CPU, cores"] = [f"{r.measured.client_cpu:.2f}" for r in rows]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in zip(*columns.values(), strict=True)]


def _cores(row: Row) -> str:
    """By each process of the server, with token_router's busiest threads; by all and the clients, of what is there."""
    measured = row.measured
    threads = " + ".join(f"{x:.2f}" for x in measured.router_threads[:_THREADS])
    parts = [
        f"{name} {cores:.2f}" + (f" (threads {threads})" if name == ROUTER else "")
        for name, cores in sorted(measured.server_cpu.items())
    ]
    whole = sum(measured.server_cpu.values()) + measured.client_cpu
    return f"{', '.join(parts)}; with the clients {whole:.2f} of {os.cpu_count()}"


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plots(results: Mapping[str, Sequence[Row]], folder: Path, stem: str) -> list[Path]:
    """A PNG for each case that was run: FOLDER/STEM_CASE.png."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for case, rows in results.items():
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        if case in ("moving", "constants"):
            for row in rows:
                axes.plot(_smooth(row.measured.by_second), label=row.name, lw=3 if row.name == "auto" else 1)
            axes.set(xlabel="s", ylabel="tokens/s (mean of 3 s)")
        else:
            _lines(axes, rows)
        axes.set_title(TITLES[case])
        axes.legend()
        axes.grid(alpha=0.3)
        drawn.append(folder / f"{stem}_{case}.png")
        figure.savefig(drawn[-1], dpi=110)
    return drawn


def _lines(axes: object, rows: Sequence[Row]) -> None:
    """tokens/s by N, a line for each setting; the theory and the paper beside them."""
    plot = axes.plot  # type: ignore[attr-defined]
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        plot([r.live for r in mine], [r.measured.tokens_per_s for r in mine], "o-", label=name)
        paper = [row for row in mine if row.paper is not None]
        if paper:
            plot([r.live for r in paper], [r.paper for r in paper], "x:", label=f"{name}, the paper's")
    theory = {row.live: row.theory for row in rows if row.theory is not None}
    if theory:
        plot(list(theory), list(theory.values()), "k--", label="T(B*)")
    axes.set(xlabel="N", ylabel="tokens/s", xscale="log", yscale="log")  # type: ignore[attr-defined]


def _smooth(values: Sequence[int], width: int = 3) -> list[float]:
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(width, i + 1) for i in range(len(values))]
