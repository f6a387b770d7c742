# SPDX-License-Identifier: Apache-2.0
"""What Triton's /metrics shows of us: which metrics there are, their values now, and what has changed since.

Telling Triton one value costs 20 to 90 µs, so values are gathered and told once a second, the changed ones only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from python_backends.token_router.threshold.profile import Profile

__all__ = [
    "KINDS",
    "METRICS",
    "ControllerReadings",
    "Metric",
    "MetricsBook",
    "ModelReadings",
    "Readings",
    "Series",
    "Update",
]


class Metric(NamedTuple):
    """kind: a counter only grows, a gauge goes both ways."""

    name: str
    kind: Literal["counter", "gauge"]
    description: str


METRICS = (
    Metric("tokenrouter_requests_live", "gauge", "Requests being generated"),
    Metric("tokenrouter_requests_queued", "gauge", "Requests that wait for admission"),
    Metric("tokenrouter_model_up", "gauge", "1 when the model answers, else 0"),
    Metric("tokenrouter_sessions", "gauge", "Sessions that the model holds"),
    Metric("tokenrouter_kv_tokens", "gauge", "Tokens in the model's KV"),
    Metric("tokenrouter_kv_reserved_tokens", "gauge", "KV tokens that the requests being generated may come to need"),
    Metric("tokenrouter_kv_free_tokens", "gauge", "KV tokens that nobody has reserved"),
    Metric("tokenrouter_threshold", "gauge", "B: the number of waiting requests that releases a batch"),
    Metric("tokenrouter_tokens_total", "counter", "Tokens of answers, by the model that made them"),
    Metric("tokenrouter_steps_total", "counter", "Forward steps"),
    Metric("tokenrouter_step_sessions_total", "counter", "Sessions in those steps; over steps: the mean batch"),
    Metric("tokenrouter_compute_seconds_total", "counter", "Time of those steps in the model's process"),
    Metric("tokenrouter_handoffs_total", "counter", "Requests that went from one model to another"),
    Metric("tokenrouter_routing_probability", "gauge", "As estimated: a step at `from` sends its request to `to`"),
    Metric("tokenrouter_step_latency_seconds", "gauge", "As estimated: a step with as many sessions as the threshold"),
    Metric(
        "tokenrouter_predicted_tokens_per_second", "gauge", "By the Markov model, for the live requests; 0 = unknown"
    ),
    Metric("tokenrouter_solves_total", "counter", "Solutions of the Markov model by batching: auto"),
    Metric("tokenrouter_solve_failures_total", "counter", "Questions that got none"),
    Metric("tokenrouter_threshold_changes_total", "counter", "Changes of B by batching: auto"),
)
KINDS = {metric.name: metric.kind for metric in METRICS}


@dataclass(frozen=True)
class ModelReadings:
    """One model now. compute_s, steps, step_sessions, tokens: since the start."""

    name: str
    up: bool
    sessions: int
    kv_tokens: int
    kv_reserved: int
    kv_free: int
    threshold: int
    tokens: int
    steps: int
    step_sessions: int
    compute_s: float


@dataclass(frozen=True)
class ControllerReadings:
    """`batching: auto` now. predicted: tokens/s for the requests that are live, None = not solved."""

    profile: Profile | None
    predicted: float | None
    solves: int
    failures: int
    changes: int


@dataclass(frozen=True)
class Readings:
    """The runtime now. handoffs[i][j]: since the start, of requests from model i to model j."""

    live: int
    queued: int
    models: list[ModelReadings]
    handoffs: list[list[int]]
    controller: ControllerReadings | None = None


class Series(NamedTuple):
    """One metric of one thing. labels: name and value pairs."""

    metric: str
    labels: tuple[tuple[str, str], ...] = ()


class Update(NamedTuple):
    """value: what a gauge is now, what a counter has grown by."""

    series: Series
    value: float


@dataclass
class MetricsBook:
    """What Triton has been told."""

    _told: dict[Series, float] = field(default_factory=dict)

    def updates(self, readings: Readings) -> list[Update]:
        """What it is to be told now."""
        changed = []
        for series, value in _values(readings):
            told = self._told.get(series)
            if told != value:
                counts = KINDS[series.metric] == "counter"
                changed.append(Update(series, value - (told or 0.0) if counts else value))
                self._told[series] = value
        return changed


def _values(readings: Readings) -> Iterator[tuple[Series, float]]:
    for model in readings.models:
        labels = (("model", model.name),)
        yield Series("tokenrouter_model_up", labels), model.up
        yield Series("tokenrouter_sessions", labels), model.sessions
        yield Series("tokenrouter_kv_tokens", labels), model.kv_tokens
        yield Series("tokenrouter_kv_reserved_tokens", labels), model.kv_reserved
        yield Series("tokenrouter_kv_free_tokens", labels), model.kv_free
        yield Series("tokenrouter_threshold", labels), model.threshold
        yield Series("tokenrouter_tokens_total", labels), model.tokens
        yield Series("tokenrouter_steps_total", labels), model.steps
        yield Series("tokenrouter_step_sessions_total", labels), model.step_sessions
        yield Series("tokenrouter_compute_seconds_total", labels), model.compute_s
    for i, source in enumerate(readings.models):
        for j, target in enumerate(readings.models):
            if i != j:
                yield Series("tokenrouter_handoffs_total", _way(source, target)), readings.handoffs[i][j]
    if readings.controller is not None:
        yield from _controller_values(readings, readings.controller)
    # last: who sees that no request is live finds all that they did counted
    yield Series("tokenrouter_requests_queued"), readings.queued
    yield Series("tokenrouter_requests_live"), readings.live


def _controller_values(readings: Readings, controller: ControllerReadings) -> Iterator[tuple[Series, float]]:
    yield Series("tokenrouter_predicted_tokens_per_second"), controller.predicted or 0.0
    yield Series("tokenrouter_solves_total"), controller.solves
    yield Series("tokenrouter_solve_failures_total"), controller.failures
    yield Series("tokenrouter_threshold_changes_total"), controller.changes
    if controller.profile is None:
        return
    for i, source in enumerate(readings.models):
        latency = controller.profile.latency[i]
        labels = (("model", source.name),)
        yield Series("tokenrouter_step_latency_seconds", labels), latency.ms(source.threshold) / 1000
        for j, target in enumerate(readings.models):
            yield Series("tokenrouter_routing_probability", _way(source, target)), controller.profile.p[i][j]


def _way(source: ModelReadings, target: ModelReadings) -> tuple[tuple[str, str], ...]:
    return (("from", source.name), ("to", target.name))
