# SPDX-License-Identifier: Apache-2.0
"""The runtime: the three loops, wired together on one event loop. Nothing here knows Triton."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from python_backends.token_router.client_loop import ClientLoop
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.decoding_loop import DecodingLoop, LLMState
from python_backends.token_router.delayed_batching import DelayedBatchingQueue, Thresholds
from python_backends.token_router.errors import TokenRouterError, Unavailable
from python_backends.token_router.foresight import Foresight
from python_backends.token_router.intake import Intake, Served
from python_backends.token_router.inter_model_loop import InterModelLoop
from python_backends.token_router.llm_client import LLMClient
from python_backends.token_router.metrics import ModelReadings, Readings
from python_backends.token_router.request import Request, Session, SessionState
from python_backends.token_router.responses import ResponseStream
from python_backends.token_router.scheduling import AsyncScheduler, make_scheduler
from python_backends.token_router.threshold.auto import AutoBatching
from python_backends.token_router.threshold.controller import ThresholdController
from python_backends.token_router.threshold.solver_process import Solver, SolverProcess
from python_backends.token_router.threshold.traffic import Traffic
from python_backends.token_router.tokenizer import Tokenizer

__all__ = ["Runtime"]

_SHORTEST = 2  # tokens: a prompt of one, an answer of one


class Runtime:
    """All loops of one deployment.

    llms: the way to each model, in the order of config.models. tokenizer: of all of them; None = ids only.
    solver: what `batching: auto` asks; None = a process of its own.

    Made in the event loop's thread. Raises ValueError when the router or the thresholds don't fit the
    number of models.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        llms: Sequence[LLMClient],
        tokenizer: Tokenizer | None,
        solver: Solver | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        batching, limits = config.batching, config.limits
        self._max_live = limits.max_live
        self._draining = False
        self._urls = [llm.url for llm in config.models]
        self.intake = Intake(tokenizer, config.router, config.model_names, limits)
        self.served: Served | None = None
        self.up = asyncio.Event()  # set once every model has answered
        queues = [DelayedBatchingQueue[Session](clock, batching.max_wait_ms / 1000) for _ in llms]
        controller = ThresholdController(len(llms)) if batching.threshold == "auto" else None
        self._scheduler = make_scheduler(batching, queues, controller or Thresholds(batching, len(llms)))
        self._scheduler.on_change = self._wake_all
        self._traffic = Traffic(config.model_names, clock)
        self._auto: AutoBatching | None = None
        if controller is not None and isinstance(self._scheduler, AsyncScheduler):
            changed = partial(self._scheduler.use, controller)
            self._auto = AutoBatching(self._traffic, controller, solver or SolverProcess(), limits.max_live, changed)
        self._tokens = [0] * len(llms)
        foresight = Foresight(batching, self._scheduler, len(llms), clock)
        self._loops = [
            DecodingLoop(model, llm, queue, self._scheduler, self._traffic, foresight, self)
            for model, (llm, queue) in enumerate(zip(llms, queues, strict=True))
        ]
        self._client = ClientLoop(config.model_names, limits.max_live, limits.max_queue, self._refusal)
        self._inter_model = InterModelLoop(
            self._loops,
            [config.router.router(i, config.model_names) for i in range(len(llms))],
            self._scheduler,
            self._traffic,
            batching,
            commit=self.commit,
            fail=self._client.fail,
        )
        self._client.inter_model = self._inter_model

    async def run(self) -> None:
        """Run all loops until cancelled. A loop that fails ends them all: the error is the caller's."""
        tasks = [asyncio.create_task(loop.run()) for loop in self._loops]
        auto = None if self._auto is None else asyncio.create_task(self._auto.run())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            self._client.fail_all(Unavailable("the server is shutting down"))
            for loop in self._loops:
                loop.llm.close()
            await asyncio.gather(*tasks, return_exceptions=True)  # they give up the calls under way
            if auto is not None:
                auto.cancel()
                await asyncio.gather(auto, return_exceptions=True)  # it has a process to end

    # From clients

    def require_served(self) -> Served:
        """What the models can take; any thread may ask. Raises Unavailable before every model has answered
        for the first time."""
        if self.served is None:
            raise Unavailable(self._down() or "the models are starting")
        return self.served

    def submit(self, submission: Any, stream: ResponseStream) -> Request | None:
        """Take the request; None = it was refused through `stream`."""
        return self._client.submit(submission, stream)

    def cancel(self, request: Request) -> None:
        """End a request whose client has gone."""
        self._client.cancel(request)

    # From the supervisor

    def drain(self) -> None:
        """Refuse new requests from now on; those taken are finished."""
        self._draining = True

    def abort(self, reason: str) -> None:
        """End every request, waiting or running, as UNAVAILABLE."""
        self._client.fail_all(Unavailable(reason))

    def status(self) -> dict[str, Any]:
        """What the runtime is doing: JSON. full: even the shortest request would have to wait for others to end.
        waiting, running, pending: sessions, by their state. sessions, kv_tokens: as the model itself counted them in
        its last step. kv_reserved, kv_free: tokens of its KV, for the requests that have been admitted and for others,
        and `LLMClient.kv_blocks`. url, round_trip_ms: of an LLM on another host, where its pid is one too. problem: why
        the LLM isn't up. steps and what follows it: see `StepClock.summary`."""
        kv_reserved, kv_free = self._client.kv.reserved(), self._client.kv.free()
        states = Counter((session.model, session.state) for session in self._client.sessions())
        return {
            "state": "draining" if self._draining else "starting" if self.served is None else "serving",
            "live": self._client.live,
            "max_live": self._client.max_live,
            "queued": self._client.queued,
            "full": self._full(),
            "models": {
                loop.llm.name: {
                    "state": loop.state.value,
                    **{s.value: states[model, s] for s in SessionState if s is not SessionState.FINISHED},
                    "sessions": loop.stats.sessions,
                    "kv_tokens": loop.stats.kv_tokens,
                    "kv_reserved": kv_reserved[model],
                    "kv_free": kv_free[model],
                    **loop.llm.kv_blocks(),
                    "threshold": self._scheduler.thresholds[model],
                    "pid": loop.facts.pid if loop.facts else None,
                    "url": self._urls[model],
                    "round_trip_ms": loop.llm.round_trip_s * 1000,
                    "problem": loop.problem,
                    **loop.clock.summary(),
                }
                for model, loop in enumerate(self._loops)
            },
            "controller": self._auto.status() if self._auto else None,
        }

    def _full(self) -> bool:
        client = self._client
        no_room = client.live >= client.max_live or not client.kv.fits(_SHORTEST)
        return client.queued > 0 or (client.live > 0 and no_room)  # with nobody there, no one's end is awaited

    def measured(self) -> dict[str, Any]:
        """What the traffic is: JSON. profile: `threshold.Profile`, None with too little of it; counts: since the
        start (`Traffic.counts`)."""
        profile = self._traffic.profile(self._max_live)
        return {
            "profile": None if profile is None else profile.model_dump(mode="json"),
            "counts": self._traffic.counts(),
        }

    def readings(self) -> Readings:
        """What the metrics show now. Takes some ten microseconds."""
        traffic, clocks = self._traffic, [loop.clock for loop in self._loops]
        kv_reserved, kv_free = self._client.kv.reserved(), self._client.kv.free()
        models = [
            ModelReadings(
                name=loop.llm.name,
                up=loop.state is LLMState.UP,
                sessions=loop.stats.sessions,
                kv_tokens=loop.stats.kv_tokens,
                kv_reserved=kv_reserved[i],
                kv_free=kv_free[i],
                threshold=self._scheduler.thresholds[i],
                tokens=self._tokens[i],
                steps=traffic.steps[i],
                step_sessions=traffic.sessions[i],
                compute_s=clocks[i].compute_ms / 1000,
            )
            for i, loop in enumerate(self._loops)
        ]
        handoffs = [list(row) for row in self._inter_model.handoffs]
        live, auto = self._client.live, self._auto
        controller = None if auto is None else auto.readings(live)
        return Readings(live, self._client.queued, models, handoffs, controller)

    # From the decoding loops (decoding_loop.Outcomes)

    def commit(self, session: Session) -> bool:
        output = session.request.output_ids
        before = len(output)
        ended = self._client.commit(session)
        self._tokens[session.model] += len(output) - before
        return ended

    def handoff(self, session: Session) -> None:
        self._inter_model.handoff(session)

    def fail(self, request: Request, error: TokenRouterError) -> None:
        self._client.fail(request, error)

    def llm_changed(self) -> None:
        down = self._down()
        if down is not None:
            self._client.fail_queued(Unavailable(down))
        facts = [loop.facts for loop in self._loops if loop.facts is not None]
        if len(facts) == len(self._loops):
            self.served = Served.by(facts)
            self.up.set()
            self._client.models_hold(min(self._max_live, self.served.max_sessions), self.served.pools)
        if (refused := self._of_another_vocabulary()) is not None:
            logging.getLogger("token_router").error("no request is taken: %s", refused)

    def _wake_all(self) -> None:
        for loop in self._loops:
            loop.wake()

    def _refusal(self) -> str | None:
        """Why no new request is taken; None = they are."""
        if self._draining:
            return "the server is draining: it finishes what it has and takes nothing new"
        return self._down()

    def _down(self) -> str | None:
        """Why nobody can be admitted, to which model; one that is being reloaded is waited for."""
        for loop in self._loops:
            if loop.state in (LLMState.STARTING, LLMState.DOWN):
                why = "" if loop.problem is None else f": {loop.problem}"
                return f"model '{loop.llm.name}' is {loop.state.value}{why}"
        return self._of_another_vocabulary()

    def _of_another_vocabulary(self) -> str | None:
        """Which LLM on another host can't be in this deployment; of those here, that was checked before the start."""
        entry = self._loops[0]
        for loop, url in zip(self._loops, self._urls, strict=True):
            ours, theirs = entry.facts, loop.facts
            if url is not None and ours is not None and theirs is not None and ours.vocab_size != theirs.vocab_size:
                return (
                    f"model '{loop.llm.name}' at {url} has a vocabulary of {theirs.vocab_size} tokens,"
                    f" and '{entry.llm.name}' one of {ours.vocab_size}; all models need the same"
                )
        return None
