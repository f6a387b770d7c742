# SPDX-License-Identifier: Apache-2.0
"""One tritonserver process over one run directory: start, ready, load and unload, stop, nothing left."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from python_backends.llm.engines.config import CALL_THREADS
from tools.deployment import ServerConfig
from tools.errors import UserError
from tools.run_directory import RunDirectory
from tools.triton_install import TritonInstall

__all__ = ["TritonError", "TritonServer", "reachable"]

_EXIT_TIMEOUT_S = 5  # what Triton gives its models; a client's open stream can make it take longer, or for ever
_KILL_AFTER_S = 8.0
_RPC_TIMEOUT_S = 60.0
_ERROR = re.compile(r"error:|E\d{4} ")  # E and the date as MMDD
# what it says on a machine without a GPU
_HARMLESS = ("CudaDriverHelper", "DCGM", "NVML")
_LOAD_FAILURE = re.compile(r"failed to load '([^']+)' version \d+: (.*)")


class TritonError(Exception):
    """tritonserver refused, or did not answer. The message is one line."""


class TritonServer:
    """run: its folder holds model_repository/ and gets backends/ and triton.log. server: no port at 0. in_turn: load
    the models one after another; else up to four at once, which is Triton's default."""

    def __init__(
        self,
        install: TritonInstall,
        run: RunDirectory,
        server: ServerConfig,
        log_path: Path | None = None,
        in_turn: bool = False,
    ) -> None:
        self.install = install
        self.run = run
        self.server = server
        self.log_path = log_path or run.path / "triton.log"
        self._in_turn = in_turn
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def http_url(self) -> str:
        """host:port, as tritonclient wants it; so for grpc_url and metrics_url."""
        return self._url(self.server.http_port)

    @property
    def grpc_url(self) -> str:
        return self._url(self.server.grpc_port)

    @property
    def metrics_url(self) -> str:
        return self._url(self.server.metrics_port)

    @property
    def pid(self) -> int:
        """Of tritonserver. Raises RuntimeError before `start`."""
        return self._started().pid

    def start(self, more: Mapping[str, str] | None = None) -> None:
        """Start the process; it loads every model of the repository and ends if one fails. more: environment variables
        that it and the models get too.

        Raises UserError when the log can't be written.
        """
        backends = self.run.path / "backends"
        self.install.make_backend_directory(backends)
        environment = os.environ | self.install.environment() | {"TOKENROUTER_RUN_DIR": str(self.run.path)}
        environment["TOKENROUTER_TRITON_HTTP"] = self.http_url
        environment |= more or {}
        try:
            log = self.log_path.open("wb")
        except OSError as error:
            raise UserError(f"{self.log_path}: can't be written: {error.strerror}") from error
        with log:
            self._process = subprocess.Popen(
                self._command(backends),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal is for the supervisor, which drains first
            )

    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._started().poll()

    def is_ready(self) -> bool:
        """Whether Triton says that every model is loaded (it doesn't notice when one dies later)."""
        try:
            return self._http("GET", "/v2/health/ready", timeout_s=2.0)[0] == 200
        except TritonError:
            return False

    def metrics(self) -> str:
        """Triton's metrics, in the text format of Prometheus. Raises TritonError."""
        return self._http("GET", "/metrics", timeout_s=2.0, port=self.server.metrics_port)[1]

    def load(self, model: str) -> None:
        """Load a model that is unloaded. Raises TritonError with Triton's reason.

        A large LLM takes minutes, as it may at the start. Giving up earlier would be no help: Triton goes on, and what
        is asked for next waits for that.
        """
        self._repository(model, "load", max(_RPC_TIMEOUT_S, self.server.startup_timeout_s))

    def unload(self, model: str) -> None:
        """Refuse new requests to a model and let it go once those running have ended. Raises TritonError."""
        self._repository(model, "unload", _RPC_TIMEOUT_S)

    def reload(self, model: str) -> None:
        """Unload and load, the only way in which Triton starts a model's process anew. Raises TritonError."""
        self.unload(model)
        self.load(model)

    def stub_pids(self) -> dict[str, int]:
        """The process of each model written in Python, by the model's name."""
        pids = {}
        for process in self.run.processes():  # a dead one, not yet waited for, has no command line
            if (name := _model_of(process.info["cmdline"])) is not None:
                pids[name] = process.pid
        return pids

    def load_failure(self) -> str | None:
        """Why a model failed to load, as one line from Triton's log; None when none did."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        found = _LOAD_FAILURE.search(text)
        if found is None:
            return None
        reason = found[2].split("\\n", 1)[0].removesuffix('"').removeprefix("Internal: ")  # the log escapes newlines
        return f"model '{found[1]}' failed to load: {reason}"

    def how_it_ended(self) -> str:
        """The exit status of a server that has ended, and the last error in its log, as one line."""
        code = self.returncode()
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if _ERROR.match(line) and not any(noise in line for noise in _HARMLESS)]
        return f"tritonserver ended with {how}: {errors[-1] if errors else 'there is no error in its log'}"

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that takes too long. What it leaves, `RunDirectory.remove` clears."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _command(self, backends: Path) -> list[str]:
        s = self.server
        python_backend = {
            "shm-region-prefix-name": self.run.shm_prefix,
            "shm-default-byte-size": 16 << 20,  # it grows by copying; a step's tensors fit in this
            "shm-growth-byte-size": 16 << 20,
            # calls between models and responses to clients share one pool: with the default 32 threads
            # and as many calls under way a response waits for more than a second
            "thread-pool-size": CALL_THREADS,
        }
        return [
            str(self.install.binary),
            f"--model-repository={self.run.path / 'model_repository'}",
            f"--backend-directory={backends}",
            *(f"--{kind}-address={s.host}" for kind in ("http", "grpc", "metrics")),
            f"--http-port={s.http_port}",
            f"--grpc-port={s.grpc_port}",
            f"--metrics-port={s.metrics_port}",
            f"--log-verbose={s.log_verbose}",
            "--allow-gpu-metrics=false",
            "--pinned-memory-pool-byte-size=0",
            "--model-control-mode=explicit",  # the only mode in which a dead model can be brought back
            "--load-model=*",
            "--disable-auto-complete-config",  # a rendered config is complete; completing starts each stub twice
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
            *(["--model-load-thread-count=1"] if self._in_turn else []),
            *(f"--backend-config=python,{key}={value}" for key, value in python_backend.items()),
        ]

    def _repository(self, model: str, action: str, timeout_s: float) -> None:
        status, body = self._http("POST", f"/v2/repository/models/{model}/{action}", timeout_s=timeout_s)
        if status != 200:
            raise TritonError(f"{action} of model '{model}' failed: {' '.join(body.split())}")

    def _http(self, method: str, path: str, timeout_s: float, port: int | None = None) -> tuple[int, str]:
        """port: None = that of HTTP."""
        host = reachable(self.server.host)
        connection = http.client.HTTPConnection(host, port or self.server.http_port, timeout=timeout_s)
        try:
            # an idle kept-alive connection would hold up Triton's exit
            connection.request(method, path, headers={"Connection": "close"})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise TritonError(f"tritonserver did not answer {path}: {error}") from error
        finally:
            connection.close()

    def _url(self, port: int) -> str:
        return f"{reachable(self.server.host)}:{port}"

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("tritonserver has not been started")
        return self._process


def reachable(host: str) -> str:
    """An address that a client can use for a server that listens on `host`."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def _model_of(command: list[str]) -> str | None:
    """The model in a stub's command line, whose instance it names as <model>_<group>_<number>."""
    for argument in command:
        if found := re.fullmatch(r"(.+)_\d+_\d+", argument):
            return found[1]
    return None
