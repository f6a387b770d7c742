# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter serve`: a supervisor in the terminal."""

from __future__ import annotations

import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from rich.console import Console
from rich.logging import RichHandler

from tools.deployment import ENSEMBLE, ROUTER, Deployment, load_node
from tools.errors import UserError
from tools.signals import on_signals
from tools.supervisor import RunningServer, Supervisor
from tools.watcher import ServerDied

__all__ = ["serve"]

_SIGNAL_POLL_S = 0.2


def serve(config: str | None, log_path: Path | None, only: str | None = None) -> None:
    """Returns once a signal has ended it and nothing is left. Raises UserError when it can't start, or
    when tritonserver dies."""
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=Console(stderr=True), show_path=False)])
    logging.getLogger("tokenrouter").setLevel(logging.INFO)
    supervisor = Supervisor(load_node(config, only), log_path)
    # A signal's handler interrupts the main thread anywhere, so it may touch nothing that a lock guards: it only
    # notes the signal. What the supervisor does and waits for is another thread's.
    arrived: SimpleQueue[int] = SimpleQueue()
    with ThreadPoolExecutor(1) as pool, on_signals(lambda number, _: arrived.put(number)):
        work = pool.submit(_serve, supervisor, Console(soft_wrap=True, highlight=False))
        while not work.done():
            _obey(arrived, supervisor)
        work.result()


def _obey(arrived: SimpleQueue[int], supervisor: Supervisor) -> None:
    """The next signal ends the supervisor; a SIGINT after it ends the drain too. Returns soon without one: a
    signal that the kernel gives to another thread doesn't wake this one."""
    try:
        number = arrived.get(timeout=_SIGNAL_POLL_S)
    except Empty:
        return
    if supervisor.quit.is_set() and number == signal.SIGINT:
        supervisor.hurry.set()
    supervisor.quit.set()


def _serve(supervisor: Supervisor, console: Console) -> None:
    drain = False
    try:
        console.print(f"starting {', '.join(_names_here(supervisor.deployment))} ...", style="dim")
        if (server := supervisor.start()) is not None:
            _print_endpoints(server, console)
            drain = True
            supervisor.watch()
    except ServerDied as error:
        drain = False
        raise UserError(str(error)) from error
    finally:
        try:
            if supervisor.quit.is_set():
                with suppress(OSError):  # the terminal may be what went
                    console.print("stopping; running requests may finish" if drain else "stopping", style="dim")
        finally:
            supervisor.stop(drain=drain)


def _print_endpoints(server: RunningServer, console: Console) -> None:
    deployment = server.deployment
    if deployment.routes:
        what = f"{' + '.join(deployment.model_names)}, router {deployment.router.name}"
        rows = {
            "gRPC": f"{server.grpc_url}  (models {ROUTER} and {ENSEMBLE})",
            "HTTP": f"http://{server.http_url}/v2/models/{ROUTER}/generate_stream",
        }
    else:
        what = f"{', '.join(_names_here(deployment))}, for the {ROUTER} of another host"
        rows = {"gRPC": server.grpc_url}
    console.print(f"[bold green]serving[/] {what}")
    rows |= {
        "metrics": f"http://{server.metrics_url}/metrics",
        "log": str(server.log_path),
    }
    for name, value in rows.items():
        console.print(f"  {name:<8} {value}", markup=False)
    console.print("Ctrl-C stops it", style="dim")


def _names_here(deployment: Deployment) -> list[str]:
    return [deployment.model_names[index] for index in deployment.here]
