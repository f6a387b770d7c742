# SPDX-License-Identifier: Apache-2.0
"""Finding a server that runs on this machine, as another process serves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.control import ControlClient
from tools.errors import UserError
from tools.run_directory import RunDirectory
from tools.triton_server import reachable

__all__ = ["FoundServer", "find_server"]


@dataclass(frozen=True)
class FoundServer:
    """A run's tritonserver. pid: its process, parent: the one that supervises it. grpc_url: host:port."""

    path: Path
    pid: int
    parent: int
    grpc_url: str

    @property
    def control(self) -> ControlClient:
        """The way to its token_router."""
        return ControlClient.of(self.path)

    def models(self) -> list[str]:
        """Those that were rendered for it."""
        return sorted(path.parent.name for path in self.path.glob("model_repository/*/config.pbtxt"))


def find_server(which: str) -> FoundServer:
    """`which`: "auto" = the only one of this user; or its process id, or that of `tokenrouter serve`; or its run
    directory. Raises UserError, with those that there are, when there is none or it isn't clear which."""
    servers = [server for run in RunDirectory.running() if (server := _server_of(run)) is not None]
    chosen = [s for s in servers if which == "auto" or which.rstrip("/") in (str(s.pid), str(s.parent), str(s.path))]
    if len(chosen) == 1:
        return chosen[0]
    there = ", ".join(f"{s.pid} ({s.path})" for s in servers) or "none"
    why = "several servers run" if chosen else "no such server runs"
    raise UserError(f"--server: got {which}; {why} (there are: {there})")


def _server_of(run: RunDirectory) -> FoundServer | None:
    for process in run.processes():
        options = dict(
            word[2:].split("=", 1) for word in process.info["cmdline"] or [] if word.startswith("--") and "=" in word
        )
        if "grpc-port" not in options:
            continue  # a stub
        host = reachable(options["grpc-address"])
        try:
            parent = process.ppid()
        except psutil.NoSuchProcess:
            return None
        return FoundServer(run.path, process.pid, parent, f"{host}:{options['grpc-port']}")
    return None
