# SPDX-License-Identifier: Apache-2.0
"""Choosing and checking the ports before Triton is started."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

from tools.deployment import ServerConfig
from tools.errors import UserError

__all__ = ["settle_ports"]


def settle_ports(server: ServerConfig) -> ServerConfig:
    """`server` with a free port for every 0. Raises UserError when a port or the host can't be had."""
    ports: dict[str, int] = {}
    problems: list[str] = []
    with ExitStack() as held:  # all three at once, or the same free port could come twice
        for field in ("http_port", "grpc_port", "metrics_port"):
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # so that connections of an earlier run in TIME_WAIT don't count as "in use"
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = getattr(server, field)
            try:
                listener.bind((server.host, port))
                listener.listen()
            except OSError as error:
                problems.append(_problem(server.host, field, port, error))
            else:
                ports[field] = listener.getsockname()[1]
    if problems:
        raise UserError(dict.fromkeys(problems))
    return server.model_copy(update=ports)


def _problem(host: str, field: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"server.{field}: port {port} of {host} is in use; choose another, or 0 for a free one"
    if error.errno == errno.EACCES:
        return f"server.{field}: port {port} needs more rights; choose one from 1024 on, or 0 for a free one"
    return f"server.host: can't listen on {host!r}: {error.strerror or error}; give an IPv4 address of this machine"
