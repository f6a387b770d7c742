# SPDX-License-Identifier: Apache-2.0
"""Where requests come from: clients in a closed loop, or a Poisson stream."""

from __future__ import annotations

import math
from collections.abc import Callable

from tools.simulator.config import SimulationConfig
from tools.simulator.events import EventQueue, Priority
from tools.simulator.requests import SimRequest
from tools.simulator.routing import stream

__all__ = ["Load"]


class Load:
    """arrived: called with each request when it comes."""

    def __init__(self, config: SimulationConfig, events: EventQueue, arrived: Callable[[SimRequest], None]) -> None:
        self._config = config
        self._events = events
        self._arrived = arrived
        self._lengths = stream(config.seed, "lengths")
        self._gaps = stream(config.seed, "arrivals")
        self._next_rid = 0

    def begin(self) -> None:
        """The first requests come."""
        for _ in range(self._config.concurrency or 0):
            self._arrive_at(self._events.now)
        self._next_of_stream()

    def ended(self) -> None:
        """A request has ended: in a closed loop its client sends the next one at once."""
        if self._config.concurrency is not None:
            self._arrive_at(self._events.now)

    def _next_of_stream(self) -> None:
        rate = self._config.rate_per_s
        if rate is not None:
            self._arrive_at(self._events.now + round(self._gaps.expovariate(rate) * 1e9))

    def _arrive_at(self, time: int) -> None:
        self._events.push(time, Priority.ARRIVAL, self._arrive)

    def _arrive(self) -> None:
        config, rid = self._config, self._next_rid
        self._next_rid += 1
        self._next_of_stream()
        prompt = config.prompt_tokens
        routing, tokens = stream(config.seed, "routing", rid), stream(config.seed, "tokens", rid)
        self._arrived(SimRequest(rid, self._events.now, prompt, prompt + self._length(), routing, tokens))

    def _length(self) -> float:
        lengths = self._config.lengths
        u = self._lengths.random()
        if lengths.kind == "endless":
            return math.inf
        if lengths.kind == "constant" or lengths.mean == 1:
            return max(1, round(lengths.mean))
        return 1 + int(math.log(1 - u) / math.log(1 - 1 / lengths.mean))
