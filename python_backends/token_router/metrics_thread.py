# SPDX-License-Identifier: Apache-2.0
"""The thread that tells Triton our metrics, so that the event loop doesn't wait for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from python_backends.token_router.metrics import KINDS, METRICS, Series, Update

__all__ = ["MetricsThread"]

_PAUSE_S = 0.001


class MetricsThread:
    """All metrics of this process; Triton shows them as long as this object lives."""

    def __init__(self) -> None:
        self._updates: queue.SimpleQueue[Sequence[Update] | None] = queue.SimpleQueue()
        self._log = logging.getLogger("token_router.metrics")
        self._families: dict[str, Any] = {}
        self._metrics: dict[Series, Any] = {}
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def tell(self, updates: Sequence[Update]) -> None:
        """Returns at once."""
        if self._thread.is_alive():  # else nobody takes them out again
            self._updates.put(updates)

    def close(self) -> None:
        """Tell what was given before, then end the thread."""
        self._updates.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (updates := self._updates.get()) is not None:
            try:
                for update in updates:
                    self._tell(update)
                    time.sleep(_PAUSE_S)  # each holds the interpreter for some 50 µs: not all of them in a row
            except Exception:  # nobody's answer depends on it
                self._log.exception("Triton takes no metrics; there will be no more")
                return

    def _tell(self, update: Update) -> None:
        metric = self._metrics.get(update.series)
        if metric is None:
            metric = self._metrics[update.series] = self._new(update.series)
        if KINDS[update.series.metric] == "counter":
            metric.increment(update.value)
        else:
            metric.set(update.value)

    def _new(self, series: Series) -> Any:
        if not self._families:
            kinds = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}
            for name, kind, description in METRICS:
                self._families[name] = pb_utils.MetricFamily(name=name, description=description, kind=kinds[kind])
        return self._families[series.metric].Metric(labels=dict(series.labels))
