# SPDX-License-Identifier: Apache-2.0
"""The runtime without Triton: LLMs in this process, on a clock that jumps to the next event."""

from __future__ import annotations

import asyncio
import hashlib
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from python_backends.llm.contract import (
    CALLS_AT_ONCE,
    LLMFacts,
    SessionOpen,
    SessionResult,
    SessionStep,
    StepRequest,
    StepResponse,
    StepStats,
)
from python_backends.llm.joining import joins
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import RequestFailed, TokenRouterError, Unavailable
from python_backends.token_router.llm_client import LLMClient
from python_backends.token_router.responses import Chunk
from python_backends.token_router.runtime import Runtime

VOCABULARY = 1000
EOS = 0


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting, moves its loop's clock on."""

    loop: FakeTimeLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is scheduled and nothing can happen")
        self.loop.now += timeout
        return super().select(0)


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when everything waits."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` on a fake clock."""
    loop = FakeTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def token_after(model: str, prefix: Sequence[int]) -> int:
    """The fake LLM's next token: it depends on the model and on every token before. Never EOS."""
    digest = hashlib.blake2b(repr((model, list(prefix))).encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % (VOCABULARY - 1)


Route = Callable[[int, int, int], int]  # (rid, position, token) -> destination


class QueuedLLM(LLMClient):
    """An LLM in this process: its calls wait for each other, and join as they do in the real one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_death = lambda: None
        self.calls: list[tuple[StepRequest, asyncio.Future[StepResponse]]] = []  # under way, in order
        self._worker: asyncio.Task[None] | None = None
        self._dead = False

    async def make(self, calls: list[StepRequest]) -> list[StepResponse]:
        """Make these calls as one step."""
        raise NotImplementedError

    @property
    def lost(self) -> bool:
        return self._dead

    def die(self) -> None:
        """The process ends, now."""
        self._dead = True
        if not self.calls:
            self.on_death()
        if self._worker is not None:
            self._worker.cancel()
            self._worker = None
        calls, self.calls = self.calls, []

        def end() -> None:  # soon, not now: whoever sent a call has yet to wait for it
            for _, answer in calls:
                if not answer.done():
                    answer.set_exception(Unavailable(f"model '{self.name}' went down"))

        asyncio.get_running_loop().call_soon(end)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()

    def step(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        assert len(self.calls) < CALLS_AT_ONCE
        answer: asyncio.Future[StepResponse] = asyncio.get_running_loop().create_future()
        self.calls.append((request, answer))
        if self._worker is None:
            self._worker = asyncio.ensure_future(self._work())
        return answer

    async def _work(self) -> None:
        while self.calls:
            await asyncio.sleep(0)
            together = 1
            requests = [request for request, _ in self.calls]
            while together < len(requests) and joins(requests[:together], requests[together]):
                together += 1
            outcome: list[StepResponse] | RequestFailed
            try:
                outcome = await self.make(requests[:together])
            except RequestFailed as error:
                outcome = error
            answers = [answer for _, answer in self.calls[:together]]
            del self.calls[:together]
            for i, answer in enumerate(answers):
                if answer.done():  # nobody waits any more
                    continue
                if isinstance(outcome, RequestFailed):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome[i])
        self._worker = None


@dataclass
class FakeSession:
    opening: SessionOpen
    tokens: list[int] = field(default_factory=list)


class FakeLLM(QueuedLLM):
    """An LLM with a table of sessions, steps that take `step_s`, and any rule as its router.

    It refuses what a real engine refuses: a gap, an unknown session, one opened twice, too many sessions.
    """

    def __init__(
        self, name: str, route: Route, step_s: Callable[[], float], max_sessions: int = 32, chunk: int = 8
    ) -> None:
        super().__init__(name)
        self.route = route
        self.step_s = step_s
        self.facts = LLMFacts(name, "fake", 0, max_sessions, 4096, chunk, VOCABULARY, (EOS,), samples=True)
        self.sessions: dict[int, FakeSession] = {}
        self.batches: list[StepRequest] = []
        self.reloads = 0
        self.reload_fails = False
        self._stayed: dict[int, int] = {}  # session -> the token that it goes on from

    def die(self) -> None:
        super().die()
        self.sessions.clear()

    async def hello(self) -> LLMFacts:
        self._dead = False
        self.sessions.clear()
        self._stayed.clear()
        return self.facts

    async def reload(self) -> None:
        if self.reload_fails:
            raise Unavailable(f"model '{self.name}' can't be reloaded")
        self.reloads += 1

    def step(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        self.batches.append(request)
        return super().step(request)

    async def make(self, calls: list[StepRequest]) -> list[StepResponse]:
        took_s = self.step_s() if any(call.steps or call.follows for call in calls) else 0.0
        await asyncio.sleep(took_s)
        return self._compute(calls, took_s)

    def _compute(self, calls: list[StepRequest], took_s: float) -> list[StepResponse]:
        for call in calls:
            for session in call.free:
                self.sessions.pop(session, None)
                self._stayed.pop(session, None)
            for opening in call.opens:
                assert opening.session not in self.sessions
                self.sessions[opening.session] = FakeSession(opening)
        assert len(self.sessions) <= self.facts.max_sessions
        steps = [step for call in calls for step in call.steps if step.session in self.sessions]
        brought = {step.session for call in calls for step in call.steps}
        assert len(brought) == sum(len(call.steps) for call in calls)
        for call in calls:
            going = [s for s in call.follows if s in self._stayed and s not in brought]
            steps += [SessionStep(s, len(self.sessions[s].tokens), [self._stayed[s]]) for s in going]
        if len(steps) < min((call.at_least for call in calls if call.steps or call.follows), default=1):
            for step in steps:
                self._stayed.pop(step.session, None)
            steps = []
        made = self._steps(steps, calls[0])
        results = dict(zip((step.session for step in steps), made, strict=True))
        for session, result in results.items():
            self._stayed.pop(session, None)
            if self._stays(session, result):
                self._stayed[session] = result.token_ids[-1]
        count = max((len(r.token_ids) or 1 for r in made), default=0)
        stats = StepStats(
            compute_ms=took_s * 1000,
            engine_ms=took_s * 1000,
            steps=count,
            sessions=len(self.sessions),
            session_steps=sum(len(r.token_ids) or 1 for r in made),
            more_tokens=sum(len(step.token_ids) - 1 for step in steps),
            calls=len(calls),
        )
        return [StepResponse(self._results(call, results, brought), stats) for call in calls]

    def _results(self, call: StepRequest, results: dict[int, SessionResult], brought: set[int]) -> list[SessionResult]:
        mine = [results.get(step.session, SessionResult()) for step in call.steps]
        return mine + [
            SessionResult(elsewhere=True) if s in brought else results.get(s, SessionResult()) for s in call.follows
        ]

    def _steps(self, steps: list[SessionStep], call: StepRequest) -> list[SessionResult]:
        made: list[SessionResult] = []
        for step in steps:
            session = self.sessions[step.session]
            assert 0 <= step.start <= len(session.tokens)
            assert 0 < len(step.token_ids) <= self.facts.prefill_chunk
            session.tokens[step.start :] = step.token_ids
            made.append(SessionResult())
        may_leave = call.max_leaves
        for _ in range(call.max_steps):
            stop = False
            for i, step in enumerate(steps):
                if made[i].destination != 0:
                    continue  # it has left
                if not step.sample:
                    stop = True
                    continue
                session = self.sessions[step.session]
                prefix = session.tokens + (made[i].token_ids[-1:] if made[i].token_ids else [])
                session.tokens = prefix
                token = token_after(self.name, prefix)
                destination = self.route(step.session, len(prefix), token)
                made[i] = SessionResult([*made[i].token_ids, token], [*made[i].logprobs, -1.0], destination)
                may_leave -= destination != 0
                stop = stop or len(prefix) + 1 >= session.opening.limit
            if stop or may_leave < 0:
                break
        return made

    def _stays(self, session: int, result: SessionResult) -> bool:
        held = self.sessions[session]
        return bool(result.token_ids) and not result.destination and len(held.tokens) + 1 < held.opening.limit


@dataclass
class Stream:
    """A ResponseStream that checks its own contract."""

    chunks: list[Chunk] = field(default_factory=list)
    error: TokenRouterError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, chunk: Chunk) -> None:
        assert not self.done.is_set()
        self.chunks.append(chunk)
        if chunk.finish_reason is not None:
            self.done.set()

    def fail(self, error: TokenRouterError) -> None:
        assert not self.done.is_set()
        self.error = error
        self.done.set()

    @property
    def token_ids(self) -> list[int]:
        return [t for c in self.chunks for t in c.token_ids]

    @property
    def models(self) -> list[str]:
        return [m for c in self.chunks for m in c.models]


class Deployment:
    """A runtime and its LLMs, running."""

    def __init__(self, config: RuntimeConfig, llms: Sequence[FakeLLM]) -> None:
        self.llms = llms
        self.runtime = Runtime(config, llms, tokenizer=None)

    async def __aenter__(self) -> Deployment:
        self._task = asyncio.ensure_future(self.runtime.run())
        while self.runtime.served is None:
            await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task.done():
            self._task.result()  # a loop that failed is the test's failure
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, **inputs: Any) -> tuple[Any, Stream]:
        stream = Stream()
        submission = self.runtime.intake.check({"stream": True, **inputs}, self.runtime.require_served())
        return self.runtime.submit(submission, stream), stream

    async def settled(self) -> None:
        """Until every free has been told; then nothing may be left anywhere."""
        await asyncio.sleep(10)
        status = self.runtime.status()
        assert (status["live"], status["queued"]) == (0, 0)
        for llm in self.llms:
            assert llm.sessions == {}, llm.name
            assert status["models"][llm.name]["waiting"] == 0
