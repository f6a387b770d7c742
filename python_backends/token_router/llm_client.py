# SPDX-License-Identifier: Apache-2.0
"""How the event loop calls an LLM: a blocking call in threads that do nothing else."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

from python_backends.llm.contract import LLMFacts, StepRequest, StepResponse
from python_backends.llm.wire import Wire, decode_response, encode_request
from python_backends.token_router.errors import RequestFailed, Unavailable
from python_backends.token_router.lifeline import Lifeline

__all__ = ["LLMClient", "ThreadedLLMClient"]

_LATE_S = 0.1  # a timer that is later than this says nothing about what it timed

T = TypeVar("T")


class LLMClient(ABC):
    """One LLM, as the decoding loop sees it. Only steps overlap, two at most: the LLM makes them in order.

    on_death: called with the reason when the LLM is lost while nothing is awaited (decoding loop).
    """

    name: str
    on_death: Callable[[str], None]

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether the LLM that said hello is gone."""

    @property
    def round_trip_s(self) -> float:
        """To the LLM's host and back, as measured of late, without any work of the LLM; 0.0 = it is on this host."""
        return 0.0

    @abstractmethod
    async def hello(self) -> LLMFacts:
        """Begin anew: the LLM frees every session and says what it is. Raises Unavailable."""

    @abstractmethod
    def step(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        """Send one call. What is awaited raises Unavailable when the LLM is gone (all its sessions are lost),
        and RequestFailed when the call failed and the LLM lives (the call's sessions are lost)."""

    @abstractmethod
    async def reload(self) -> None:
        """Start a lost LLM again. Raises Unavailable when that fails."""

    def kv_blocks(self) -> dict[str, int]:
        """Counts of KV blocks since the start, by name, of an LLM that keeps blocks and no sessions."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End what runs for this client; nothing is awaited any more."""


class ThreadedLLMClient(LLMClient):
    """An LLM behind a blocking call: a BLS request to a Triton model.

    call: the LLM model's input tensor to its output tensor; raises RuntimeError with Triton's message.
    reload: unloads and loads the model; raises RuntimeError.
    step_timeout_s: a step that takes longer means that the LLM hangs; it is then given up.
    lifeline: the way to know that the LLM lives, this client's own.
    """

    calls_at_once: ClassVar[int] = 2  # one that the LLM makes, and one sent ahead of its end

    def __init__(
        self,
        name: str,
        call: Callable[[Wire], Wire],
        reload: Callable[[], None],
        step_timeout_s: float,
        lifeline: Lifeline,
    ) -> None:
        self.name = name
        self.on_death = lambda reason: None
        self._call = call
        self._reload = reload
        self._step_timeout_s = step_timeout_s
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for number in range(self.calls_at_once):
            threading.Thread(target=self._run, name=f"llm-{name}-{number}", daemon=True).start()
        self._lifeline = lifeline
        lifeline.on_death = self._on_death
        self._steps: dict[asyncio.Future[StepResponse], float] = {}  # under way, in order: how long each may take
        self._first_since_s = 0.0  # the LLM makes the first of them since then, event-loop seconds; the others wait
        self._timer: asyncio.TimerHandle | None = None
        self._busy = 0  # threads inside a job
        self._idle = asyncio.Event()

    @property
    def lost(self) -> bool:
        return self._lifeline.lost

    @property
    def round_trip_s(self) -> float:
        return self._lifeline.round_trip_s

    async def hello(self) -> LLMFacts:
        try:
            response = await self._in_thread(lambda: self._exchange(StepRequest(hello=True)), lambda error: error)
        except RuntimeError as error:
            raise Unavailable(f"model '{self.name}' doesn't answer: {error}") from error
        if response.facts is None:
            raise Unavailable(f"model '{self.name}' doesn't say what it is")
        try:
            self._lifeline.attach(response.facts)
        except OSError as error:  # it has ended since
            raise Unavailable(f"model '{self.name}' went down: {error}") from error
        return response.facts

    def step(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        step = self._send(request)
        self._steps[step] = self._step_timeout_s * request.max_steps + self.round_trip_s
        step.add_done_callback(self._step_over)
        if len(self._steps) == 1:
            self._first_since_s = self._loop.time()
            if self._timer is None:
                self._look_later()
        return step

    def _step_over(self, step: asyncio.Future[StepResponse]) -> None:
        del self._steps[step]
        self._first_since_s = self._loop.time()

    def _look_later(self) -> None:
        """Look when the first step has had its time, or sooner. Hardly any takes so long: a timer for each would cost
        much of what sending it does."""
        if not self._steps:
            self._timer = None
            return
        due_s = self._first_since_s + next(iter(self._steps.values()))
        # no step that comes first meanwhile is due before the next look
        self._timer = self._loop.call_at(min(due_s, self._loop.time() + self._step_timeout_s), self._look)

    def _look(self) -> None:
        """Whether the first step takes too long. When this comes late, the event loop itself stood still, and the
        answer may be here and not yet read: the step gets its time again. So it does once the LLM was given up: what
        was ended may not have been all of it."""
        now = self._loop.time()
        late_s = now - self._timer.when() if self._timer is not None else 0.0
        if self._steps and now - self._first_since_s >= (longest_s := next(iter(self._steps.values()))):
            self._first_since_s = now
            if late_s < _LATE_S:
                self._lifeline.kill(f"a step took longer than {longest_s:g} s (limits.step_timeout_s)")
        self._look_later()

    async def reload(self) -> None:
        self._lifeline.detach()
        while self._busy:  # the calls that the LLM died in: Triton takes a second to give them up
            self._idle.clear()
            await self._idle.wait()
        try:
            await self._in_thread(self._reload, lambda error: error)
        except RuntimeError as error:
            raise Unavailable(f"model '{self.name}' can't be reloaded: {error}") from error

    def close(self) -> None:
        self._lifeline.detach()
        for _ in range(self.calls_at_once):
            self._jobs.put(None)

    def _send(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        return self._in_thread(lambda: self._exchange(request), self._failed)

    def _exchange(self, request: StepRequest) -> StepResponse:
        return decode_response(self._call(encode_request(request)))

    def _failed(self, error: RuntimeError) -> Exception:
        """What a failed step means."""
        if self.lost:
            return Unavailable(f"model '{self.name}' went down: {error}")
        return RequestFailed(f"a step of model '{self.name}' failed: {error}")

    def _in_thread(self, job: Callable[[], T], failed: Callable[[RuntimeError], Exception]) -> asyncio.Future[T]:
        """Run `job` in one of the client's threads, begun after those given before. failed: what its failure is
        to whoever waits."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._busy += 1

        def settle(result: T | None, error: Exception | None) -> None:
            self._busy -= 1
            if not self._busy:
                self._idle.set()
            if future.done():  # its LLM died meanwhile, or nobody waits any more
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]  # None only where T is None
            else:
                future.set_exception(failed(error if isinstance(error, RuntimeError) else RuntimeError(repr(error))))

        def run() -> None:
            try:
                result = job()
            except Exception as error:  # whatever it is belongs to the one who waits, not to this thread
                self._loop.call_soon_threadsafe(settle, None, error)
            else:
                self._loop.call_soon_threadsafe(settle, result, None)

        self._jobs.put(run)
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except RuntimeError:  # the event loop has been closed
                return

    def _on_death(self, reason: str) -> None:
        running = [step for step in self._steps if not step.done()]
        for step in running:
            step.set_exception(self._failed(RuntimeError(reason)))
        if not running:
            self.on_death(reason)
