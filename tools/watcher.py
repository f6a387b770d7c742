# SPDX-License-Identifier: Apache-2.0
"""Keeping the models of a started server alive.

Triton neither notices nor restarts a model whose process has died, and says "ready" all the while. So we
watch for ourselves: tritonserver and token_router by their processes. The LLMs are token_router's, which
calls them and loads a dead one again by itself; of them we only log what it says.
"""

from __future__ import annotations

import contextlib
import logging
import time

import psutil

from routers import RouterConfig
from tools.control import ControlClient, ControlError
from tools.deployment import ROUTER
from tools.errors import UserError
from tools.first_token import FirstToken
from tools.triton_server import TritonError, TritonServer

__all__ = ["ServerDied", "Watcher", "is_alive"]

_log = logging.getLogger("tokenrouter.watcher")
_ROUTER_PATIENCE_S = 30.0  # without an answer on the control socket
_WAKE_TIMEOUT_S = 30.0


class ServerDied(Exception):
    """tritonserver has ended by itself. The message is one line."""


class Watcher:
    """Looks after a started server, one `look` at a time; remembers since when what has been wrong."""

    def __init__(self, triton: TritonServer, control: ControlClient, router: RouterConfig) -> None:
        self._triton = triton
        self._control = control
        self._router_config = router
        self._router = self._find_router()
        self._down_since: dict[str, float] = {}

    def look(self) -> None:
        """Raises ServerDied. What else is wrong is put right, or left for the next look."""
        if self._triton.returncode() is not None:
            raise ServerDied(self._triton.how_it_ended())
        if not is_alive(self._router):
            _log.error("%s died; starting it again", ROUTER)
            self._reload_router()
            return
        try:
            status = self._control.status()
        except ControlError as error:
            self._router_is_silent(error)
            return
        missing = set(status.not_up())
        self._note(up={ROUTER, *status.models} - missing)
        for model in missing:
            self._down_for(model)

    def _router_is_silent(self, error: ControlError) -> None:
        if self._down_for(ROUTER) > _ROUTER_PATIENCE_S:
            _log.error("%s hangs (%s); starting it again", ROUTER, error)
            if self._router is not None:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has died just now
                    self._router.kill()
            self._reload_router()

    def _down_for(self, model: str) -> float:
        """Seconds since `model` was first seen not to answer, which is logged then."""
        if model not in self._down_since:
            _log.warning("%s does not answer", model)
            self._down_since[model] = time.monotonic()
        return time.monotonic() - self._down_since[model]

    def _note(self, up: set[str]) -> None:
        for model in up & set(self._down_since):
            _log.info("%s answers again after %.1f s", model, time.monotonic() - self._down_since.pop(model))

    def _reload_router(self) -> None:
        self._down_since[ROUTER] = time.monotonic()  # patience anew, whether it works or not
        try:
            self._triton.reload(ROUTER)
        except TritonError as error:
            _log.error("%s", error)
            return
        _log.info("%s was loaded again", ROUTER)
        self._wake_router()

    def _wake_router(self) -> None:
        """A new token_router calls the models from its first request on: this is that one."""
        self._router = self._find_router()
        try:
            with FirstToken(self._triton.grpc_url, self._router_config) as token:
                token.make(_WAKE_TIMEOUT_S)
        except UserError as error:
            _log.warning("%s: %s", ROUTER, error)

    def _find_router(self) -> psutil.Process | None:
        """Its process; None when it has died already, which the next look finds."""
        try:
            return psutil.Process(self._triton.stub_pids()[ROUTER])
        except (KeyError, psutil.NoSuchProcess):
            return None


def is_alive(process: psutil.Process | None) -> bool:
    """Whether there is a process, and it runs."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
