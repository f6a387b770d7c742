# SPDX-License-Identifier: Apache-2.0
"""A run's figures as files beside those of Locust's --csv, as a plot and as a table."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from perf.load.record import Recorder
from perf.load.summary import SummaryRow, TimelineRow, summary, timeline

__all__ = ["summary_table", "write_report"]

_COLOURS = {"grpc": "tab:blue", "http": "tab:orange"}
_STYLES = {"p50": "-", "p95": "--", "p99": ":"}


def write_report(recorder: Recorder, prefix: str) -> list[Path]:
    """PREFIX_summary.csv, PREFIX_timeline.csv, PREFIX_requests.csv and PREFIX_load.png. Raises OSError."""
    rows, slots = summary(recorder), timeline(recorder)
    paths = [Path(f"{prefix}_{name}") for name in ("summary.csv", "timeline.csv", "requests.csv", "load.png")]
    _write(paths[0], SummaryRow, (dataclasses.asdict(row) for row in rows))
    _write(paths[1], TimelineRow, (dataclasses.asdict(slot) for slot in slots))
    by_time = sorted(recorder.requests, key=lambda measured: measured.sent_at)
    _write_rows(
        paths[2], list(_REQUEST_COLUMNS), ((f(m, recorder) for f in _REQUEST_COLUMNS.values()) for m in by_time)
    )
    _plot(rows, slots, paths[3])
    return paths


def _since(recorder: Recorder, at: float | None) -> float | None:
    return None if at is None else at - recorder.began_at


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


# column of PREFIX_requests.csv -> its value of a request; times in seconds from the run's begin
_REQUEST_COLUMNS: dict[str, Any] = {
    "protocol": lambda m, r: m.protocol,
    "user": lambda m, r: m.user,
    "number": lambda m, r: m.request.number,
    "request": lambda m, r: m.request.digest,
    "max_tokens": lambda m, r: m.request.inputs["max_tokens"],
    "cancel_after": lambda m, r: m.request.cancel_after,
    "due_s": lambda m, r: _since(r, m.due_at),
    "sent_s": lambda m, r: _since(r, m.sent_at),
    "outcome": lambda m, r: m.outcome.value,
    "tokens": lambda m, r: m.tokens,
    "ttft_ms": lambda m, r: _in_ms(m.ttft_s),
    "tokens_per_s": lambda m, r: m.tokens_per_s,
    "duration_ms": lambda m, r: _in_ms(m.duration_s),
    "error": lambda m, r: m.error,
}


def _write(path: Path, kind: type, rows: Iterable[dict[str, Any]]) -> None:
    columns = [field.name for field in dataclasses.fields(kind)]
    _write_rows(path, columns, ([row[column] for column in columns] for row in rows))


def _write_rows(path: Path, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Numbers to the microsecond; what isn't there is an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_field(value) for value in row] for row in rows)


def _field(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else round(value, 6)


def summary_table(recorder: Recorder) -> Table:
    """What PREFIX_summary.csv says, for the terminal."""
    table = Table(title=f"{recorder.duration_s:.1f} s", title_justify="left")
    table.add_column("")
    table.add_column("")
    for column in ("count", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="right")
    for row in summary(recorder):
        values = (row.mean, row.p50, row.p90, row.p95, row.p99, row.max)
        shown = ("" if math.isnan(value) else f"{value:.1f}" for value in values)
        name = row.metric if row.metric == row.unit else f"{row.metric}, {row.unit}"
        table.add_row(row.protocol, name, str(row.count), *shown)
    return table


def _plot(rows: Sequence[SummaryRow], slots: Sequence[TimelineRow], path: Path) -> None:
    """TTFT, ITL and tokens/s over the run's time, one below the other. An own Figure: pyplot would keep it."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    ttft, itl, rate = figure.subplots(3, 1, sharex=True)
    for protocol in dict.fromkeys(slot.protocol for slot in slots):
        own = [slot for slot in slots if slot.protocol == protocol]
        middle = [slot.start_s + slot.width_s / 2 for slot in own]
        colour = _COLOURS.get(protocol)
        for axes, metric in ((ttft, "ttft"), (itl, "itl")):
            for name, style in _STYLES.items():
                values = [getattr(slot, f"{metric}_{name}_ms") for slot in own]
                axes.plot(middle, values, style, color=colour, marker=".", label=f"{protocol} {name}")
        rate.plot(middle, [s.tokens_per_s for s in own], color=colour, marker=".", label=protocol)
    _finish(ttft, f"TTFT: {_whole(rows, 'TTFT')}", "ms")
    _finish(itl, f"ITL: {_whole(rows, 'ITL')}", "ms")
    means = (f"{row.protocol} {row.mean:.1f}" for row in rows if row.metric == "throughput")
    _finish(rate, f"all requests together, mean: {', '.join(means)} tokens/s", "tokens/s")
    rate.set_xlabel("s from the run's begin")
    figure.savefig(path, dpi=120)


def _whole(rows: Sequence[SummaryRow], metric: str) -> str:
    """The whole run's percentiles of a metric, for a title."""
    own = [row for row in rows if row.metric == metric]
    return "; ".join(f"{r.protocol} p50 {r.p50:.1f}, p95 {r.p95:.1f}, p99 {r.p99:.1f} ms" for r in own)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel(unit)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", ncols=2)
