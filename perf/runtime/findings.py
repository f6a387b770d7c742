# SPDX-License-Identifier: Apache-2.0
"""What the rows say: differences between settings with their errors, and the statements that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf.runtime.cases import BEST, MOVING_P, Row
from perf.runtime.errors import standard_error

__all__ = ["Difference", "against", "best_thresholds", "follows_p", "paired"]

_SURE = 2.0  # standard errors
_WITHIN = 0.01
_PHASE_WITHIN = 0.03


@dataclass(frozen=True)
class Difference:
    """Of one setting's tokens/s from another's, as a share of the latter. error: standard, of the paired seconds."""

    share: float
    error: float

    def __neg__(self) -> Difference:
        return Difference(-self.share, self.error)

    def __str__(self) -> str:
        return f"{self.share * 100:+.1f} ± {self.error * 100:.1f} %"


def paired(tokens: Sequence[int], other: Sequence[int], phases: int = 1) -> Difference:
    """By second, both of the same so many phases. Raises ValueError when they aren't as many seconds, or none."""
    apart = [a - b for a, b in zip(tokens, other, strict=True)]
    mean = sum(other) / len(other) if other else 0.0
    if not mean:
        raise ValueError("by_second: the other setting has made no token")
    return Difference(sum(apart) / len(apart) / mean, standard_error(apart, phases) / mean)


def against(row: Row, rows: Sequence[Row]) -> Difference | None:
    """From the setting that the row is to be compared with, for the same N; None = with none of these."""
    other = next((r for r in rows if r.live == row.live and r.name == row.against), None)
    return None if other is None else _apart(row, other)


def _apart(row: Row, other: Row) -> Difference:
    return paired(row.measured.by_second, other.measured.by_second, len(row.measured.phases))


def best_thresholds(rows: Sequence[Row]) -> list[str]:
    """For each N, a line: which B measured best, and whether B* is it or within 1 % of it."""
    lines = []
    for star in (row for row in rows if row.name == BEST):
        others = [row for row in rows if row.live == star.live and row.threshold != star.threshold]
        if not others:
            continue
        apart = {row.name: _apart(row, star) for row in others}
        best = max(others, key=lambda row: apart[row.name].share)
        difference = apart[best.name]
        if difference.share <= 0:
            first = f"B* = {_commas(star)} measured best; next comes {_commas(best)} with {difference}"
        else:
            first = f"{_commas(best)} measured best, {difference} from B* = {_commas(star)}"
        lines.append(f"N = {star.live}: {first}. B* within 1 % of the best: {_at_most(_WITHIN, list(apart.values()))}.")
    return lines


def _at_most(share: float, apart: Sequence[Difference]) -> str:
    """Whether nothing is more than this share above, as far as the errors allow to say."""
    if all(d.share + _SURE * d.error <= share for d in apart):
        return "yes, at two standard errors"
    if any(d.share - _SURE * d.error > share for d in apart):
        return "no"
    what = "as measured" if all(d.share <= share for d in apart) else "not as measured"
    return f"{what}, but the errors are too large to say"


def follows_p(rows: Sequence[Row]) -> list[str]:
    """`auto` beside the best of the constant B that were run, in each phase and in all of them."""
    auto = next(row for row in rows if row.name == "auto")
    constant = [row for row in rows if row is not auto]
    each_s = len(_seconds(auto, 0))
    lines = [f"Phases of {each_s} s; the first second or two after a change are what auto needs to notice it."]
    for phase, p in enumerate(MOVING_P):
        best = max(constant, key=lambda row: row.measured.phases[phase])
        apart = {row.name: paired(_seconds(auto, phase), _seconds(row, phase)) for row in constant}
        lines.append(
            f"Phase {phase + 1}, p = {p}: auto {apart[best.name]} from the best constant B ({_commas(best)})."
            f" Within 3 % of the best: {_at_most(_PHASE_WITHIN, [-d for d in apart.values()])}."
        )
    best = max(constant, key=lambda row: row.measured.tokens_per_s)
    apart = {row.name: _apart(auto, row) for row in constant}
    lines.append(
        f"Whole run: auto {apart[best.name]} from the best of {len(constant)} constant B ({_commas(best)})."
        f" None above auto: {_at_most(0.0, [-d for d in apart.values()])}."
    )
    return lines


def _seconds(row: Row, phase: int) -> list[int]:
    each = len(row.measured.by_second) // len(MOVING_P)
    return row.measured.by_second[phase * each : (phase + 1) * each]


def _commas(row: Row) -> str:
    return ",".join(map(str, row.threshold or ()))
