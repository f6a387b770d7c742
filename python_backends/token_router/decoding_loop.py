# SPDX-License-Identifier: Apache-2.0
"""The decoding loop of one LLM: take the batch that the queue releases, make one call, commit the tokens,
hand over the requests that leave, again."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from python_backends.llm.contract import LLMFacts, SessionResult, StepRequest, StepStats
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
_LONGEST_RETRY_S = 8.0  # between attempts to load an LLM again: each pause is twice the one before
_NUMBERS = 1 << 31  # of calls: they travel as INT32


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
        self.problem: str | None = None  # why it isn't up; None = it is, or nobody knows yet
        self.facts: LLMFacts | None = None
        self.stats = StepStats()
        self.clock = StepClock(asyncio.get_running_loop().time)
        self._foresight = foresight
        self._outcomes = outcomes
        self._held: set[Session] = set()  # sessions that the LLM has been told of
        self._frees: list[int] = []
        self._number = 0  # of the last call
        self._began_s = 0.0  # when the call under way began, event-loop seconds
        self._made_nothing = False  # the call before the present one, which was sent ahead: too few were in it
        self._wake = asyncio.Event()
        self._log = logging.getLogger(f"token_router.{llm.name}")
        llm.on_death = self._died

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

    def _died(self, reason: str) -> None:
        """The LLM was lost while nothing of it was awaited."""
        self.problem = reason
        self.wake()

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
        """Call after call, the next one sent ahead of the end of the present one where that is foreseen."""
        call: Call | None = None
        following: Call | None = None
        try:
            while True:
                if call is None:
                    batch = await self._next_batch()
                    if not batch:
                        await self._free()
                        continue
                    call = self._launch(batch)
                    self._begun(call)
                    self._made_nothing = False  # this one does, and others are welcome to follow it
                following = await self._send_ahead(call)
                await self._finish(call, following)
                call, following = following, None
        finally:
            for under_way in (call, following):
                if under_way is not None:
                    await self._abandon(under_way)

    async def _next_batch(self) -> list[Session]:
        """The sessions of the next call; empty = nobody, but there are sessions to free."""
        while True:
            if self.llm.lost:
                raise Unavailable(f"model '{self.llm.name}' went down: {self.problem}")
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
        """Send a call. follows: sessions of the call under way, who are in it if they stay; None = none is under
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
            at_least=at_least if all(step.sample for step in steps) else 1,  # a prefill says nothing if it isn't made
        )
        sent_s = asyncio.get_running_loop().time()
        return Call(request, batch, list(follows or ()), self.llm.step(request), sent_s)

    def _request(self, **parts: Any) -> StepRequest:
        """The next request of this loop, with the sessions to free."""
        self._number = (self._number + 1) % _NUMBERS
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

    async def _send_ahead(self, call: Call) -> Call | None:
        """Wait for the call's end, and shortly before it send the next one if there surely is one.

        After a call that made nothing, nobody follows it in this one, which may make nothing either: with yet another
        sent ahead of its end, sessions could take turns to wait for each other for ever.
        """
        at = None if self._made_nothing else self._foresight.sends_ahead_at(self._model)
        if at is None:
            return None
        await asyncio.wait([call.answer], timeout=at - asyncio.get_running_loop().time())
        if call.answer.done():
            return None
        follows = [s for s in call.steps if s.state is SessionState.RUNNING and call.samples(s)]
        at_least = self._scheduler.thresholds[self._model]
        if self.queue.releases(len(self.queue) + 1):
            at_least = 1  # whatever B is
        if not self._foresight.sends_ahead(self._model, len(self.queue), len(follows), at_least):
            return None
        return self._launch(self.queue.take(self._chunk), follows, at_least)

    def _begun(self, call: Call, sent_s: float | None = None) -> None:
        """The LLM begins the call now, as far as one can tell."""
        self._scheduler.started(self._model)
        self._began_s = asyncio.get_running_loop().time()
        self._foresight.launched(
            self._model, len(call.steps), call.request.max_steps, sent_s, call.fresh, self.llm.round_trip_s
        )
        self._traffic.launched(self._model)

    async def _finish(self, call: Call, following: Call | None) -> None:
        """Wait for the call's answer and act on it. Those who stay are in the following call already."""
        try:
            response = await call.answer
        except RequestFailed as error:
            self._free_later(call.request.free)
            for session in call.steps:
                self._fail(session, error)
        else:
            results = call.results(response)
            self._learn(call, response.stats, [result for _, result in results])
            if batch := call.not_made(results):  # they wait as if they hadn't been in it
                for session in batch:
                    session.state = SessionState.WAITING
                self.queue.put_back(batch)
            for session, result in results:
                self._settle(session, call, result, following)
        finally:
            self._over()
            if following is None:
                self._scheduler.ended(self._model)
        if following is not None:
            self._begun(following, sent_s=following.sent_s)

    def _learn(self, call: Call, stats: StepStats, results: Sequence[SessionResult]) -> None:
        """What the call's time and its outcomes say about the next ones."""
        self.stats = stats
        self._made_nothing = stats.steps == 0
        self.clock.called(stats)
        left = Counter(peer_to_model(self._model, result.destination) for result in results if result.destination)
        self._foresight.ended(self._model, stats.steps, stats.compute_ms / 1000, left)
        if results:
            self._traffic.called(
                self._model,
                session_steps=sum(len(result.token_ids) or 1 for result in results),
                more_tokens=sum(len(step.token_ids) - 1 for step in call.steps.values()),
                ms=self._seen_ms(stats),
                steps=stats.steps,
                prefilled=call.prefilled,
            )

    def _seen_ms(self, stats: StepStats) -> float:
        """How long the call took whoever waits for it: the LLM's own time, and of the way to another host what
        wasn't hidden behind the call before."""
        took_ms = (asyncio.get_running_loop().time() - self._began_s) * 1000
        return max(stats.compute_ms, min(took_ms, stats.compute_ms + self.llm.round_trip_s * 1000))

    def _settle(self, session: Session, call: Call, result: SessionResult, following: Call | None) -> None:
        """Act on what the call did for one session."""
        if session.state is not SessionState.RUNNING:
            return  # its request ended during the call
        if result.error is not None:
            self._fail(session, RequestFailed(f"model '{self.llm.name}': {result.error}"))
            return
        if call.samples(session) and not result.token_ids:
            self.add(session)  # it was to follow, and wasn't stepped
            return
        session.take_result(call.steps[session], result)
        if not call.samples(session):
            if session.here or session.kv_tokens < session.target:
                self.add(session, urgent=True)  # it has had its turn, only not all of it
            else:
                session.state = SessionState.PENDING
        elif result.destination == 0:
            self._traffic.stayed(self._model, session.rid, len(result.token_ids))
            if self._outcomes.commit(session):
                return
            if following is not None and session in following.ahead:
                following.steps[session] = session.next_step(self._chunk)
            else:
                self.add(session)
        else:
            session.state = SessionState.PENDING
            session.here = False
            self._traffic.stayed(self._model, session.rid, len(result.token_ids) - 1)  # those before, run ahead
            self._outcomes.handoff(session)

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
                self.problem = self._why(error)
                await asyncio.sleep(_RETRY_S)
        self._set_state(LLMState.UP)

    async def _recover(self, error: Unavailable) -> None:
        """Answer the requests that the lost LLM had a part in, and load it again."""
        self._log.error("%s; reloading it", error)
        self.problem = self._why(error)
        self._set_state(LLMState.RELOADING)
        for session in list(self._held):
            self._outcomes.fail(session.request, error)
        self._held.clear()
        self._frees.clear()
        self.stats = StepStats()
        pause_s = _RETRY_S
        while True:
            try:
                await self.llm.reload()
                self.facts = await self.llm.hello()
                break
            except Unavailable as failure:
                self._log.error("%s; trying again", failure)
                self.problem = self._why(failure)
                self._set_state(LLMState.DOWN)
                for session in self.queue.waiting():  # they came meanwhile, and nobody knows for how long
                    self._outcomes.fail(session.request, failure)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
        self._log.info("model '%s' is up again", self.llm.name)
        self._set_state(LLMState.UP)

    def _why(self, error: Unavailable) -> str:
        """The reason without the model's name, beside which it is told."""
        return str(error).removeprefix(f"model '{self.llm.name}' ")

    def _set_state(self, state: LLMState) -> None:
        self.state = state
        if state is LLMState.UP:
            self.problem = None
        self.clock.idle()
        self._outcomes.llm_changed()
