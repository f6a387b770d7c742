# SPDX-License-Identifier: Apache-2.0
"""The order of events."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.simulator.events import EventQueue, Priority, nanoseconds


def noting(happened: list[str], name: str) -> Callable[[], None]:
    return lambda: happened.append(name)


def test_time_then_priority_then_sequence() -> None:
    events, happened = EventQueue(), list[str]()
    for time, priority, name in [
        (20, Priority.MEASURE, "later"),
        (10, Priority.WAKE, "wake"),
        (10, Priority.ARRIVAL, "arrival 1"),
        (10, Priority.COMPLETION, "completion 1"),
        (10, Priority.CHANGE, "change"),
        (10, Priority.ARRIVAL, "arrival 2"),
        (10, Priority.COMPLETION, "completion 2"),
        (10, Priority.MEASURE, "measure"),
    ]:
        events.push(time, priority, noting(happened, name))
    assert events.advance(100) and events.now == 10
    assert happened == ["measure", "completion 1", "completion 2", "arrival 1", "arrival 2", "change", "wake"]
    assert events.advance(100) and events.now == 20 and happened[-1] == "later"
    assert not events.advance(100) and events.now == 20


def test_what_an_event_pushes_for_its_own_instant_still_happens_in_it_and_in_order() -> None:
    events, happened = EventQueue(), list[str]()
    events.push(5, Priority.CHANGE, noting(happened, "change"))

    def completion() -> None:
        events.push(5, Priority.ARRIVAL, noting(happened, "arrival"))

    events.push(5, Priority.COMPLETION, completion)
    assert events.advance(6)
    assert happened == ["arrival", "change"]


def test_the_end_is_not_reached() -> None:
    events = EventQueue()
    events.push(7, Priority.COMPLETION, lambda: None)
    assert not events.advance(7)
    assert events.advance(8)


def test_cancelled() -> None:
    events, happened = EventQueue(), list[str]()
    cancelled = events.push(5, Priority.COMPLETION, noting(happened, "cancelled"))
    events.push(5, Priority.COMPLETION, noting(happened, "kept"))
    events.cancel(cancelled)
    events.advance(6)
    assert happened == ["kept"]
    assert events.done == 1


@pytest.mark.parametrize("ms", [6.0, 27.9, 0.1])
def test_a_grid_of_tenths_of_a_millisecond_is_exact(ms: float) -> None:
    assert nanoseconds(ms) == int(ms * 10 + 0.5) * 100_000
