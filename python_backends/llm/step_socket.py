# SPDX-License-Identifier: Apache-2.0
"""The LLM's end of the Unix socket that the router on this host sends its steps by (docs/decisions/0016).

A message either way is a frame: the number of bytes that follow, what they are, the bytes. A request is an encoded
`StepRequest`; it is answered by an encoded `StepResponse`, or by a refusal's text. Answers come in the order of the
requests. The socket's address is abstract: no file is left behind, whatever ends this process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from python_backends.llm.wire import Wire

__all__ = ["ANSWER", "FRAME", "REFUSAL", "StepSocket", "of_same_user", "socket_address"]

FRAME = struct.Struct("=II")  # bytes that follow; what they are
ANSWER, REFUSAL = 0, 1

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_PAUSE_S = 0.1  # after an `accept` that failed


def socket_address(name: str) -> str:
    """Where the socket of that name (`LLMFacts.socket`) listens."""
    return f"\0{name}"


def of_same_user(end: socket.socket) -> bool:
    """Whether the process at the other end has the same user: an abstract address has no permissions."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


class StepSocket:
    """Answers one router at a time, in a thread of its own; the next one is heard when that one has hung up.

    name: of the socket, unlike any other's. answer: a request's tensor to its response's, called in that thread; what
    it raises is told to the router as a refusal.
    Raises OSError when there can be no such socket.
    """

    def __init__(self, answer: Callable[[Wire], Wire]) -> None:
        self.name = f"tokenrouter-{os.getpid()}-{secrets.token_hex(8)}"
        self._answer = answer
        self._closing = False
        self._router: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_address(self.name))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def hang_up(self) -> None:
        """Hear no more of the present router, once its step is over."""
        if self._router is not None:
            with contextlib.suppress(OSError):  # it has hung up already
                self._router.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Answer the steps that have come, hang up, and listen no more. The answers are lost if the router sends yet
        another step: it finds that it was hung up on."""
        self._closing = True
        for end in (self._listener, self._router):
            if end is not None:
                with contextlib.suppress(OSError):  # the router has hung up already
                    end.shutdown(socket.SHUT_RD)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._router, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor is left
                time.sleep(0.0 if self._closing else _PAUSE_S)
                continue
            with self._router, contextlib.suppress(OSError):  # the router has gone
                if of_same_user(self._router) and not self._closing:
                    self._serve(self._router)

    def _serve(self, router: socket.socket) -> None:
        with router.makefile("rb") as requests:
            while len(header := requests.read(FRAME.size)) == FRAME.size:
                size, _ = FRAME.unpack(header)
                request = requests.read(size)
                if len(request) < size:
                    return
                router.sendall(self._framed(request))

    def _framed(self, request: bytes) -> bytes:
        """The answer to this request."""
        try:
            answer = self._answer(np.frombuffer(request, dtype=np.int32))
        except Exception as error:  # what is wrong with one call ends no other
            text = f"{type(error).__name__}: {error}".encode()
            return FRAME.pack(len(text), REFUSAL) + text
        return FRAME.pack(answer.nbytes, ANSWER) + answer.tobytes()
