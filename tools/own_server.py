# SPDX-License-Identifier: Apache-2.0
"""A server for one person: what the demo and the chat start when there is none, and end with themselves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from python_backends.llm.catalog import CATALOG
from python_backends.llm.engines.config import LlamaCppConfig
from tools.deployment import Deployment, load_deployment
from tools.errors import UserError
from tools.models import fetch
from tools.signals import on_signals
from tools.supervisor import RunningServer, running_server

__all__ = ["own_server", "own_server_of"]

_LEAVING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def own_server(config: Path | str | None, console: Console) -> Iterator[RunningServer]:
    """The deployment `config` (None = the shipped default) served while the block runs, on free ports.

    Weights of the catalogue that this machine lacks are fetched first, and their tokenizer with them. However the
    block ends, by SIGTERM or a closed terminal too, the server is shut down. Raises UserError, WeightsError.
    """
    deployment = load_deployment(config)
    if deployment.tokenizer is None:
        raise UserError(f"{config or 'default'}: tokenizer: is null; who asks in words needs one")
    with own_server_of(deployment, console) as server:
        yield server


@contextmanager
def own_server_of(deployment: Deployment, console: Console) -> Iterator[RunningServer]:
    """The same for a deployment that is there already, which may do without a tokenizer."""
    for model in (deployment.models[index] for index in deployment.here):
        if isinstance(model.engine, LlamaCppConfig) and model.engine.weights in CATALOG:
            fetch(model.engine.weights)
    console.print("starting the server ...", style="dim")
    with on_signals(_leave, _LEAVING), running_server(_on_free_ports(deployment)) as server:
        yield server
        console.print("shutting down ...", style="dim")


def _on_free_ports(deployment: Deployment) -> Deployment:
    """The same on whatever ports are free: nobody else has to find this server."""
    free = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return deployment.model_copy(update={"server": deployment.server.model_copy(update=free)})


def _leave(number: int, frame: FrameType | None) -> None:
    """End the block as an exception: by default these signals would leave the server behind."""
    for again in _LEAVING:  # make hands its own SIGTERM on, so that two come at once
        signal.signal(again, signal.SIG_IGN)
    raise SystemExit(128 + number)
