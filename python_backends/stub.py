# SPDX-License-Identifier: Apache-2.0
"""What every Triton stub process of ours does: end with its server, and log through it."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

__all__ = ["exit_with_parent", "log_to_triton"]

_POLL_S = 1.0


def exit_with_parent() -> None:
    """End this process when its tritonserver is gone: a stub blocked in an IPC wait would stay for ever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class _TritonHandler(logging.Handler):
    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._send = {logging.ERROR: logger.log_error, logging.WARNING: logger.log_warn, logging.INFO: logger.log_info}

    def emit(self, record: logging.LogRecord) -> None:
        level = max((n for n in self._send if n <= record.levelno), default=logging.INFO)
        self._send[level](self.format(record))


def log_to_triton(logger: Any) -> None:
    """Send this process's log, INFO and up, through pb_utils.Logger."""
    root = logging.getLogger()
    root.handlers = [_TritonHandler(logger)]
    root.setLevel(logging.INFO)
