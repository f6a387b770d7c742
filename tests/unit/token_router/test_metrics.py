# SPDX-License-Identifier: Apache-2.0
"""What Triton is told, and that it is told nothing twice."""

from __future__ import annotations

from dataclasses import replace

from python_backends.token_router.metrics import (
    METRICS,
    ControllerReadings,
    MetricsBook,
    ModelReadings,
    Readings,
    Series,
    Update,
)
from python_backends.token_router.threshold.profile import Profile, StepLatency

SLM = ModelReadings(
    name="slm",
    up=True,
    sessions=4,
    kv_tokens=40,
    kv_reserved=64,
    kv_free=36,
    threshold=1,
    tokens=10,
    steps=20,
    step_sessions=30,
    compute_s=0.12,
)
LLM = ModelReadings(
    name="llm",
    up=True,
    sessions=4,
    kv_tokens=40,
    kv_reserved=64,
    kv_free=36,
    threshold=3,
    tokens=5,
    steps=3,
    step_sessions=9,
    compute_s=0.09,
)
PROFILE = Profile(
    models=["slm", "llm"],
    p=[[0.65, 0.35], [1.0, 0.0]],
    c=[[1.0, 0.0], [1.0, 0.0]],
    latency=[StepLatency.constant(6.0), StepLatency(batch_ms={1: 20.0, 3: 28.0})],
)
NOW = Readings(
    live=4,
    queued=2,
    models=[SLM, LLM],
    handoffs=[[0, 5], [4, 0]],
    controller=ControllerReadings(PROFILE, predicted=207.9, solves=3, failures=1, changes=2),
)


def by_series(updates: list[Update]) -> dict[Series, float]:
    return {update.series: update.value for update in updates}


def test_everything_is_told_once() -> None:
    book = MetricsBook()
    told = by_series(book.updates(NOW))
    assert {series.metric for series in told} == {metric.name for metric in METRICS}
    assert told[Series("tokenrouter_requests_queued")] == 2
    assert told[Series("tokenrouter_threshold", (("model", "llm"),))] == 3
    assert told[Series("tokenrouter_handoffs_total", (("from", "llm"), ("to", "slm")))] == 4
    assert told[Series("tokenrouter_routing_probability", (("from", "slm"), ("to", "llm")))] == 0.35
    assert told[Series("tokenrouter_step_latency_seconds", (("model", "llm"),))] == 0.028
    assert told[Series("tokenrouter_predicted_tokens_per_second")] == 207.9
    assert book.updates(NOW) == []


def test_a_counter_is_told_its_growth_and_a_gauge_its_value() -> None:
    book = MetricsBook()
    book.updates(NOW)
    later = replace(NOW, live=3, models=[replace(SLM, tokens=17, threshold=2), LLM])
    assert by_series(book.updates(later)) == {
        Series("tokenrouter_requests_live"): 3,
        Series("tokenrouter_tokens_total", (("model", "slm"),)): 7,
        Series("tokenrouter_threshold", (("model", "slm"),)): 2,
    }


def test_without_a_controller_nothing_is_said_of_it() -> None:
    told = {update.series.metric for update in MetricsBook().updates(replace(NOW, controller=None))}
    assert "tokenrouter_tokens_total" in told
    assert not told & {"tokenrouter_solves_total", "tokenrouter_routing_probability"}


def test_a_controller_without_data_has_no_estimates() -> None:
    unknown = replace(NOW, controller=ControllerReadings(None, predicted=None, solves=0, failures=0, changes=0))
    told = by_series(MetricsBook().updates(unknown))
    assert told[Series("tokenrouter_predicted_tokens_per_second")] == 0
    assert told[Series("tokenrouter_solves_total")] == 0
    assert not any(series.metric == "tokenrouter_routing_probability" for series in told)
