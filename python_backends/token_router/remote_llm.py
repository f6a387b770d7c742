# SPDX-License-Identifier: Apache-2.0
"""An LLM on another host: its client, and how it is known that it lives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from python_backends.llm.contract import LLMFacts
from python_backends.llm.wire import Wire
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.lifeline import Lifeline
from python_backends.token_router.llm_client import LLMClient, ThreadedLLMClient
from python_backends.token_router.remote_triton import LLMLost, RemoteModel, RemoteTriton

__all__ = ["remote_llm_client"]

_BEAT_S = 1.0  # between an answer and the next heartbeat
_BEATS = 8  # of the last heartbeats the quickest is the round trip: in the others, this process was busy


class _RemoteLifeline(Lifeline):
    """The connection to another host. The LLM is lost with it: when it ends, when a call goes unanswered, when
    nothing comes back for `silence_s` (heartbeats), and when a step takes too long, since its process is not ours to
    end."""

    def __init__(self, remote: RemoteTriton, silence_s: float) -> None:
        super().__init__()
        self._remote = remote
        self._beat_s = min(_BEAT_S, silence_s / 4)
        self._loop = asyncio.get_running_loop()
        self._life = 0  # counts them, so that what is said of an earlier one isn't taken for this one
        self._attached = False
        self._timer: asyncio.TimerHandle | None = None
        self._round_trips_s: deque[float] = deque(maxlen=_BEATS)

    @property
    def lost(self) -> bool:
        return not self._attached

    @property
    def round_trip_s(self) -> float:
        return min(self._round_trips_s, default=0.0)

    def attach(self, facts: LLMFacts) -> None:
        self._attached = True
        self._remote.watch(partial(self.loses(), f"the connection to {self._remote.url} has ended"))
        self._beat()

    def detach(self) -> None:
        self._life += 1
        self._attached = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._round_trips_s.clear()
        self._remote.abandon()

    def kill(self, reason: str) -> None:
        self._over(self._life, f"{self._remote.url}: {reason}")

    def loses(self) -> Callable[[str], None]:
        """What to tell the reason to when the LLM of the present life is lost. Any thread may, at any time."""
        return partial(self._soon, self._over, self._life)

    def _over(self, life: int, reason: str) -> None:
        if self._attached and life == self._life:
            self.detach()
            self.on_death(reason)

    def _beat(self) -> None:
        """Ask whether the model is there, and how long that takes."""
        life, sent_s = self._life, time.monotonic()

        def answered(problem: str | None) -> None:
            self._soon(self._beaten, life, time.monotonic() - sent_s, problem)

        self._remote.ask(answered)

    def _beaten(self, life: int, took_s: float, problem: str | None) -> None:
        if not self._attached or life != self._life:
            return
        if problem is not None:
            self._over(life, f"{self._remote.url}: {problem}")
            return
        self._round_trips_s.append(took_s)
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    def _soon(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(call, *args)


def remote_llm_client(index: int, config: RuntimeConfig) -> LLMClient:
    """The way to LLM number `index`, which has a url. To be called in the event loop's thread; nothing is sent yet."""
    llm, limits = config.models[index], config.limits
    if llm.url is None:
        raise ValueError(f"model '{llm.name}' has no url")
    model = RemoteModel(config.model_names, index, config.router)
    remote = RemoteTriton(model, llm.url, limits.silence_s)
    lifeline = _RemoteLifeline(remote, limits.silence_s)

    def call(wire: Wire) -> Wire:
        loses, says_hello = lifeline.loses(), lifeline.lost
        try:
            # a step is timed by the client; a hello isn't
            return remote.infer(wire, limits.step_timeout_s if says_hello else None)
        except RuntimeError as error:
            if says_hello:
                remote.abandon()  # who comes up there next may be another: the next hello connects, and checks, anew
            if isinstance(error, LLMLost):
                loses(str(error))
            raise

    return ThreadedLLMClient(llm.name, call, remote.connect, limits.step_timeout_s, lifeline)
