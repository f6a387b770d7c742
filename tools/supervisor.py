# SPDX-License-Identifier: Apache-2.0
"""From a deployment to a server that makes tokens, and back to nothing left."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tools.control import ControlClient, ControlError
from tools.deployment import ROUTER, Deployment
from tools.errors import UserError
from tools.first_token import FirstToken
from tools.llm_watcher import LLMWatcher
from tools.machine import machine_warnings
from tools.ports import settle_ports
from tools.repository import render
from tools.run_directory import RunDirectory
from tools.signals import on_signals
from tools.sizing.joint import sized
from tools.sizing.sharing import shares_a_gpu
from tools.triton_install import find_triton
from tools.triton_server import TritonError, TritonServer
from tools.validate import require_valid
from tools.watcher import ServerDied, Watcher

__all__ = ["RunningServer", "Supervisor", "running_server"]

_log = logging.getLogger("tokenrouter.supervisor")
_STARTUP_POLL_S = 0.1
_DRAIN_POLL_S = 0.1
_WATCH_POLL_S = 2.0


class RunningServer:
    """What a caller of a running server needs. The urls are host:port, as tritonclient wants them."""

    def __init__(self, triton: TritonServer, control: ControlClient, deployment: Deployment) -> None:
        self._triton = triton
        self.control = control
        self.deployment = deployment
        self.http_url = triton.http_url
        self.grpc_url = triton.grpc_url
        self.metrics_url = triton.metrics_url
        self.log_path = triton.log_path
        self.pid = triton.pid

    def stub_pids(self) -> dict[str, int]:
        """The process of token_router and of each LLM, by the model's name."""
        return self._triton.stub_pids()


class Supervisor:
    """One run: `start`, `watch`, `stop`. Whatever happens, `stop` leaves nothing behind but the log.

    log_path: where Triton's log goes; None = into the run's folder, to vanish with it.
    quit: set it to end `start` or `watch`. hurry: set it to end the wait of a `stop` that drains.
    """

    def __init__(self, deployment: Deployment, log_path: Path | None = None) -> None:
        self.deployment = deployment
        self.log_path = log_path
        self.quit = threading.Event()
        self.hurry = threading.Event()
        self._run: RunDirectory | None = None
        self._triton: TritonServer | None = None
        self._watcher: Watcher | LLMWatcher | None = None

    def start(self) -> RunningServer | None:
        """Check, prepare, start, and wait until every model has answered and a token has been made. On a host that
        only has LLMs, until Triton says that they are loaded.

        None when `quit` was set meanwhile. Raises UserError with the reason as one line.
        """
        self._run = run = RunDirectory.create()  # first, since what dead runs have left takes memory
        require_valid(self.deployment)
        self.deployment = sized(self.deployment)
        for warning in machine_warnings(self.deployment):
            _log.warning("%s", warning)
        install = find_triton()
        ports = settle_ports(self.deployment.server)
        render(self.deployment, run.path / "model_repository")
        # what one model leaves free of a GPU is what the next one sees: two at once would count it twice
        in_turn = shares_a_gpu(self.deployment)
        self._triton = triton = TritonServer(install, run, ports, self.log_path, in_turn)
        control = ControlClient.of(run.path)
        triton.start(_with_mps(run, in_turn) if self.deployment.server.mps else None)
        wait = _StartupWait(self.deployment.server.startup_timeout_s, self.quit, triton)
        if not self.deployment.routes:
            return self._llms_start(triton, control, wait)
        with ThreadPoolExecutor(1) as pool, FirstToken(triton.grpc_url, self.deployment.router) as token:
            if not wait.until(lambda: _loading(triton, control)):
                return None
            made = pool.submit(token.make)
            if not wait.until(lambda: None if made.done() else _starting(control) or "no token has been made yet"):
                return None
            made.result()
        if not wait.until(lambda: _starting(control)):
            return None
        self._watcher = Watcher(triton, control, self.deployment.router)
        return RunningServer(triton, control, self.deployment)

    def _llms_start(self, triton: TritonServer, control: ControlClient, wait: _StartupWait) -> RunningServer | None:
        if not wait.until(lambda: None if triton.is_ready() else "Triton is loading the models"):
            return None
        deployment = self.deployment
        if deployment.server.host in ("127.0.0.1", "localhost"):
            _log.warning("server.host: %s; no other host can reach the models here", deployment.server.host)
        names = [deployment.model_names[index] for index in deployment.here]
        step_limit_s = deployment.limits.step_timeout_s * deployment.batching.run_ahead
        self._watcher = LLMWatcher(triton, names, step_limit_s)
        return RunningServer(triton, control, deployment)

    def watch(self) -> None:
        """Keep the models alive until `quit` is set. Raises ServerDied when tritonserver ends."""
        if self._watcher is None:
            raise RuntimeError("watch before start")
        while not self.quit.wait(_WATCH_POLL_S):
            self._watcher.look()

    def stop(self, *, drain: bool) -> None:
        """End everything; with `drain`, the requests under way may finish within drain_timeout_s first."""
        try:
            if self._triton is not None and self._run is not None:
                control = ControlClient.of(self._run.path)
                if drain and isinstance(self._watcher, Watcher):
                    self._drain(control)
                if self.deployment.routes:
                    _let_go(control, self._triton)
                self._triton.stop()
        finally:
            if self._run is not None:
                self._run.remove()

    def _drain(self, control: ControlClient) -> None:
        limit_s = self.deployment.server.drain_timeout_s
        deadline = time.monotonic() + limit_s
        try:
            control.drain()
            while (left := control.status().unfinished) and time.monotonic() < deadline:
                if self.hurry.wait(_DRAIN_POLL_S):
                    break
        except ControlError as error:
            _log.warning("no draining: %s", error)
            return
        if left:
            _log.warning("%d requests had not finished and were ended", left)


@contextmanager
def running_server(deployment: Deployment, log_path: Path | None = None) -> Iterator[RunningServer]:
    """The deployment served and watched while the block runs; at its end requests are ended, not awaited.

    Signals that come meanwhile are ignored. Raises UserError as `Supervisor.start` does.
    """
    supervisor = Supervisor(deployment, log_path)
    watching = threading.Thread(target=_watch_quietly, args=(supervisor,), name="supervisor")
    try:
        server = supervisor.start()
        if server is None:
            raise RuntimeError("the supervisor was told to quit while it started")
        watching.start()
        yield server
    finally:
        ignoring = ExitStack()
        try:
            supervisor.quit.set()
            ignoring.enter_context(on_signals(signal.SIG_IGN))  # whoever is impatient would leave the server behind
            if watching.ident is not None:
                watching.join()
        finally:
            with ignoring:
                supervisor.stop(drain=False)


def _watch_quietly(supervisor: Supervisor) -> None:
    try:
        supervisor.watch()
    except ServerDied as error:  # the caller sees it from the requests that fail
        _log.error("%s", error)


class _StartupWait:
    """Waiting with one deadline for all that a start consists of."""

    def __init__(self, limit_s: float, quit: threading.Event, triton: TritonServer) -> None:
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._quit = quit
        self._triton = triton

    def until(self, missing: Callable[[], str | None]) -> bool:
        """Wait until `missing` names nothing; False when `quit` was set meanwhile. Raises UserError when it
        waits in vain."""
        while (what := missing()) is not None:
            if (failure := self._triton.load_failure()) is not None:
                raise UserError(failure)
            if self._triton.returncode() is not None:
                raise UserError(self._triton.how_it_ended())
            if self._quit.wait(_STARTUP_POLL_S):
                return False
            if time.monotonic() > self._deadline:
                raise UserError(f"server.startup_timeout_s: not serving after {self._limit_s:g} s: {what}")
        return True


def _with_mps(run: RunDirectory, shared: bool) -> dict[str, str] | None:
    """What Triton's environment gets for MPS, which is started; shared: whether there is a use for it."""
    if not shared:
        _log.info("server.mps: no two models of this host share a GPU, so that MPS is not started")
        return None
    run.mps.start()
    return run.mps.environment


def _loading(triton: TritonServer, control: ControlClient) -> str | None:
    """What is missing before a first request can be sent; None = nothing."""
    if not triton.is_ready():
        return "Triton is loading the models"
    try:
        control.status()
    except ControlError as error:
        return str(error)
    return None


def _starting(control: ControlClient) -> str | None:
    """Which models haven't answered token_router yet, which calls them from its first request on."""
    try:
        waiting = control.status().not_up()
    except ControlError as error:
        return str(error)
    return ", ".join(f"{model} is {state}" for model, state in waiting.items()) or None


def _let_go(control: ControlClient, triton: TritonServer) -> None:
    """End what still runs: Triton doesn't stop while a request or a client's stream is open."""
    try:
        control.abort("the server is shutting down")
        triton.unload(ROUTER)
    except (ControlError, TritonError) as error:
        _log.debug("before the stop: %s", error)
