# SPDX-License-Identifier: Apache-2.0
"""Keeping the LLMs alive on a host without token_router, which can't end or start a process of another host."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence

import psutil

from tools.triton_server import TritonError, TritonServer
from tools.watcher import ServerDied, is_alive

__all__ = ["LLMWatcher"]

_log = logging.getLogger("tokenrouter.watcher")
_METRIC = re.compile(r'(nv_inference_pending_request_count|nv_inference_exec_count)\{.*model="([^"]+)".*\} (\d+)')
_PENDING, _EXECUTED = "nv_inference_pending_request_count", "nv_inference_exec_count"


class LLMWatcher:
    """Looks after the LLMs of a started server, one `look` at a time: one whose process has died or hangs is loaded
    again. It hangs when calls wait for it and none has ended for `step_limit_s`."""

    def __init__(
        self,
        triton: TritonServer,
        models: Sequence[str],
        step_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._triton = triton
        self._step_limit_s = step_limit_s
        self._clock = clock
        self._processes = {name: self._find(name) for name in models}
        self._moved: dict[str, tuple[int, float]] = {}  # calls executed, and since when there are so many

    def look(self) -> None:
        """Raises ServerDied. What else is wrong is put right, or left for the next look."""
        if self._triton.returncode() is not None:
            raise ServerDied(self._triton.how_it_ended())
        waiting = self._waiting_for_s()
        for name, process in self._processes.items():
            if process is None or not is_alive(process):
                _log.error("%s died; loading it again", name)
                self._reload(name)
            elif waiting.get(name, 0.0) > self._step_limit_s:
                _log.error("%s hangs; ending it", name)
                with contextlib.suppress(psutil.NoSuchProcess):  # it has died just now, which the next look finds
                    process.kill()

    def _reload(self, name: str) -> None:
        self._moved.pop(name, None)
        try:
            self._triton.reload(name)
        except TritonError as error:
            _log.error("%s", error)
            return
        self._processes[name] = self._find(name)
        _log.info("%s was loaded again", name)

    def _waiting_for_s(self) -> dict[str, float]:
        """For how long calls have waited for each model while it ended none; without those for whom none waits."""
        try:
            text = self._triton.metrics()
        except TritonError as error:
            _log.warning("%s", error)
            return {}
        counts = {(kind, model): int(count) for kind, model, count in _METRIC.findall(text)}
        waits: dict[str, float] = {}
        now = self._clock()
        for model in self._processes:
            executed = counts.get((_EXECUTED, model), 0)
            if not counts.get((_PENDING, model)) or self._moved.get(model, (-1, 0.0))[0] != executed:
                self._moved[model] = (executed, now)
            else:
                waits[model] = now - self._moved[model][1]
        return waits

    def _find(self, name: str) -> psutil.Process | None:
        """Its process; None when it has died already, which the next look finds."""
        try:
            return psutil.Process(self._triton.stub_pids()[name])
        except (KeyError, psutil.NoSuchProcess):
            return None
