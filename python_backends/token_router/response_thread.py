# SPDX-License-Identifier: Apache-2.0
"""The thread that talks to Triton's response senders: sends, final flags, and the question whether a
client has gone.

`send` and `is_cancelled` of one sender must not overlap, and neither may come after the final response:
Triton would crash (docs/decisions/0002). One thread for all of them makes that so by construction.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backends.token_router.errors import RequestFailed, TokenRouterError
from python_backends.token_router.responses import Chunk

__all__ = ["Outbox", "ResponseThread", "TritonStream"]

_CANCEL_POLL_S = 0.1  # asking costs 30 to 100 µs a request
_GATHER_S = 0.0004  # in which the calls that a turn of the event loop leads to have left


class TritonStream:
    """A `ResponseStream` to one Triton request.

    outputs: the names that the client asked for; the others are not made.
    prompt_tokens, wake: set before the request is submitted. wake: told of the stream when it has something to send.
    on_cancel: set right after, in the same turn, so before this thread hears of the stream.
    """

    def __init__(self, thread: ResponseThread, sender: Any, outputs: Collection[str]) -> None:
        self._sender = sender
        self._outputs = tuple(outputs)
        self.prompt_tokens = 0
        # Filled by the event loop, emptied by the thread; both ends of a deque are safe to use at once.
        self._unsent: deque[Chunk | TokenRouterError] = deque()
        self._queued = False
        self.ended = False
        self.on_cancel: Callable[[], object] = lambda: None
        self.wake: Callable[[TritonStream], None] = thread.wake

    def send(self, chunk: Chunk) -> None:
        self._put(chunk)

    def fail(self, error: TokenRouterError) -> None:
        self._put(error)

    def _put(self, item: Chunk | TokenRouterError) -> None:
        self._unsent.append(item)
        if not self._queued:
            self._queued = True
            self.wake(self)

    # In the response thread

    def send_unsent(self) -> None:
        """Send what has gathered: successive chunks of one model as one response."""
        self._queued = False
        chunk: Chunk | None = None
        while self._unsent and not self.ended:
            item = self._unsent.popleft()
            if isinstance(item, TokenRouterError):
                if chunk is not None:
                    self._respond(chunk)
                self._respond_error(item)
                return
            if chunk is not None and (chunk.models and item.models and chunk.models[-1] != item.models[0]):
                self._respond(chunk)
                chunk = None
            if chunk is None:
                chunk = item
            else:
                chunk.extend(item)
        if chunk is not None:
            self._respond(chunk)

    def give_up(self, error: Exception) -> None:
        """A response could not be made or sent: end the request all the same. A sender without its final
        flag would keep the client waiting for ever, and the model from being unloaded."""
        if self.ended:
            return
        self.on_cancel()
        with contextlib.suppress(pb_utils.TritonModelException):  # not even that: Triton has closed it
            self._respond_error(RequestFailed(f"a response could not be sent: {error!r}"))

    def cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def _respond(self, chunk: Chunk) -> None:
        final = chunk.finish_reason is not None
        tensors = [pb_utils.Tensor(name, _OUTPUTS[name](chunk, self.prompt_tokens)) for name in self._outputs]
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), final)

    def _respond_error(self, error: TokenRouterError) -> None:
        code = getattr(pb_utils.TritonError, error.code)
        self._send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)), final=True)

    def _send(self, response: Any, final: bool) -> None:
        self.ended = final
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)


class ResponseThread:
    """One thread for all streams of the model."""

    def __init__(self) -> None:
        self._awake: queue.SimpleQueue[Sequence[TritonStream] | None] = queue.SimpleQueue()
        self._streams: set[TritonStream] = set()
        self._log = logging.getLogger("token_router.responses")
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def wake(self, *streams: TritonStream) -> None:
        """They have something to send, or are to be watched from now on."""
        self._awake.put(streams)

    def close(self, timeout_s: float | None = None) -> None:
        """Send what was given before, then end the thread; wait for that no longer than timeout_s."""
        self._awake.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        next_poll = time.monotonic() + _CANCEL_POLL_S
        while True:
            try:
                timeout = max(0.0, next_poll - time.monotonic()) if self._streams else None
                streams = self._awake.get(timeout=timeout)
                if streams is None:
                    return
                for stream in streams:
                    self._serve(stream)
            except queue.Empty:
                pass
            if self._streams and time.monotonic() >= next_poll:
                for stream in list(self._streams):
                    self._poll(stream)
            if time.monotonic() >= next_poll:
                next_poll = time.monotonic() + _CANCEL_POLL_S

    def _serve(self, stream: TritonStream) -> None:
        self._streams.add(stream)
        try:
            stream.send_unsent()
        except Exception as error:  # one client's trouble must not end the answers of all
            self._log.exception("a response could not be sent")
            stream.give_up(error)
        if stream.ended:
            self._streams.discard(stream)

    def _poll(self, stream: TritonStream) -> None:
        try:
            if stream.cancelled():
                self._streams.discard(stream)
                stream.on_cancel()
        except Exception as error:
            self._log.exception("a client could not be asked for")
            self._streams.discard(stream)
            stream.give_up(error)


class Outbox:
    """Before the response thread, in the event loop: gathers the streams that have something to send, and wakes the
    thread a little later, once for all of them. Sending needs the interpreter, and the next steps come first."""

    def __init__(self, thread: ResponseThread, loop: asyncio.AbstractEventLoop) -> None:
        self._thread = thread
        self._loop = loop
        self._streams: list[TritonStream] = []

    def put(self, stream: TritonStream) -> None:
        """The stream has something to send."""
        if not self._streams:
            self._loop.call_later(_GATHER_S, self.flush)
        self._streams.append(stream)

    def flush(self) -> None:
        """Wake the thread now."""
        streams, self._streams = self._streams, []
        self._thread.wake(*streams)


def _strings(values: list[str]) -> Any:
    return np.array([[v.encode() for v in values]], dtype=np.object_).reshape(1, -1)


# The public model's outputs (`public.OUTPUTS`) from a chunk and the prompt's length, with the batch dimension
# of 1. Only those that the client asked for are made: each one costs time for every token.
_OUTPUTS: dict[str, Callable[[Chunk, int], Any]] = {
    "text_output": lambda chunk, _: _strings([chunk.text]),
    "output_ids": lambda chunk, _: np.array([chunk.token_ids], dtype=np.int32),
    "output_models": lambda chunk, _: _strings(chunk.models),
    "output_log_probs": lambda chunk, _: np.array([chunk.log_probs], dtype=np.float32),
    "num_input_tokens": lambda _, prompt_tokens: np.array([[prompt_tokens]], dtype=np.int32),
    "num_output_tokens": lambda chunk, _: np.array([[len(chunk.token_ids)]], dtype=np.int32),
    "finish_reason": lambda chunk, _: _strings([chunk.finish_reason or ""]),
    "usage": lambda chunk, _: _strings([json.dumps(asdict(chunk.usage)) if chunk.usage else ""]),
}
