# SPDX-License-Identifier: Apache-2.0
"""Which model may launch its next batch now: the scheduling policies of the paper (section 4.3, ablation).

A scheduler decides for all models of a deployment. The runtime asks it about an idle model; so does the
simulator (`tools/simulator`), on a clock of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.delayed_batching import DelayedBatchingQueue, ThresholdTable

__all__ = ["AsyncScheduler", "ModelSyncScheduler", "Scheduler", "StepSyncScheduler", "make_scheduler"]


class Scheduler(ABC):
    """What all policies know. queues: by model number.

    live: the number of live requests N. thresholds: B of each model for that N.
    on_change: called when a model that was not allowed to launch may be now; the runtime sets it.
    """

    def __init__(self, queues: Sequence[DelayedBatchingQueue[Any]]) -> None:
        self._queues = queues
        self._running = [False] * len(queues)
        self.live = 0
        self.thresholds: tuple[int, ...] = (1,) * len(queues)
        self.on_change: Callable[[], None] = lambda: None

    @abstractmethod
    def launches(self, model: int) -> bool:
        """Whether `model`, which is idle, is to launch all that waits for it."""

    @abstractmethod
    def due(self, model: int) -> float | None:
        """When `launches` may come true just because time has passed; None = never."""

    def spare_leaves(self, model: int) -> int:
        """How many requests may leave `model` before another model could launch with them."""
        return 0

    def joins_at(self, model: int) -> float | None:
        """When a model that idles now may launch requests that could come to `model` afterwards, on the
        queues' clock; 0 = now, None = never by itself. A policy with barriers doesn't foresee it."""
        return 0.0

    def live_changed(self, live: int) -> None:
        """A request was admitted or has ended."""
        self.live = live

    def started(self, model: int) -> None:
        """`model` has launched a batch."""
        self._running[model] = True

    def ended(self, model: int) -> None:
        """`model` has finished its batch, and the requests that stay there wait again."""
        self._running[model] = False


class AsyncScheduler(Scheduler):
    """Every model for itself, when its queue releases: delayed batching; with B = 1, eager-async."""

    def __init__(self, queues: Sequence[DelayedBatchingQueue[Any]], thresholds: ThresholdTable) -> None:
        super().__init__(queues)
        self._table = thresholds
        self.thresholds = thresholds.at(0)

    def use(self, thresholds: ThresholdTable) -> None:
        """B by N from now on."""
        self._table = thresholds
        self.thresholds = thresholds.at(self.live)
        self.on_change()

    def launches(self, model: int) -> bool:
        return self._queues[model].releases(self.thresholds[model])

    def due(self, model: int) -> float | None:
        return self._queues[model].due()

    def spare_leaves(self, model: int) -> int:
        spare = (self.thresholds[m] - 1 - len(self._queues[m]) for m in self._idle_peers(model))
        return max(0, min(spare, default=self.live))

    def joins_at(self, model: int) -> float | None:
        peers = self._idle_peers(model)
        if any(len(self._queues[m]) >= self.thresholds[m] for m in peers):
            return 0.0
        return min((due for m in peers if (due := self._queues[m].due()) is not None), default=None)

    def _idle_peers(self, model: int) -> list[int]:
        return [m for m, running in enumerate(self._running) if m != model and not running]

    def live_changed(self, live: int) -> None:
        super().live_changed(live)
        self.thresholds = self._table.at(live)


class _Barrier(Scheduler):
    """A policy that waits until nothing runs."""

    def due(self, model: int) -> float | None:
        return None

    def ended(self, model: int) -> None:
        super().ended(model)
        self.on_change()

    def _quiet(self) -> bool:
        return not any(self._running)


class StepSyncScheduler(_Barrier):
    """A barrier after each step: all models with waiting requests launch together, and nobody launches
    again until the slowest of them has finished."""

    def __init__(self, queues: Sequence[DelayedBatchingQueue[Any]]) -> None:
        super().__init__(queues)
        self._round: set[int] = set()  # the models that have yet to launch in this round

    def launches(self, model: int) -> bool:
        self._round = {m for m in self._round if len(self._queues[m])}  # who waited there may have ended
        if not self._round and self._quiet():
            self._round = {m for m, queue in enumerate(self._queues) if len(queue)}
        return model in self._round

    def started(self, model: int) -> None:
        super().started(model)
        self._round.discard(model)


class ModelSyncScheduler(_Barrier):
    """One model at a time: it steps until every request has left it; then the one with the most waiting."""

    def __init__(self, queues: Sequence[DelayedBatchingQueue[Any]]) -> None:
        super().__init__(queues)
        self._active = 0

    def launches(self, model: int) -> bool:
        if not self._quiet():
            return False
        if not len(self._queues[self._active]):
            waiting = [len(queue) for queue in self._queues]
            self._active = waiting.index(max(waiting))
        return model == self._active and len(self._queues[model]) > 0


def make_scheduler(
    batching: BatchingConfig, queues: Sequence[DelayedBatchingQueue[Any]], thresholds: ThresholdTable
) -> Scheduler:
    """The scheduler of `batching.policy`. thresholds: B by the number of live requests."""
    if batching.policy == "step_sync":
        return StepSyncScheduler(queues)
    if batching.policy == "model_sync":
        return ModelSyncScheduler(queues)
    return AsyncScheduler(queues, thresholds)
