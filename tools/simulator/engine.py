# SPDX-License-Identifier: Apache-2.0
"""The discrete-event simulation: the runtime's own queues and scheduler, on a clock that jumps.

At every instant all that ends, arrives or changes happens first; then each idle model is asked whether it
launches, as the Markov model has it (paper, appendix D). Handoffs take no time.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence

from python_backends.token_router.delayed_batching import DelayedBatchingQueue, Thresholds, ThresholdTable
from python_backends.token_router.scheduling import AsyncScheduler, make_scheduler
from python_backends.token_router.threshold.profile import Profile
from tools.simulator.config import SimulationConfig
from tools.simulator.devices import Devices
from tools.simulator.events import EventQueue, Priority, nanoseconds
from tools.simulator.load import Load
from tools.simulator.luck import Luck
from tools.simulator.observer import Observer
from tools.simulator.requests import SimRequest, SimSession
from tools.simulator.results import Meter, SimulationResult
from tools.simulator.routing import Routing

__all__ = ["Simulation", "simulate"]


class Simulation:
    """One run. thresholds: B by N, when it isn't that of config.batching.

    Raises ValueError when profile and config don't fit each other.
    """

    def __init__(self, profile: Profile, config: SimulationConfig, thresholds: ThresholdTable | None = None) -> None:
        self.profile = profile
        self._config = config
        models = len(profile.models)
        self._models = range(models)
        self._events = EventQueue()
        # Clock and cap are both in ns: a queue adds and compares them and asks no more of their unit.
        self._max_wait = math.inf if config.max_wait_ms is None else nanoseconds(config.max_wait_ms)
        self._queues: list[DelayedBatchingQueue[SimSession]] = [
            DelayedBatchingQueue(self._events.clock, self._max_wait) for _ in self._models
        ]
        table = Thresholds(config.batching, models) if thresholds is None else thresholds
        self._scheduler = make_scheduler(config.batching, self._queues, table)
        self._devices = Devices(profile, self._events, self._complete)
        self._batches: list[list[SimSession]] = [[] for _ in self._models]
        self._more_tokens = [0] * models
        self._wakes = [-1] * models
        self._routing = Routing(profile.p, profile.c, profile.run_lengths or [None] * models)
        self._luck = Luck(self._routing)
        start, end = nanoseconds(config.warm_up_s * 1000), nanoseconds(config.duration_s * 1000)
        # Where the world changes in between, the parts of a run differ for other reasons than luck.
        self._meter = Meter(profile.models, None if config.phases else self._luck, start, end)
        self._made = [[int(x) if float(x).is_integer() else None for x in row] for row in profile.c]
        self._pays_tokens = [latency.token_ms > 0 for latency in profile.latency]
        self._tracks_tokens = any(self._pays_tokens)
        self._load = Load(config, self._events, self._arrive)
        self._outside: deque[SimRequest] = deque()
        self._live: dict[SimRequest, None] = {}
        self._observers: list[Observer] = []
        for cut in self._meter.cuts():
            self._events.push(cut, Priority.MEASURE, functools.partial(self._meter.cut, cut))
        at = 0.0
        for phase in config.phases:
            p = Profile.model_validate(profile.model_dump() | {"p": phase.p}).p
            self.at(at, functools.partial(self._reroute, p))
            at += phase.duration_s

    # For those who watch or steer

    @property
    def now(self) -> int:
        """Simulated ns since the start."""
        return self._events.now

    @property
    def live(self) -> int:
        """N, the requests that are generating."""
        return self._scheduler.live

    @property
    def thresholds(self) -> tuple[int, ...]:
        """B of each model, for that N."""
        return self._scheduler.thresholds

    def observe(self, observer: Observer) -> None:
        """It is told from now on what happens."""
        self._observers.append(observer)

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """`act` is to happen at this simulated time: after what ends or arrives then, before launches."""
        self._events.push(nanoseconds(time_s * 1000), Priority.CHANGE, act)

    def use_thresholds(self, thresholds: ThresholdTable) -> None:
        """B by N from now on. Raises ValueError when the policy has no thresholds."""
        if not isinstance(self._scheduler, AsyncScheduler):
            raise ValueError(f"batching.policy: {self._config.batching.policy} has no thresholds; allowed: async")
        self._scheduler.use(thresholds)

    def run(self) -> SimulationResult:
        """All of it."""
        self._load.begin()
        advance, end = self._events.advance, self._meter.end
        busy, launches, settle = self._devices.busy, self._scheduler.launches, self._devices.settle
        while advance(end):
            for model in self._models:
                if not busy[model] and launches(model):
                    self._launch(model)
            settle()
            if self._max_wait != math.inf:
                self._wake_when_due()
        return self._meter.result(len(self._outside), self._events.done)

    # Requests come and go

    def _arrive(self, request: SimRequest) -> None:
        self._outside.append(request)
        self._admit()

    def _admit(self) -> None:
        """As many of those outside as may be live."""
        most = self._config.max_live
        while self._outside and (most is None or len(self._live) < most):
            request = self._outside.popleft()
            self._live[request] = None
            self._live_changed()
            request.sessions = [self._session(request, model) for model in self._models]
            self._begin_run(request.sessions[0])
            if self._config.batching.llm_prefill == "eager":
                for session in request.sessions[1:]:
                    if session.known < session.target:
                        self._put(session)

    def _session(self, request: SimRequest, model: int) -> SimSession:
        """Where tokens cost nothing, the prompt is as good as processed."""
        known = 0 if self._pays_tokens[model] else max(0, request.prompt - 1)
        return SimSession(request, model, known)

    def _finish(self, request: SimRequest) -> None:
        request.ended = True
        for session in request.sessions:
            self._queues[session.model].discard(session)
        del self._live[request]
        self._live_changed()
        now = self._events.now
        self._meter.request_ended(now - request.arrived)
        for observer in self._observers:
            observer.ended(now, request)
        self._load.ended()
        self._admit()

    def _live_changed(self) -> None:
        now, live = self._events.now, len(self._live)
        self._scheduler.live_changed(live)
        self._meter.live_changed(now, live)
        for observer in self._observers:
            observer.live_changed(now, live)

    # Steps

    def _put(self, session: SimSession, urgent: bool = False) -> None:
        if self._tracks_tokens:
            session.will_wait()
        session.busy = True
        self._queues[session.model].put(session, urgent)
        for observer in self._observers:
            observer.waits(self._events.now, session)

    def _launch(self, model: int) -> None:
        batch = self._queues[model].take(self._config.prefill_chunk)
        sessions, now = len(batch), self._events.now
        more = 0
        if self._tracks_tokens:
            for session in batch:
                more += session.plan(self._config.prefill_chunk)
        self._batches[model] = batch
        self._more_tokens[model] = more
        self._scheduler.started(model)
        self._meter.launched(now, model, sessions, sessions * now - sum([s.waiting_since for s in batch]))
        self._devices.start(model, sessions, more)
        for observer in self._observers:
            observer.launched(now, model, batch)

    def _complete(self, model: int) -> None:
        now, batch = self._events.now, self._batches[model]
        self._meter.completed(now, model)
        for observer in self._observers:
            observer.stepped(now, model, len(batch), self._more_tokens[model], now - self._devices.started[model])
        stays = self._made[model][model]
        for session in batch:
            request = session.request
            if self._tracks_tokens and not self._processed(session):
                continue
            session.left -= 1
            to = model if session.left else session.to
            made = stays if to == model else self._made[model][to]
            if made is None:
                made = self._routing.tokens(model, to, request.tokens)
            request.length += made
            self._meter.tokens += made
            for observer in self._observers:
                observer.routed(now, session, to, made)
            if request.length >= request.limit:
                self._meter.tokens -= int(request.length - request.limit)
                self._finish(request)
            elif to == model:
                self._put(session)
            else:
                self._hand_off(session, request.sessions[to])
        self._scheduler.ended(model)

    def _processed(self, session: SimSession) -> bool:
        """Note what a step added to the KV; whether it made a token."""
        if session.request.ended:
            return False
        session.known += session.takes
        if session.samples:
            return True
        if session.here or session.known < session.target:
            self._put(session, urgent=True)
        else:
            self._pends(session)
        return False

    def _hand_off(self, source: SimSession, target: SimSession) -> None:
        source.here = False
        self._pends(source)
        if not self._config.batching.resume:
            source.known = 0
        self._begin_run(target)

    def _pends(self, session: SimSession) -> None:
        session.busy = False
        for observer in self._observers:
            observer.pending(self._events.now, session)

    def _begin_run(self, session: SimSession) -> None:
        """The request is at this model now; if its prompt is being prefilled here, it goes on from there."""
        request = session.request
        request.at = session.model
        session.here = True
        self._draw_run(session)
        if not session.busy:
            self._put(session)

    def _draw_run(self, session: SimSession) -> None:
        model = session.model
        session.left, session.to = steps, to = self._routing.run(model, session.request.routing)
        self._luck.drew(model, steps, to)

    # The world changes

    def _reroute(self, p: Sequence[Sequence[float]]) -> None:
        """Geometric runs that have begun go on as new ones: they have no memory. Measured ones end as drawn."""
        self._routing.use(p)
        for request in self._live:
            if self._routing.memoryless[request.at]:
                self._draw_run(request.sessions[request.at])

    def _wake_when_due(self) -> None:
        """Look again when a wait reaches its cap."""
        for model in self._models:
            due = None if self._devices.busy[model] else self._scheduler.due(model)
            if due is not None and due != self._wakes[model]:
                self._wakes[model] = int(due)
                self._events.push(int(due), Priority.WAKE, lambda: None)


def simulate(profile: Profile, config: SimulationConfig) -> SimulationResult:
    """Run it. Raises ValueError as `Simulation` does."""
    return Simulation(profile, config).run()
