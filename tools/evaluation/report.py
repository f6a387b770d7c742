# SPDX-License-Identifier: Apache-2.0
"""A sweep's figures as JSON, CSV, a Markdown table and the picture of accuracy against cost."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tools.commands.outputs import new_figure, save_figure
from tools.evaluation.query_level import QueryPoint
from tools.evaluation.summary import PointResult, rates_of

__all__ = ["LLM_ONLY", "RANDOM", "SLM_ONLY", "SweepResult", "write_report"]

_COLUMNS = (
    "label", "group", "value", "questions", "passed", "accuracy", "low", "high", "llm_share", "way", "way_low",
    "way_high", "handoffs", "tokens", "tokens_per_s", "cut",
)  # fmt: skip
SLM_ONLY, LLM_ONLY, RANDOM = "SLM only", "LLM only", "random"  # groups


class SweepResult(BaseModel):
    """settings: what all points have in common. controls: point -> the random one at its share; None = there can't be
    one, as all of the point's tokens are one model's. query_entropy, query_random: see `query_level`."""

    settings: dict[str, Any]
    models: list[str]
    points: list[PointResult]
    controls: dict[str, str | None] = {}
    query_entropy: list[QueryPoint] = []
    query_random: list[QueryPoint] = []

    def point(self, label: str) -> PointResult | None:
        return next((p for p in self.points if p.label == label), None)

    def query_at(self, share: float) -> float | None:
        """The accuracy of the query-level router at this share of tokens, between its two nearest points."""
        for a, b in zip(self.query_entropy, self.query_entropy[1:], strict=False):
            if a.llm_share <= share <= b.llm_share and b.llm_share > a.llm_share:
                part = (share - a.llm_share) / (b.llm_share - a.llm_share)
                return a.accuracy + part * (b.accuracy - a.accuracy)
        return None


def write_report(result: SweepResult, folder: Path) -> list[Path]:
    """results.json, results.csv, results.md and, where there is more than one point, frontier.png. Raises OSError, and
    UserError when there is no matplotlib or the picture can't be written."""
    paths = [folder / name for name in ("results.json", "results.csv", "results.md")]
    paths[0].write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows([_cell(getattr(point, column)) for column in _COLUMNS] for point in result.points)
    paths[2].write_text(markdown(result), encoding="utf-8")
    if len(result.points) > 1:
        paths.append(folder / "frontier.png")
        _plot(result, paths[-1])
    return paths


def _cell(value: Any) -> Any:
    return "" if value is None else round(value, 6) if isinstance(value, float) else value


def markdown(result: SweepResult) -> str:
    """Two tables: quality and cost; and the routing probabilities."""
    named = ", ".join(f"{key} {value}" for key, value in result.settings.items())
    lines = [f"# Accuracy against cost: {' + '.join(result.models)}", "", f"{named}.", "", *_quality(result), ""]
    if any(point.rates for point in result.points):
        lines += [*_probabilities(result), ""]
    return "\n".join(lines)


def _quality(result: SweepResult) -> list[str]:
    rows = []
    for point in result.points:
        query = None if point.group in (SLM_ONLY, LLM_ONLY) else result.query_at(point.llm_share)
        way = "" if point.way is None else f"{point.way:.0%} ({point.way_low:.0%} to {point.way_high:.0%})"
        rows.append(
            {
                "setting": point.label,
                "solved": f"{point.passed}/{point.questions}",
                "accuracy (95 %)": f"{point.accuracy:.1%} ({point.low:.1%} to {point.high:.1%})",
                "LLM's tokens": f"{point.llm_share:.1%}",
                "way to the LLM": way,
                "random at that share": _control(result, point.label),
                "query level there": "" if query is None else f"{query:.1%}",
                "handoffs": f"{point.handoffs:.1f}",
                "tokens": f"{point.tokens:.0f}",
                "tokens/s": "" if point.tokens_per_s is None else f"{point.tokens_per_s:.1f}",
                "cut off": str(point.cut),
            }
        )
    return _table(rows)


def _control(result: SweepResult, label: str) -> str:
    if label not in result.controls:
        return ""
    named = result.controls[label]
    if named is None:
        return "none: one model's tokens only"
    control = result.point(named)
    return "" if control is None else f"{control.accuracy:.1%} at {control.llm_share:.1%}"


def _probabilities(result: SweepResult) -> list[str]:
    """For routers between two models: what a step's outcome was, from the three sources."""
    rows = []
    for point in result.points:
        if point.rates is None or len(result.models) != 2:
            continue
        row = {"setting": point.label}
        for name, (i, j) in (("P to the LLM", (0, 1)), ("P back", (1, 0))):
            for source, value in rates_of(point, i, j).items():
                row[f"{name}: {source}"] = "" if value is None else f"{value:.4f}"
        rows.append(row)
    about = (
        "steps: counted by the server; answers: from tokens and handoffs; given: what the Markov model would be told,"
        " the mean over the steps."
    )
    return [about, "", *_table(rows)] if rows else []


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    if not rows:
        return []
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return lines + ["| " + " | ".join(row.values()) + " |" for row in rows]


def _plot(result: SweepResult, path: Path) -> None:
    """Accuracy by the LLM's share of tokens, a line for each router, with intervals."""
    figure = new_figure(10, 6.5, path.name, "eval")
    axes = figure.add_subplot()
    for label, style in ((SLM_ONLY, ":"), (LLM_ONLY, "--")):
        if (alone := result.point(label)) is not None:
            axes.axhline(100 * alone.accuracy, color="black", linestyle=style, lw=1, label=label)
    for name, points, style in (
        ("query level, by entropy", result.query_entropy, "-"),
        ("query level, at random", result.query_random, ":"),
    ):
        if points:
            axes.plot(
                [100 * p.llm_share for p in points], [100 * p.accuracy for p in points], style, color="grey", label=name
            )
    for group in dict.fromkeys(p.group for p in result.points if p.group not in (SLM_ONLY, LLM_ONLY)):
        own = sorted((p for p in result.points if p.group == group), key=lambda p: p.llm_share)
        at = [100 * p.accuracy for p in own]
        errors = [[100 * (p.accuracy - p.low) for p in own], [100 * (p.high - p.accuracy) for p in own]]
        fmt, colour, label = ("x:", "grey", "each token at random") if group == RANDOM else ("o-", None, group)
        share = [100 * p.llm_share for p in own]
        axes.errorbar(share, at, yerr=errors, fmt=fmt, color=colour, label=label, capsize=2, elinewidth=0.8)
    axes.set(xlabel="tokens by the LLM, %", ylabel="solved, %")
    routed = [p.llm_share for p in result.points if p.group not in (SLM_ONLY, LLM_ONLY)]
    axes.set_xlim(-1, min(101.0, 100 * max(routed, default=1.0) * 1.15 + 1))
    axes.set_title(f"{' + '.join(result.models)}: {result.settings.get('task', '')}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path, "--output")
