# SPDX-License-Identifier: Apache-2.0
"""The thread that tells Triton, with something in Triton's place."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

from python_backends.token_router.metrics import METRICS, Series, Update

LIVE = Series("tokenrouter_requests_live")
SOLVES = Series("tokenrouter_solves_total", (("model", "a"),))


class _Family:
    """What Triton has been told: (metric, labels) -> value."""

    COUNTER, GAUGE = "counter", "gauge"
    told: ClassVar[dict[tuple[str, str], float]]
    broken: ClassVar[bool]

    def __init__(self, name: str, description: str, kind: str) -> None:
        if self.broken:
            raise RuntimeError("metrics are off")
        self.name = name

    def Metric(self, labels: dict[str, str]) -> Any:
        key, told = (self.name, str(labels)), self.told

        class Metric:
            def set(self, value: float) -> None:
                told[key] = value

            def increment(self, value: float) -> None:
                told[key] = told.get(key, 0.0) + value

        return Metric()


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> type[_Family]:
    class Family(_Family):
        told: ClassVar[dict[tuple[str, str], float]] = {}
        broken = False

    triton = ModuleType("triton_python_backend_utils")
    triton.MetricFamily = Family  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.delitem(sys.modules, "python_backends.token_router.metrics_thread", raising=False)
    return Family


def _thread() -> Any:
    from python_backends.token_router.metrics_thread import MetricsThread

    return MetricsThread()


def test_a_gauge_is_set_and_a_counter_grows(family: type[_Family]) -> None:
    thread = _thread()
    thread.tell([Update(LIVE, 4), Update(SOLVES, 2)])
    thread.tell([Update(LIVE, 3), Update(SOLVES, 5)])
    thread.close()
    assert family.told == {
        ("tokenrouter_requests_live", "{}"): 3,
        ("tokenrouter_solves_total", "{'model': 'a'}"): 7,
    }
    assert {LIVE.metric, SOLVES.metric} <= {metric.name for metric in METRICS}


def test_when_triton_takes_none_nothing_piles_up(family: type[_Family], caplog: pytest.LogCaptureFixture) -> None:
    family.broken = True
    thread = _thread()
    thread.tell([Update(LIVE, 4)])
    thread._thread.join(5)
    for n in range(100):
        thread.tell([Update(LIVE, n)])
    assert thread._updates.empty()
    assert "Triton takes no metrics" in caplog.text
    thread.close()
