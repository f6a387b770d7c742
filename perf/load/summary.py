# SPDX-License-Identifier: Apache-2.0
"""From what a run has seen to figures: of the whole run, and over its time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perf.load.record import Outcome, Recorder

__all__ = ["SummaryRow", "TimelineRow", "summary", "timeline"]

_Floats = npt.NDArray[np.float64]
_MOST_SLOTS = 300


@dataclass(frozen=True)
class SummaryRow:
    """The distribution of one metric of one protocol; count: of the values. nan where there is none."""

    protocol: str
    metric: str
    unit: str
    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class TimelineRow:
    """One slot of time of one protocol; nan where nothing came.

    start_s, width_s: of the slot, from the run's begin. sent: requests. ttft, itl: percentiles of what arrived in it.
    """

    protocol: str
    start_s: float
    width_s: float
    sent: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    itl_p99_ms: float


def summary(recorder: Recorder) -> list[SummaryRow]:
    """For each protocol: TTFT, ITL (of every request, cancelled ones included, as far as they came), tokens/s of each
    finished request, durations by outcome, the lag of an open loop, and the throughput, whose count is all tokens."""
    return [row for protocol in recorder.protocols for row in _of_protocol(recorder, protocol)]


def _of_protocol(recorder: Recorder, protocol: str) -> list[SummaryRow]:
    requests = [m for m in recorder.requests if m.protocol == protocol]
    finished = [m for m in requests if m.outcome is Outcome.FINISHED]
    rows = [
        _row(protocol, "TTFT", "ms", _ms(m.ttft_s for m in requests)),
        _row(protocol, "ITL", "ms", _itl_ms(recorder, protocol)[1]),
        _row(protocol, "tokens/s", "tokens/s", _present(m.tokens_per_s for m in finished)),
    ]
    for outcome in Outcome:
        rows.append(_row(protocol, outcome.value, "ms", _ms(m.duration_s for m in requests if m.outcome is outcome)))
    if any(m.due_at is not None for m in requests):
        rows.append(_row(protocol, "lag", "ms", _ms(m.lag_s for m in requests)))
    tokens = sum(m.tokens for m in requests)
    throughput = tokens / recorder.duration_s if recorder.duration_s > 0 else math.nan
    rows.append(SummaryRow(protocol, "throughput", "tokens/s", tokens, throughput, *[math.nan] * 5))
    return rows


def timeline(recorder: Recorder) -> list[TimelineRow]:
    """The run in slots of a second, or of as many whole seconds as make at most 300 of them."""
    duration = recorder.duration_s
    if not duration > 0:
        return []
    width = float(math.ceil(max(1.0, duration / _MOST_SLOTS)))
    edges = np.arange(0.0, duration, width)
    if len(edges) > 1 and duration - edges[-1] < width / 2:  # too short a slot for a rate: the one before takes it in
        edges = edges[:-1]
    return [row for protocol in recorder.protocols for row in _slots(recorder, protocol, edges)]


def _slots(recorder: Recorder, protocol: str, edges: _Floats) -> list[TimelineRow]:
    requests = [m for m in recorder.requests if m.protocol == protocol]
    chunks = recorder.chunks[protocol]

    def slot(times: Iterable[float]) -> npt.NDArray[np.intp]:
        """Which slot each time is in; what came while the run was being ended belongs to the last one."""
        return np.searchsorted(edges, np.fromiter(times, float) - recorder.began_at, side="right") - 1

    sent = np.bincount(slot(m.sent_at for m in requests), minlength=len(edges))
    tokens = np.bincount(slot(chunks.received_at), weights=np.asarray(chunks.tokens, dtype=float), minlength=len(edges))
    first = [m for m in requests if m.first_at is not None]
    ttft_slot, ttft_ms = slot(m.first_at for m in first if m.first_at is not None), _ms(m.ttft_s for m in first)
    itl_at, itl_ms = _itl_ms(recorder, protocol)
    itl_slot = slot(itl_at)
    rows = []
    ends = [*edges[1:].tolist(), recorder.duration_s]
    for number, (start, end) in enumerate(zip(edges.tolist(), ends, strict=True)):
        lasted = end - start
        rows.append(
            TimelineRow(
                protocol, start, lasted, int(sent[number]), float(tokens[number]) / lasted,
                *_percentiles(ttft_ms[ttft_slot == number], (50, 95, 99)),
                *_percentiles(itl_ms[itl_slot == number], (50, 95, 99)),
            )
        )  # fmt: skip
    return rows


def _itl_ms(recorder: Recorder, protocol: str) -> tuple[_Floats, _Floats]:
    """When each token came (time.monotonic()) and its ITL in ms, of all tokens that have one."""
    chunks = recorder.chunks[protocol]
    at, itl = np.asarray(chunks.received_at, dtype=np.float64), np.asarray(chunks.itl_s, dtype=np.float64)
    tokens = np.asarray(chunks.tokens, dtype=np.int64)
    has = ~np.isnan(itl)
    return np.repeat(at[has], tokens[has]), np.repeat(itl[has] * 1000, tokens[has])


def _present(values: Iterable[float | None]) -> _Floats:
    return np.array([value for value in values if value is not None], dtype=float)


def _ms(seconds: Iterable[float | None]) -> _Floats:
    return _present(seconds) * 1000


def _percentiles(values: _Floats, which: tuple[int, ...]) -> list[float]:
    return [float(np.percentile(values, p)) if len(values) else math.nan for p in which]


def _row(protocol: str, metric: str, unit: str, values: _Floats) -> SummaryRow:
    mean = float(values.mean()) if len(values) else math.nan
    return SummaryRow(protocol, metric, unit, len(values), mean, *_percentiles(values, (50, 90, 95, 99, 100)))
