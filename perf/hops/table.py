# SPDX-License-Identifier: Apache-2.0
"""From noted moments to a table: every way from the end of a step to the begin of the next, leg by leg."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

__all__ = ["LEGS", "Call", "Hop", "calls_of", "hops_of", "markdown", "summary"]

# what is noted of a call, in the order in which it comes -> what the time before it went to
_BACK = {
    "ends": "",
    "routed": "sample and route",
    "left": "answer encoded",
    "received": "on its way back",
    "answered": "to the event loop",
}
_THERE = {
    "launched": "act on it, launch",
    "sent": "request encoded",
    "entered": "on its way there",
    "begins": "decoded, to the engine",
}
LEGS = (*list(_BACK.values())[1:], *_THERE.values())
_REMEMBERED = 4  # calls of a model: others may have begun since the one that led to a launch
_AT_ONCE_S = 0.005  # a launch later than that after what could have caused it was caused by something else

Note = Sequence[Any]  # [seconds, what, model, number, more]


@dataclass
class Call:
    """at: when, in seconds, by what is noted. steps: sessions that it was sent with; opens: how many were new;
    leaving: those that it sent to another model."""

    model: str
    number: int
    at: dict[str, float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    opens: int = 0
    leaving: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Hop:
    """kind: from where to where. legs: ms, in order; together they are the time between two steps."""

    kind: str
    legs: dict[str, float]

    @property
    def ms(self) -> float:
        return sum(self.legs.values())


def calls_of(notes: Iterable[Note], since_s: float, until_s: float) -> list[Call]:
    """Those with a step that were launched in that time, whole, as they began."""
    calls: dict[tuple[str, int], Call] = {}
    for second, what, model, number, more in notes:
        if not since_s <= second <= until_s:
            continue
        call = calls.setdefault((model, number), Call(model, number))
        call.at[what] = second
        if what == "launched":
            call.steps, call.opens = more["steps"], more["opens"]
        elif what == "answered":
            call.leaving = more
    whole = [call for call in calls.values() if call.at.keys() == {*_BACK, *_THERE}]
    return sorted(whole, key=lambda call: call.at["begins"])


def hops_of(calls: Sequence[Call]) -> list[Hop]:
    """What led to each call: the end of the model's own call before, or that of another model's. Those that a new
    request or a timer led to are left out."""
    hops = []
    before: dict[str, deque[Call]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
    for call in calls:
        mine = before[call.model][-1] if before[call.model] else None
        before[call.model].append(call)
        if mine is not None and call.at["launched"] < mine.at["answered"]:
            hops.append(Hop(f"{call.model}, sent ahead", _ahead(mine, call)))
            continue
        if call.opens:
            continue
        others = (c for model, calls in before.items() if model != call.model for c in calls)
        causes = [other for other in others if _leads(other, call)]
        causes += [mine] if mine is not None else []
        cause = max(causes, key=lambda c: c.at["answered"], default=None)
        if cause is None or call.at["launched"] - cause.at["answered"] > _AT_ONCE_S:
            continue
        kind = f"{call.model}, again" if cause is mine else f"{cause.model} to {call.model}"
        hops.append(Hop(kind, _cold(cause, call)))
    return hops


def _leads(other: Call, call: Call) -> bool:
    """Whether a session of `call` has come from this one of another model."""
    return other.at["answered"] <= call.at["launched"] and not set(other.leaving).isdisjoint(call.steps)


def _ahead(before: Call, call: Call) -> dict[str, float]:
    """The next call is at the LLM already when the present one ends, or nearly."""
    moments = [(name, before.at[what]) for what, name in _BACK.items() if what in ("ends", "routed", "left")]
    moments += [(name, call.at[what]) for what, name in _THERE.items() if what in ("entered", "begins")]
    return _legs(moments)


def _cold(before: Call, call: Call) -> dict[str, float]:
    """An answer that overtakes what is noted before it hasn't waited for that."""
    answered = before.at["answered"]
    moments = [(name, before.at[what]) for what, name in _BACK.items() if before.at[what] <= answered]
    return _legs(moments + [(name, call.at[what]) for what, name in _THERE.items()])


def _legs(moments: Sequence[tuple[str, float]]) -> dict[str, float]:
    return {name: (at - earlier) * 1000 for (_, earlier), (name, at) in pairwise(moments)}


def summary(hops: Sequence[Hop]) -> dict[str, dict[str, Any]]:
    """By kind, the most frequent first: how many, ms by leg (median), and of the whole (median, 95th percentile)."""
    kinds: dict[str, list[Hop]] = defaultdict(list)
    for hop in hops:
        kinds[hop.kind].append(hop)
    return {
        kind: {
            "count": len(mine),
            "legs_ms": {leg: statistics.median(ms) for leg in LEGS if (ms := _of(leg, mine))},
            "ms_p50": statistics.median(h.ms for h in mine),
            "ms_p95": statistics.quantiles((h.ms for h in mine), n=20)[-1] if len(mine) > 1 else mine[0].ms,
        }
        for kind, mine in sorted(kinds.items(), key=lambda item: -len(item[1]))
    }


def _of(leg: str, hops: Sequence[Hop]) -> list[float]:
    return [hop.legs[leg] for hop in hops if leg in hop.legs]


def markdown(
    summaries: Mapping[int, Mapping[str, Mapping[str, Any]]], transport: str, steps_ms: tuple[float, float]
) -> str:
    """transport: of the steps. steps_ms: how long the SLM's and the LLM's take. A table for each N: a column for each
    kind of way, a row for each leg."""
    lines = [
        f"# Between two steps of {steps_ms[0]:g} and {steps_ms[1]:g} ms",
        "",
        "Where the time goes from the end of an engine's step to the begin of the next one that waited for it, ms. Legs"
        " are medians, so they don't add up exactly. A call sent ahead is at the LLM before the present one ends."
        f" Steps by {transport}.",
        "",
    ]
    for live, kinds in summaries.items():
        lines += [f"## N = {live}", "", "| | " + " | ".join(kinds) + " |", "|---" * (1 + len(kinds)) + "|"]
        rows = {"how many": [str(k["count"]) for k in kinds.values()]}
        for leg in LEGS:
            rows[leg] = [f"{k['legs_ms'][leg]:.2f}" if leg in k["legs_ms"] else "" for k in kinds.values()]
        rows["together, median"] = [f"{k['ms_p50']:.2f}" for k in kinds.values()]
        rows["together, 95th percentile"] = [f"{k['ms_p95']:.2f}" for k in kinds.values()]
        lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
        lines.append("")
    return "\n".join(lines)
