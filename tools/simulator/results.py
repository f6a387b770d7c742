# SPDX-License-Identifier: Apache-2.0
"""What a simulation measures, after its warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.simulator.luck import Luck, estimate

__all__ = ["Meter", "ModelResult", "SimulationResult"]

PARTS = 50  # of the measured time, equal: batch means, each long beside what correlates


@dataclass(frozen=True)
class ModelResult:
    """mean_batch: sessions of a launch. admission_delay_ms: mean wait from joining the queue to the launch.
    utilisation: share of the time that the model is busy. steps: launches."""

    name: str
    mean_batch: float
    admission_delay_ms: float
    utilisation: float
    steps: int


@dataclass(frozen=True)
class SimulationResult:
    """throughput: tokens/s, without the luck of the runs drawn (`luck`); half_width: of its 95 % confidence
    interval (batch means). counted: tokens/s as they came, luck and all.
    request_speed: throughput by the mean number of live requests. finished: requests that ended; latency_s: their
    mean time from arrival to end (nan if none did). waiting: requests not yet admitted at the end.
    session_steps: sessions of all launches. events: of the whole run, as are simulated_s and session_steps.
    """

    throughput: float
    half_width: float
    counted: float
    request_speed: float
    models: tuple[ModelResult, ...]
    finished: int
    latency_s: float
    waiting: int
    simulated_s: float
    session_steps: int
    events: int


@dataclass
class Meter:
    """Counts between `start` and `end` (ns). models: names. luck: of the runs drawn; None = it isn't taken off.

    busy_since: when each model's present step began, None = it is idle.
    """

    models: Sequence[str]
    luck: Luck | None
    start: int
    end: int
    tokens: int = 0
    parts: list[int] = field(default_factory=list)
    live: int = 0
    finished: int = 0
    latency: int = 0

    def __post_init__(self) -> None:
        n = len(self.models)
        self.busy_since: list[int | None] = [None] * n
        self._busy = [0] * n
        self._launches = [0] * n
        self._sessions = [0] * n
        self._waits = [0.0] * n
        self._live_ns = 0
        self._live_at = 0
        self._warm_up_sessions = 0
        self._luck_of_parts: list[list[float]] = []

    def cuts(self) -> list[int]:
        """When (ns) `cut` is to be called, before anything else happens."""
        return [self.start + (self.end - self.start) * k // PARTS for k in range(PARTS)]

    def cut(self, now: int) -> None:
        """A part of the measured time ends, or the warm-up, of which nothing is kept."""
        luck = self.luck.cut() if self.luck is not None else []
        if now == self.start:
            self._forget()
        else:
            self.parts.append(self.tokens)
            self._luck_of_parts.append(luck)
        self.tokens = 0

    def launched(self, now: int, model: int, sessions: int, waits: float) -> None:
        """A batch; waits: ns, of its sessions together."""
        self.busy_since[model] = now
        self._launches[model] += 1
        self._sessions[model] += sessions
        self._waits[model] += waits

    def completed(self, now: int, model: int) -> None:
        """The batch has ended."""
        self._add_busy(now, model)
        self.busy_since[model] = None

    def live_changed(self, now: int, live: int) -> None:
        """That many requests are live from now on."""
        self._live_ns += self.live * (now - self._live_at)
        self._live_at, self.live = now, live

    def request_ended(self, latency: int) -> None:
        """A request has had its last token, so long (ns) after its arrival."""
        self.finished += 1
        self.latency += latency

    def result(self, waiting: int, events: int) -> SimulationResult:
        """All of it, at `end`."""
        self.cut(self.end)
        self.live_changed(self.end, self.live)
        for model in range(len(self.models)):
            self._add_busy(self.end, model)
        seconds = (self.end - self.start) / 1e9
        rates = [tokens / (seconds / PARTS) for tokens in self.parts]
        mean, half_width = estimate(rates, self._luck_of_parts)
        return SimulationResult(
            throughput=mean,
            half_width=half_width,
            counted=sum(self.parts) / seconds,
            request_speed=mean * (self.end - self.start) / self._live_ns if self._live_ns else math.nan,
            models=tuple(self._model(i, name) for i, name in enumerate(self.models)),
            finished=self.finished,
            latency_s=self.latency / self.finished / 1e9 if self.finished else math.nan,
            waiting=waiting,
            simulated_s=self.end / 1e9,
            session_steps=self._warm_up_sessions + sum(self._sessions),
            events=events,
        )

    def _model(self, i: int, name: str) -> ModelResult:
        sessions = self._sessions[i]
        return ModelResult(
            name=name,
            mean_batch=sessions / self._launches[i] if sessions else 0.0,
            admission_delay_ms=self._waits[i] / sessions / 1e6 if sessions else 0.0,
            utilisation=self._busy[i] / (self.end - self.start),
            steps=self._launches[i],
        )

    def _add_busy(self, now: int, model: int) -> None:
        since = self.busy_since[model]
        if since is not None and now > self.start:
            self._busy[model] += now - max(since, self.start)

    def _forget(self) -> None:
        """The warm-up is over: what was counted in it is not measured."""
        self.live_changed(self.start, self.live)
        self._live_ns = self.finished = self.latency = 0
        self._warm_up_sessions = sum(self._sessions)
        for counts in (self._busy, self._launches, self._sessions):
            counts[:] = [0] * len(counts)
        self._waits[:] = [0.0] * len(self._waits)
