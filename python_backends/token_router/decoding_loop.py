# SPDX-License-Identifier: Apache-2.0
"""The decoding loop of one LLM: take the batch that the queue releases, make one call, commit the tokens,
hand over the requests that leave, again."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from python_backends.llm.contract import (
    CALL_NUMBERS,
    CALLS_AT_ONCE,
    LLMFacts,
    SessionResult,
    StepRequest,
    StepStats,
)
from python_backends.token_router.call import Call
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
        self._number = 0  # of the last call
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
                await self._decode()
            except Unavailable as error:
                await self._recover(error)

    async def _decode(self) -> None:
        """Step after step. What belongs to the next one is sent while the present one is being made."""
        calls: deque[Call] = deque()  # under way, in order
        try:
            while True:
                if not calls:
                    batch = await self._next_batch()
                    if not batch:
                        await self._free()
                        continue
                    calls.append(self._launch(batch))
                    self._begun(calls)
                await self._send_ahead(calls)
                if not await self._finish(calls):
                    while calls:  # none of them has anybody to follow
                        await self._finish(calls)
        finally:
            for call in calls:
                await self._abandon(call)

    async def _next_batch(self) -> list[Session]:
        """The sessions of the next call; empty = nobody, but there are sessions to free."""
        while True:
            if self.llm.lost:
                raise Unavailable(f"model '{self.llm.name}' went down: its process has ended")
            due = self._scheduler.due(self._model)
            if self._scheduler.launches(self._model):
                if self.queue.releases(len(self.queue) + 1):  # whatever B is: nobody is waited for any more
                    return self.queue.take(self._chunk)
                until = self._foresight.holds_until(self._model, len(self.queue))
                if until is None:
                    return self.queue.take(self._chunk)
                due = until if due is None else min(until, due)
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

    def _launch(self, batch: list[Session], follows: Sequence[Session] | None = None, at_least: int = 1) -> Call:
        """Send a call. follows: sessions of the calls under way, who are in it if they stay; None = none is under
        way. at_least: see StepRequest."""
        steps = [session.next_step(self._chunk) for session in batch]
        opens = [session.opening() for session in batch if session not in self._held]
        self._held.update(batch)
        for session in batch:
            session.state = SessionState.RUNNING
        allowed = Allowance()
        if follows is None and all(step.sample for step in steps):
            allowed = self._foresight.allows(self._model, batch)
        request = self._request(
            steps=steps,
            opens=opens,
            max_steps=allowed.max_steps,
            max_leaves=allowed.max_leaves,
            follows=[session.rid for session in follows or ()],
            at_least=at_least,
        )
        return Call(request, batch, list(follows or ()), self.llm.step(request))

    def _request(self, **parts: Any) -> StepRequest:
        """The next request of this loop, with the sessions to free."""
        self._number = (self._number + 1) % CALL_NUMBERS
        frees, self._frees = self._frees, []
        return StepRequest(number=self._number, free=frees, **parts)

    async def _free(self) -> None:
        """Nobody is stepped: tell the LLM what to forget."""
        request = self._request()
        try:
            self.stats = (await self.llm.step(request)).stats
        except RequestFailed as error:
            self._log.error("sessions could not be freed, trying again: %s", error)
            self._free_later(request.free)
            await asyncio.sleep(_RETRY_S)

    async def _send_ahead(self, calls: deque[Call]) -> None:
        """Until the first of the calls is over, send what belongs to the step after it: one call for those who stay,
        and others for those who come to join them."""
        loop = asyncio.get_running_loop()
        answer = calls[0].answer
        answer.add_done_callback(lambda _: self._wake.set())
        followed = False
        timer = loop.call_at(self._foresight.follows_at(self._model), self._wake.set)
        while not answer.done():
            self._wake.clear()
            if len(calls) < CALLS_AT_ONCE and loop.time() >= timer.when():
                if not followed:
                    followed = self._follow(calls)
                elif len(self.queue) and self._foresight.joins(self._model):
                    calls.append(self._join())
            await self._wake.wait()
        timer.cancel()

    def _follow(self, calls: deque[Call]) -> bool:
        """Send the call after these, if there surely is one."""
        if any(not call.samples(session) for call in calls for session in call.steps):
            return False  # who isn't through with its prefill has to be in the next call
        follows = [s for call in calls for s in call.steps if s.state is SessionState.RUNNING]
        if not self._foresight.sends_ahead(self._model, len(self.queue), len(follows)):
            return False
        calls.append(self._join(follows))
        return True

    def _join(self, follows: Sequence[Session] = ()) -> Call:
        """Send those who wait to join the next step."""
        at_least = 1 if self.queue.releases(len(self.queue) + 1) else self._scheduler.thresholds[self._model]
        return self._launch(self.queue.take(self._chunk), follows, at_least)

    def _begun(self, calls: Sequence[Call], sent_ahead: bool = False) -> None:
        """The LLM begins a step with these calls now, as far as one can tell."""
        self._scheduler.started(self._model)
        sessions, fresh = sum(len(call.steps) for call in calls), any(call.fresh for call in calls)
        self._foresight.launched(self._model, sessions, calls[0].request.max_steps, sent_ahead, fresh)
        self._traffic.launched(self._model)

    async def _finish(self, calls: deque[Call]) -> bool:
        """Wait for the first call's answer and for those of the calls that joined it, and act on them. Those who stay
        are in a later call already. Returns whether the LLM has made a step."""
        stats: StepStats | None = None
        results: list[SessionResult] = []
        prefilled = False
        left = 1
        while left and calls:
            call = calls[0]
            try:
                response = await call.answer
            except RequestFailed as error:
                calls.popleft()
                self._free_later(call.request.free)
                for session in call.steps:
                    self._fail(session, error)
            else:
                calls.popleft()
                if stats is None:
                    stats, left = response.stats, response.stats.calls
                prefilled |= call.prefilled
                for session, result in call.results(response):
                    results.append(result)
                    self._settle(session, call, result, calls)
            left -= 1
        if stats is not None:
            self._learn(stats, results, prefilled)
        self._over()
        if calls:
            self._begun(calls, sent_ahead=True)
        else:
            self._scheduler.ended(self._model)
        return stats is not None and stats.steps > 0

    def _learn(self, stats: StepStats, results: Sequence[SessionResult], prefilled: bool) -> None:
        """What the time of a call, or of several made together, and their outcomes say about the next ones."""
        self.stats = stats
        self.clock.called(stats)
        left = Counter(peer_to_model(self._model, result.destination) for result in results if result.destination)
        stepped = sum(not result.elsewhere for result in results)
        self._foresight.ended(self._model, stepped, stats.steps, stats.compute_ms / 1000, left)
        if stats.steps:
            self._traffic.called(
                self._model,
                session_steps=stats.session_steps,
                more_tokens=stats.more_tokens,
                ms=stats.compute_ms,
                steps=stats.steps,
                prefilled=prefilled,
            )

    def _settle(self, session: Session, call: Call, result: SessionResult, later: Iterable[Call]) -> None:
        """Act on what the call did for one session. later: the calls under way behind it."""
        if session.state is not SessionState.RUNNING:
            return  # its request ended during the call
        if result.error is not None:
            self._fail(session, RequestFailed(f"model '{self.llm.name}': {result.error}"))
            return
        following = next((c for c in later if session in c.ahead), None)
        if call.samples(session) and not result.token_ids:  # it was to follow, and didn't
            self._go_on(session, following if result.elsewhere else None)
            return
        session.take_result(call.steps[session], result)
        if not call.samples(session):
            if session.here or session.kv_tokens < session.target:
                self.add(session, urgent=True)  # it has had its turn, only not all of it
            else:
                session.state = SessionState.PENDING
        elif result.destination == 0:
            self._traffic.stayed(self._model, session.rid, len(result.token_ids))
            if not self._outcomes.commit(session):
                self._go_on(session, following)
        else:
            session.state = SessionState.PENDING
            session.here = False
            self._traffic.stayed(self._model, session.rid, len(result.token_ids) - 1)  # those before, run ahead
            self._outcomes.handoff(session)

    def _go_on(self, session: Session, following: Call | None) -> None:
        """The session has a next step here: in the call that follows, if one does."""
        if following is None:
            self.add(session)
        else:
            following.steps[session] = session.next_step(self._chunk)

    async def _abandon(self, call: Call) -> None:
        """Nobody acts on this call any more: the LLM is lost, or the runtime ends."""
        self._over()
        self._scheduler.ended(self._model)
        call.answer.cancel()
        await asyncio.gather(call.answer, return_exceptions=True)

    def _over(self) -> None:
        """No call of this model is the present one any more; what was to be learned has been."""
        self._foresight.failed(self._model)
        self._traffic.over(self._model)

    def _free_later(self, rids: Sequence[int]) -> None:
        """The call that was to free these has failed; who has come back since is not freed."""
        held = {session.rid for session in self._held}
        self._frees += [rid for rid in rids if rid not in held]

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
