# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter serve`: a supervisor in the terminal."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.logging import RichHandler

from tools.deployment import ENSEMBLE, ROUTER, load_deployment
from tools.errors import UserError
from tools.supervisor import RunningServer, Supervisor
from tools.watcher import ServerDied

__all__ = ["serve"]


def serve(config: str | None, log_path: Path | None) -> None:
    """Returns once a signal has ended it and nothing is left. Raises UserError when it can't start, or
    when tritonserver dies."""
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=Console(stderr=True), show_path=False)])
    logging.getLogger("tokenrouter").setLevel(logging.INFO)
    supervisor = Supervisor(load_deployment(config), log_path)
    # The supervisor waits on its events in a thread of its own: a signal's handler runs in the main one, and
    # would wait for ever for an event's lock that the code it interrupted holds.
    with ThreadPoolExecutor(1) as pool, _signals(supervisor):
        pool.submit(_serve, supervisor, Console(soft_wrap=True, highlight=False)).result()


def _serve(supervisor: Supervisor, console: Console) -> None:
    drain = False
    try:
        console.print(f"starting {', '.join(supervisor.deployment.model_names)} ...", style="dim")
        if (server := supervisor.start()) is not None:
            _print_endpoints(server, console)
            drain = True
            supervisor.watch()
    except ServerDied as error:
        drain = False
        raise UserError(str(error)) from error
    finally:
        if supervisor.quit.is_set():
            console.print("stopping; running requests may finish" if drain else "stopping", style="dim")
        supervisor.stop(drain=drain)


def _print_endpoints(server: RunningServer, console: Console) -> None:
    deployment = server.deployment
    console.print(f"[bold green]serving[/] {' + '.join(deployment.model_names)}, router {deployment.router.name}")
    rows = {
        "gRPC": f"{server.grpc_url}  (models {ROUTER} and {ENSEMBLE})",
        "HTTP": f"http://{server.http_url}/v2/models/{ROUTER}/generate_stream",
        "metrics": f"http://{server.metrics_url}/metrics",
        "log": str(server.log_path),
    }
    for name, value in rows.items():
        console.print(f"  {name:<8} {value}", markup=False)
    console.print("Ctrl-C stops it", style="dim")


@contextmanager
def _signals(supervisor: Supervisor) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP end the supervisor; a SIGINT after that ends the drain too."""

    def handle(number: int, frame: FrameType | None) -> None:
        if supervisor.quit.is_set() and number == signal.SIGINT:
            supervisor.hurry.set()
        supervisor.quit.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
