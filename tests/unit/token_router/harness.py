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
    LLMFacts,
    SessionOpen,
    SessionResult,
    SessionStep,
    StepRequest,
    StepResponse,
    StepStats,
)
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import TokenRouterError, Unavailable
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


@dataclass
class FakeSession:
    opening: SessionOpen
    tokens: list[int] = field(default_factory=list)


class FakeLLM(LLMClient):
    """An LLM with a table of sessions, steps that take `step_s`, and any rule as its router.

    It refuses what a real engine refuses: a gap, an unknown session, one opened twice, too many sessions.
    """

    def __init__(
        self,
        name: str,
        route: Route,
        step_s: Callable[[], float],
        max_sessions: int = 32,
        chunk: int = 8,
        kv_tokens: int | None = None,
        kv_block: int = 1,
    ) -> None:
        self.name = name
        self.on_death = lambda reason: None
        self.route = route
        self.step_s = step_s
        kv_tokens = max_sessions * 4096 if kv_tokens is None else kv_tokens
        self.facts = LLMFacts(name, "fake", 0, max_sessions, 4096, chunk, VOCABULARY, (EOS,), True, kv_tokens, kv_block)
        self.sessions: dict[int, FakeSession] = {}
        self.batches: list[StepRequest] = []
        self.reloads = 0
        self.reload_fails = False
        self._dead = False
        self._steps: list[asyncio.Task[StepResponse]] = []  # under way, in order
        self._stayed: dict[int, int] = {}  # of the last call: session -> the token that it goes on from
        self._number = 0  # of the last call

    @property
    def lost(self) -> bool:
        return self._dead

    def die(self) -> None:
        """The process ends, now."""
        self._dead = True
        self.sessions.clear()
        if not self._steps:
            self.on_death("its process has ended")
        for step in self._steps:  # soon, not now: one that was sent just now has yet to begin
            asyncio.get_running_loop().call_soon(step.cancel)

    async def hello(self) -> LLMFacts:
        self._dead = False
        self.sessions.clear()
        return self.facts

    async def reload(self) -> None:
        if self.reload_fails:
            raise Unavailable(f"model '{self.name}' can't be reloaded")
        self.reloads += 1

    def close(self) -> None:
        pass

    def step(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        assert len(self._steps) < 2
        self.batches.append(request)
        before = self._steps[-1] if self._steps else None
        step = asyncio.ensure_future(self._after(before, request))
        self._steps.append(step)
        step.add_done_callback(self._steps.remove)
        return step

    async def _after(self, before: asyncio.Task[StepResponse] | None, request: StepRequest) -> StepResponse:
        try:
            if before is not None:
                await asyncio.wait([before])
            return await self._step(request)
        except asyncio.CancelledError:
            if self._dead:
                raise Unavailable(f"model '{self.name}' went down") from None
            raise

    async def _step(self, request: StepRequest) -> StepResponse:
        took_s = self.step_s() if request.steps or request.follows else 0.0
        await asyncio.sleep(took_s)
        if self._dead:  # it died in the very tick in which the step would have ended
            raise Unavailable(f"model '{self.name}' went down")
        return self._compute(request, took_s)

    def _compute(self, request: StepRequest, took_s: float) -> StepResponse:
        for session in request.free:
            self.sessions.pop(session, None)
        for opening in request.opens:
            assert opening.session not in self.sessions
            self.sessions[opening.session] = FakeSession(opening)
        assert len(self.sessions) <= self.facts.max_sessions
        assert len({s.session for s in request.steps}) == len(request.steps)
        stayed = self._stayed if request.number == self._number + 1 else {}
        self._number = request.number
        going = [s for s in request.follows if s in stayed and s in self.sessions]
        steps = [*request.steps, *(SessionStep(s, len(self.sessions[s].tokens), [stayed[s]]) for s in going)]
        if len(steps) < request.at_least:
            steps = []
        made: list[SessionResult] = []
        for step in steps:
            session = self.sessions[step.session]
            assert 0 <= step.start <= len(session.tokens)
            assert 0 < len(step.token_ids) <= self.facts.prefill_chunk
            session.tokens[step.start :] = step.token_ids
            made.append(SessionResult())
        self._check_kv()
        may_leave = request.max_leaves
        for _ in range(request.max_steps):
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
                self._check_kv()
                token = token_after(self.name, prefix)
                destination = self.route(step.session, len(prefix), token)
                made[i] = SessionResult([*made[i].token_ids, token], [*made[i].logprobs, -1.0], destination)
                may_leave -= destination != 0
                stop = stop or len(prefix) + 1 >= session.opening.limit
            if stop or may_leave < 0:
                break
        results = dict(zip((step.session for step in steps), made, strict=True))
        self._stayed = {s: r.token_ids[-1] for s, r in results.items() if self._stays(s, r)}
        ordered = [results.get(s, SessionResult()) for s in (*(s.session for s in request.steps), *request.follows)]
        count = max((len(r.token_ids) or 1 for r in made), default=0)
        return StepResponse(ordered, StepStats(took_s * 1000, took_s * 1000, count, len(self.sessions)))

    def _check_kv(self) -> None:
        """Like an engine with one pool of KV: it never holds more than there is."""
        block = self.facts.kv_block
        held = sum(-(-len(s.tokens) // block) * block for s in self.sessions.values())
        assert held <= self.facts.kv_tokens, f"{self.name} holds {held} tokens of {self.facts.kv_tokens}"

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
