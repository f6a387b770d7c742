# SPDX-License-Identifier: Apache-2.0
"""The signals that ask a command to end: Ctrl-C, `kill`, a closed terminal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

__all__ = ["ENDING", "Handler", "on_signals"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object] | signal.Handlers
"""What `signal.signal` takes."""


@contextmanager
def on_signals(handler: Handler, numbers: Sequence[signal.Signals] = ENDING) -> Iterator[None]:
    """While the block runs, `handler` is what these signals meet. In any thread but the main one, which
    alone may say so, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
