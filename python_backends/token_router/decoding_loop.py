# SPDX-License-Identifier: Apache-2.0
"""The decoding loop of one LLM: take the batch that the queue releases, make one call, commit the tokens,
hand over the requests that leave, again."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from typing import Protocol

from python_backends.llm.contract import LLMFacts, SessionResult, SessionStep, StepRequest, StepStats
from python_backends.token_router.delayed_batching import DelayedBatchingQueue
from python_backends.token_router.errors import RequestFailed, TokenRouterError, Unavailable
from python_backends.token_router.foresight import Allowance, Foresight
from python_backends.token_router.llm_client import LLMClient
from python_backends.token_router.request import Request, Session, SessionState
from python_backends.token_router.scheduling import Scheduler
from python_backends.token_router.step_clock import StepClock
from python_backends.token_router.threshold.traffic import Traffic
from routers import peer_to_model

__all__ = ["DecodingLoop", "LLMState", "Outcomes"]

_RETRY_S = 1.0


class LLMState(enum.Enum):
    """STARTING: has not answered yet. UP: serves. RELOADING: was lost, is being loaded again.
    DOWN: a reload failed; it is tried again."""

    STARTING = "starting"
    UP = "up"
    RELOADING = "reloading"
    DOWN = "down"


class Outcomes(Protocol):
    """What a decoding loop does with the outcome of a step; the runtime connects it to the other loops."""

    def commit(self, session: Session) -> bool:
        """Every token that `session` knows is final. True = that ended the request."""

    def handoff(self, session: Session) -> None:
        """The request goes to peer `session.destination`."""

    def fail(self, request: Request, error: TokenRouterError) -> None:
        """The request ends with this error."""

    def llm_changed(self) -> None:
        """An LLM came up or went down."""


class DecodingLoop:
    """One LLM's loop.

    llm: the way to the LLM, model number `model`. queue: of the sessions that wait for it. scheduler: says
    when it launches; traffic: learns what the steps do; both are the same for all loops.
    """

    def __init__(
        self,
        model: int,
        llm: LLMClient,
        queue: DelayedBatchingQueue[Session],
        scheduler: Scheduler,
        traffic: Traffic,
        foresight: Foresight,
        outcomes: Outcomes,
    ) -> None:
        self.llm = llm
        self.queue = queue
        self._model = model
        self._scheduler = scheduler
        self._traffic = traffic
        self.state = LLMState.STARTING
        self.facts: LLMFacts | None = None
        self.stats = StepStats()
        self.clock = StepClock(asyncio.get_running_loop().time)
        self._foresight = foresight
        self._outcomes = outcomes
        self._held: set[Session] = set()  # sessions that the LLM has been told of
        self._frees: list[int] = []
        self._wake = asyncio.Event()
        self._log = logging.getLogger(f"token_router.{llm.name}")
        llm.on_death = self.wake

    # Called by the other loops

    def add(self, session: Session, urgent: bool = False) -> None:
        """The session is to be stepped: it becomes WAITING. urgent: no batch is waited for."""
        session.state = SessionState.WAITING
        self.queue.put(session, urgent)
        self._wake.set()

    def drop(self, session: Session) -> None:
        """The session's request has ended: it becomes FINISHED, and the LLM will be told to free it."""
        session.state = SessionState.FINISHED
        self.queue.discard(session)
        if session in self._held:
            self._forget(session)

    def evict(self, session: Session) -> None:
        """The session's request has left: the LLM will be told to free it, as if it would never return."""
        session.kv_tokens = 0
        self._forget(session)

    def wake(self) -> None:
        """Something changed that may let a batch launch."""
        self._wake.set()

    # The loop

    async def run(self) -> None:
        """Runs until it is cancelled."""
        await self._until_up()
        while True:
            try:
                batch = await self._next_batch()
                await (self._step(batch) if batch else self._free())
            except Unavailable as error:
                await self._recover(error)

    async def _next_batch(self) -> list[Session]:
        """The sessions of the next call; empty = nobody, but there are sessions to free."""
        while True:
            if self.llm.lost:
                raise Unavailable(f"model '{self.llm.name}' went down: its process has ended")
            due = self._scheduler.due(self._model)
            if self._scheduler.launches(self._model):
                due = None if self.queue.urgent else self._foresight.holds_until(self._model, len(self.queue))
                if due is None:
                    return self.queue.take(self._chunk)
            elif self._frees:
                return []
            await self._woken(due)

    async def _woken(self, due: float | None) -> None:
        """Until something changed that may release a batch; at the latest at `due`, event-loop seconds."""
        self._wake.clear()
        self.clock.idle()
        timer = None if due is None else asyncio.get_running_loop().call_at(due, self._wake.set)
        await self._wake.wait()
        if timer is not None:
            timer.cancel()

    async def _step(self, batch: list[Session]) -> None:
        self._scheduler.started(self._model)
        try:
            await self._call(batch)
        finally:
            self._scheduler.ended(self._model)
            self._foresight.failed(self._model)

    async def _free(self) -> None:
        """Nobody is stepped: tell the LLM what to forget."""
        frees, self._frees = self._frees, []
        try:
            self.stats = (await self.llm.step(StepRequest(free=frees))).stats
        except RequestFailed:
            self._frees += frees

    async def _call(self, batch: list[Session]) -> None:
        steps = [session.next_step(self._chunk) for session in batch]
        opens = [session.opening() for session in batch if session not in self._held]
        frees, self._frees = self._frees, []
        self._held.update(batch)
        for session in batch:
            session.state = SessionState.RUNNING
        allowed = self._foresight.allows(self._model, batch) if all(s.sample for s in steps) else Allowance()
        request = StepRequest(steps, opens, frees, allowed.max_steps, allowed.max_leaves)
        self._foresight.launched(self._model, len(batch))
        self._traffic.launched(self._model)
        try:
            response = await self.llm.step(request)
        except RequestFailed as error:
            self._frees += frees
            for session in batch:
                self._fail(session, error)
            return
        self.stats = response.stats
        self.clock.called(response.stats)
        left = Counter(peer_to_model(self._model, r.destination) for r in response.results if r.destination)
        self._foresight.ended(self._model, response.stats.steps, response.stats.compute_ms / 1000, left)
        self._traffic.called(
            self._model,
            session_steps=sum(len(result.token_ids) or 1 for result in response.results),
            more_tokens=sum(len(step.token_ids) - 1 for step in steps),
            ms=response.stats.compute_ms,
            steps=response.stats.steps,
            prefilled=any(session.urgent for session in batch),
        )
        for session, step, result in zip(batch, steps, response.results, strict=True):
            self._settle(session, step, result)

    def _settle(self, session: Session, step: SessionStep, result: SessionResult) -> None:
        """Act on what the step did for one session."""
        if session.state is not SessionState.RUNNING:
            return  # its request ended during the call
        if result.error is not None:
            self._fail(session, RequestFailed(f"model '{self.llm.name}': {result.error}"))
            return
        session.take_result(step, result)
        if not step.sample:
            if session.here or session.kv_tokens < session.target:
                self.add(session, urgent=True)  # it has had its turn, only not all of it
            else:
                session.state = SessionState.PENDING
        elif result.destination == 0:
            self._traffic.stayed(self._model, session.rid, len(result.token_ids))
            if not self._outcomes.commit(session):
                self.add(session)
        else:
            session.state = SessionState.PENDING
            session.here = False
            self._traffic.stayed(self._model, session.rid, len(result.token_ids) - 1)  # those before, run ahead
            self._outcomes.handoff(session)

    def _forget(self, session: Session) -> None:
        self._held.remove(session)
        self._frees.append(session.rid)

    def _fail(self, session: Session, error: TokenRouterError) -> None:
        if session.state is SessionState.RUNNING:
            self._outcomes.fail(session.request, error)

    # Coming up, and again

    @property
    def _chunk(self) -> int:
        if self.facts is None:
            raise RuntimeError("stepped before the LLM said what it is")
        return self.facts.prefill_chunk

    async def _until_up(self) -> None:
        while True:
            try:
                self.facts = await self.llm.hello()
                break
            except Unavailable as error:
                self._log.debug("not up yet: %s", error)
                await asyncio.sleep(_RETRY_S)
        self._set_state(LLMState.UP)

    async def _recover(self, error: Unavailable) -> None:
        """Answer the requests that the lost LLM had a part in, and load it again."""
        self._log.error("%s; reloading it", error)
        self._set_state(LLMState.RELOADING)
        for session in list(self._held):
            self._outcomes.fail(session.request, error)
        self._held.clear()
        self._frees.clear()
        self.stats = StepStats()
        while True:
            try:
                await self.llm.reload()
                self.facts = await self.llm.hello()
                break
            except Unavailable as failure:
                self._log.error("%s; trying again", failure)
                self._set_state(LLMState.DOWN)
                for session in self.queue.waiting():  # they came meanwhile, and nobody knows for how long
                    self._outcomes.fail(session.request, failure)
                await asyncio.sleep(_RETRY_S)
        self._log.info("model '%s' is up again", self.llm.name)
        self._set_state(LLMState.UP)

    def _set_state(self, state: LLMState) -> None:
        self.state = state
        self.clock.idle()
        self._outcomes.llm_changed()
