# SPDX-License-Identifier: Apache-2.0
"""A deployment on two hosts: its LLM on a far one (perf.far_host), the rest here."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from perf.far_host import FarHost
from tools.deployment import Deployment

__all__ = ["FarServer", "far_server", "with_far_models"]

_COMMAND = str(Path(sys.executable).with_name("tokenrouter"))
_END_S = 40.0
_PORTS = {"host": "0.0.0.0", "http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}  # a namespace has its own


class FarServer:
    """`tokenrouter serve --only` on the far host, serving. process: the supervisor's. Raises OSError when it ends
    instead; its reason is on stderr."""

    def __init__(self, far: FarHost, config: Path, only: str) -> None:
        command = [*far.command, _COMMAND, "serve", str(config), "--only", only]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
        self._lines = self.process.stdout or iter(())
        if not any("Ctrl-C" in line for line in self._lines):
            self.end()
            raise OSError(f"the far server did not start: {' '.join(command)}")

    def end(self) -> None:
        """SIGTERM, unless it has ended; then wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(_END_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


def with_far_models(deployment: Deployment, far: FarHost, names: list[str]) -> Deployment:
    """The same with these models on the far host."""
    models = [
        m.model_copy(update={"url": f"{far.address}:{_PORTS['grpc_port']}"}) if m.name in names else m
        for m in deployment.models
    ]
    return deployment.model_copy(update={"models": models})


@contextmanager
def far_server(deployment: Deployment, far: FarHost, config: Path, only: str) -> Iterator[FarServer]:
    """The models `only` of a deployment, served on the far host. config: where its YAML is written."""
    given = deployment.model_dump(mode="json")
    config.write_text(yaml.safe_dump({**given, "server": {**given["server"], **_PORTS}}))
    server = FarServer(far, config, only)
    try:
        yield server
    finally:
        server.end()
