# SPDX-License-Identifier: Apache-2.0
"""Delayed batching: when the requests waiting for a model become its next batch (paper, section 4.3).

A batch is released when B requests wait, when one has waited for the cap, or when one must not wait at
all: a prefill, or a request's first token. It then takes every request that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from python_backends.token_router.config import BatchingConfig

__all__ = ["DelayedBatchingQueue", "ThresholdTable", "Thresholds", "Waiter", "feasible"]


def feasible(thresholds: tuple[int, ...], live: int) -> tuple[int, ...]:
    """The thresholds, lowered until they can't leave all `live` requests waiting for ever.

    If every model could hold B_i - 1 waiting requests and the sum reached N, none would be released; so
    sum of (B_i - 1) < N must hold (paper, appendix D). The largest is lowered first.
    """
    lowered = [max(1, min(b, live)) for b in thresholds]
    while sum(b - 1 for b in lowered) >= max(live, 1):
        lowered[lowered.index(max(lowered))] -= 1
    return tuple(lowered)


class ThresholdTable(Protocol):
    """B by the number of live requests."""

    def at(self, live: int) -> tuple[int, ...]:
        """B of every model; feasible."""


class Thresholds:
    """B of every model for a number of live requests, as `batching.threshold` gives it; 1 where that is auto.

    Raises ValueError when a list has not one entry for each model.
    """

    def __init__(self, config: BatchingConfig, models: int) -> None:
        given = config.threshold
        if isinstance(given, dict):
            self._table = {n: tuple(row) for n, row in sorted(given.items())}
        else:
            row = tuple(given) if isinstance(given, list) else (1 if given == "auto" else given,) * models
            self._table = {0: row}
        for n, row in self._table.items():
            if len(row) != models:
                where = f"threshold[{n}]" if isinstance(given, dict) else "threshold"
                raise ValueError(
                    f"batching.{where}: has {len(row)} numbers, {list(row)}; one for each of {models} models"
                )
        self._models = models
        self.at = lru_cache(maxsize=None)(self._at)

    def _at(self, live: int) -> tuple[int, ...]:
        row = (1,) * self._models
        for n, values in self._table.items():
            if n <= live:
                row = values
        return feasible(row, live)


class Waiter(Protocol):
    """What can wait in a queue: a `Session`, or what the simulator has in its place.

    waiting_since: when it joined, on the queue's clock; urgent: whether it may not be delayed (the queue).
    """

    waiting_since: float
    urgent: bool

    @property
    def must_not_wait(self) -> bool:
        """Whether it is never delayed: a prefill, or a request's first token."""

    @property
    def prefill_tokens(self) -> int:
        """How many tokens it has to prefill; 0 = it decodes."""


W = TypeVar("W", bound=Waiter)


class DelayedBatchingQueue(Generic[W]):
    """The sessions that wait for one model, first come first served.

    clock: seconds, monotonic (the event loop's). max_wait_s: the cap on a wait.
    """

    def __init__(self, clock: Callable[[], float], max_wait_s: float) -> None:
        self._clock = clock
        self._max_wait_s = max_wait_s
        self._waiting: dict[W, None] = {}  # a dict for its order and its O(1) removal
        self._urgent = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def put(self, session: W, urgent: bool = False) -> None:
        """Called once for each time a session becomes WAITING. urgent: it must not wait, whatever it is."""
        session.waiting_since = self._clock()
        session.urgent = urgent or session.must_not_wait
        self._urgent += session.urgent
        self._waiting[session] = None

    def put_back(self, batch: Sequence[W]) -> None:
        """They were taken for a batch that isn't made: they wait on, since when they did, before who came meanwhile."""
        self._urgent += sum(session.urgent for session in batch)
        self._waiting = dict.fromkeys([*batch, *self._waiting])

    def discard(self, session: W) -> None:
        """Take a session out, if it is in."""
        if session in self._waiting:
            del self._waiting[session]
            self._urgent -= session.urgent

    def waiting(self) -> list[W]:
        """Who waits, first come first."""
        return list(self._waiting)

    def due(self) -> float | None:
        """When the longest wait reaches the cap; None = nobody waits."""
        for session in self._waiting:
            return session.waiting_since + self._max_wait_s
        return None

    def releases(self, threshold: int) -> bool:
        """Whether a batch is to be launched now."""
        if not self._waiting:
            return False
        if self._urgent or len(self._waiting) >= threshold:
            return True
        due = self.due()
        return due is not None and self._clock() >= due

    def take(self, prefill_tokens: int) -> list[W]:
        """The next batch: everybody who waits, but of the prefills only as many as fit in
        `prefill_tokens` together (at least one), so that they don't stall the others' decoding."""
        batch: list[W] = []
        left = prefill_tokens
        for session in self._waiting:
            if session.prefill_tokens:
                cost = min(session.prefill_tokens, prefill_tokens)
                if cost > left and left < prefill_tokens:
                    continue
                left -= cost
            batch.append(session)
        for session in batch:
            self.discard(session)
        return batch
