# SPDX-License-Identifier: Apache-2.0
"""What is to happen, in the order in which it happens. Simulated time is a whole number of nanoseconds, so
that steps which end together in the model (L_0 and L_1 on the paper's grid) end at the same instant here."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable

__all__ = ["EventQueue", "Priority", "nanoseconds"]


class Priority(enum.IntEnum):
    """Who comes first among events of one instant. Launches come after all of them (`engine`).

    MEASURE: a measured part of the run ends. COMPLETION: a step does. ARRIVAL: a request comes.
    CHANGE: the simulated world or the thresholds change. WAKE: a wait reaches its cap.
    """

    MEASURE = 0
    COMPLETION = 1
    ARRIVAL = 2
    CHANGE = 3
    WAKE = 4


def nanoseconds(ms: float) -> int:
    """Simulated time of this many milliseconds."""
    return round(ms * 1_000_000)


class EventQueue:
    """Events by (time, priority, sequence): of one instant and priority, the first pushed is the first.

    now: the present instant. done: how many events have happened.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._cancelled: set[int] = set()
        self._sequence = 0
        self.now = 0
        self.done = 0

    def clock(self) -> int:
        """`now`, as the runtime's queues ask for it."""
        return self.now

    def push(self, time: int, priority: Priority, act: Callable[[], None]) -> int:
        """`act` is to happen at `time`, which isn't past. Returns its sequence number."""
        self._sequence = sequence = self._sequence + 1
        heapq.heappush(self._heap, (time, priority, sequence, act))
        return sequence

    def cancel(self, sequence: int) -> None:
        """An event that has not happened yet won't."""
        self._cancelled.add(sequence)

    def advance(self, end: int) -> bool:
        """Everything of the next instant before `end` happens, also what is pushed for it meanwhile.
        False = there is no such instant."""
        heap = self._heap
        if not heap or heap[0][0] >= end:
            return False
        self.now = now = heap[0][0]
        while heap and heap[0][0] == now:
            _, _, sequence, act = heapq.heappop(heap)
            if self._cancelled and sequence in self._cancelled:
                self._cancelled.remove(sequence)
                continue
            self.done += 1
            act()
        return True
