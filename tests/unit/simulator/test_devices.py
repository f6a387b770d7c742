# SPDX-License-Identifier: Apache-2.0
"""How long steps take."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.simulator.profiles import r2r
from tools.simulator.devices import Devices
from tools.simulator.events import EventQueue, Priority, nanoseconds

END = nanoseconds(1000)


class Bench:
    """Steps begun at given times (ms); when they ended, by model."""

    def __init__(self, **profile: Any) -> None:
        self.events = EventQueue()
        self.devices = Devices(r2r(0.5, 4, 6, **profile), self.events, self.end)
        self.ended: list[tuple[int, float]] = []

    def end(self, model: int) -> None:
        self.ended.append((model, self.events.now / 1e6))

    def start(self, at_ms: float, model: int, sessions: int = 1, more_tokens: int = 0) -> None:
        begin = lambda: self.devices.start(model, sessions, more_tokens)  # noqa: E731
        self.events.push(nanoseconds(at_ms), Priority.CHANGE, begin)

    def run(self) -> list[tuple[int, float]]:
        while self.events.advance(END):
            self.devices.settle()
        return self.ended


def test_alone_on_devices_of_their_own() -> None:
    bench = Bench()
    bench.start(0, 0)
    bench.start(1, 1)
    assert bench.run() == [(0, 4.0), (1, 7.0)]


def test_by_batch_and_suffix() -> None:
    latency = [{"batch_ms": {1: 4, 3: 8}, "token_ms": 0.5}, {"batch_ms": {1: 6}}]
    for sessions, more, ms in [(1, 0, 4), (2, 0, 6), (3, 0, 8), (9, 0, 8), (2, 3, 7.5)]:
        bench = Bench(latency=latency)
        bench.start(0, 0, sessions, more)
        assert bench.run() == [(0, ms)]


def test_a_step_slows_while_another_runs_and_only_then() -> None:
    """Model 0 runs 2 of its 4 ms alone; then both, at half speed and 2/3: model 0 ends 4 ms later. Model 1 has done
    2.67 of 6 by then, and the rest alone."""
    bench = Bench(slowdown=[[1, 2], [1.5, 1]])
    bench.start(0, 0)
    bench.start(2, 1)
    ended = bench.run()
    assert [model for model, _ in ended] == [0, 1]
    assert [ms for _, ms in ended] == pytest.approx([6.0, 6 + 6 - 4 / 1.5], abs=1e-5)


def test_a_step_that_follows_at_once_keeps_the_pace_of_the_other() -> None:
    """The same instant's end and start change nothing for the other model: 6 ms of work at 2/3 = 9 ms."""
    bench = Bench(slowdown=[[1, 1], [1.5, 1]])
    bench.start(0, 1)
    for at in (0, 4, 8):
        bench.start(at, 0)
    assert bench.run() == [(0, 4.0), (0, 8.0), (1, 9.0), (0, 12.0)]
