# SPDX-License-Identifier: Apache-2.0
"""An LLM of the backend `llm` on this host: it says hello by BLS, and takes its steps by the socket that it names
(docs/decisions/0016)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np

from python_backends.llm.contract import LLMFacts, StepRequest, StepResponse
from python_backends.llm.step_socket import FRAME, REFUSAL, of_same_user, socket_address
from python_backends.llm.wire import Wire, decode_response, encode_request
from python_backends.token_router.errors import Unavailable
from python_backends.token_router.lifeline import ProcessLifeline
from python_backends.token_router.llm_client import ThreadedLLMClient

__all__ = ["LocalLLMClient"]


class _StepStream(asyncio.Protocol):
    """The router's end of the socket: requests out, answers in, in the same order.

    failed: what the failure of a step is to whoever waits for it. on_lost: called when the LLM has hung up.
    """

    def __init__(self, failed: Callable[[RuntimeError], Exception], on_lost: Callable[[], None]) -> None:
        self._failed = failed
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[asyncio.Future[StepResponse]] = deque()
        self._received = bytearray()

    def ask(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        """Send a step."""
        future: asyncio.Future[StepResponse] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            future.set_exception(self._failed(RuntimeError("its socket is closed")))
            return future
        self._waiting.append(future)
        wire = encode_request(request)
        self._transport.write(FRAME.pack(wire.nbytes, 0) + wire.tobytes())
        return future

    def hang_up(self) -> None:
        """Nothing more is said or heard."""
        self._on_lost = lambda: None
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= FRAME.size:
            size, kind = FRAME.unpack_from(self._received)
            end = FRAME.size + size
            if len(self._received) < end:
                return
            message = bytes(self._received[FRAME.size : end])
            del self._received[:end]
            self._answered(self._waiting.popleft(), message, kind)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()
        for future in self._waiting:
            if not future.done():
                future.set_exception(self._failed(RuntimeError("it has closed its socket")))
        self._waiting.clear()

    def _answered(self, future: asyncio.Future[StepResponse], message: bytes, kind: int) -> None:
        if future.done():  # nobody waits any more
            return
        try:
            if kind == REFUSAL:
                raise RuntimeError(message.decode(errors="replace"))
            future.set_result(decode_response(np.frombuffer(message, dtype=np.int32)))
        except (RuntimeError, ValueError) as error:
            future.set_exception(self._failed(RuntimeError(str(error))))


class LocalLLMClient(ThreadedLLMClient):
    """Arguments as those of ThreadedLLMClient; `call` is for the hello only."""

    calls_at_once = 1

    def __init__(
        self,
        name: str,
        call: Callable[[Wire], Wire],
        reload: Callable[[], None],
        step_timeout_s: float,
        lifeline: ProcessLifeline,
    ) -> None:
        super().__init__(name, call, reload, step_timeout_s, lifeline)
        self._process = lifeline
        self._stream: _StepStream | None = None

    async def hello(self) -> LLMFacts:
        self._hang_up()
        facts = await super().hello()
        if facts.socket is None:
            raise Unavailable(f"model '{self.name}' names no socket for its steps")
        stream = _StepStream(self._failed, self._stream_lost)
        try:
            transport, _ = await self._loop.create_unix_connection(lambda: stream, socket_address(facts.socket))
            if not of_same_user(transport.get_extra_info("socket")):
                stream.hang_up()
                raise PermissionError("another user's process has its address")
        except OSError as error:  # it has ended since
            raise Unavailable(f"model '{self.name}' can't be reached by its socket: {error}") from error
        self._stream = stream
        return facts

    async def reload(self) -> None:
        self._hang_up()
        await self._process.gone()  # two lives at once would share the memory of one
        await super().reload()

    def close(self) -> None:
        self._hang_up()
        super().close()

    def _send(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        if self._stream is None:
            raise RuntimeError("stepped before the LLM said hello")
        return self._stream.ask(request)

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.hang_up()
            self._stream = None

    def _stream_lost(self) -> None:
        """The LLM has hung up: it has ended, or ends once its step is over."""
        if not self.lost:
            self._process.release(self._step_timeout_s)
            self._on_death(self._process.killed_for or "it has ended, or was unloaded")
