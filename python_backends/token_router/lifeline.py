# SPDX-License-Identifier: Apache-2.0
"""How it is known that an LLM still lives, apart from what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable

from python_backends.llm.contract import LLMFacts

__all__ = ["Lifeline", "ProcessLifeline"]


class Lifeline(ABC):
    """Of one LLM, from its hello to its end. Used in the event loop's thread only.

    on_death: called once when the LLM that was attached is found to be gone, with the reason; `lost` is true then.
    """

    def __init__(self) -> None:
        self.on_death: Callable[[str], None] = lambda reason: None

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether no LLM is attached: none has been yet, it was detached, or it is gone."""

    @property
    def round_trip_s(self) -> float:
        """`LLMClient.round_trip_s`."""
        return 0.0

    @abstractmethod
    def attach(self, facts: LLMFacts) -> None:
        """The LLM that said this is watched from now on. Raises OSError when it is gone already."""

    @abstractmethod
    def detach(self) -> None:
        """Nothing is watched any more."""

    @abstractmethod
    def kill(self, reason: str) -> None:
        """The LLM hangs: give it up, so that `on_death` is called, now or soon. reason: how that is known."""


class ProcessLifeline(Lifeline):
    """The process that holds the model, watched through a pidfd, so that its death is known at once: Triton itself
    goes on reporting the model as ready, and a call under way fails only a second later.

    To end the process is the only way out of a blocking call.

    killed_for: why this ended the process that is, or last was, attached; "" = it did not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.killed_for = ""
        self._pidfd = -1
        self._gone = asyncio.Event()  # the process of the last `release`
        self._gone.set()

    @property
    def lost(self) -> bool:
        return self._pidfd < 0

    def attach(self, facts: LLMFacts) -> None:
        self.detach()
        if facts.pid is None:
            raise OSError("it has no process of its own")
        self._pidfd = os.pidfd_open(facts.pid)
        self.killed_for = ""
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    def detach(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def kill(self, reason: str) -> None:
        if self._pidfd >= 0:
            self.killed_for = reason
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def release(self, grace_s: float) -> None:
        """The LLM is lost, though its process may live, as while it gives its memory back: it is ended if it does so
        `grace_s` from now."""
        if self._pidfd < 0:
            return
        loop, pidfd, self._pidfd = asyncio.get_running_loop(), self._pidfd, -1
        timer = loop.call_later(grace_s, _kill, pidfd)
        gone = self._gone = asyncio.Event()

        def ended() -> None:
            loop.remove_reader(pidfd)
            timer.cancel()
            os.close(pidfd)
            gone.set()

        loop.add_reader(pidfd, ended)

    async def gone(self) -> None:
        """Until the process that was released has ended."""
        await self._gone.wait()

    def _ended(self) -> None:
        self.detach()
        self.on_death(self.killed_for or "its process has ended")


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
