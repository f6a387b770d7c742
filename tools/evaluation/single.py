# SPDX-License-Identifier: Apache-2.0
"""One setting: a deployment as it is, on a server that runs already or on its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from python_backends.token_router.config import RuntimeConfig
from tools.client import TokenRouterClient
from tools.control import ControlClient
from tools.deployment import Deployment
from tools.errors import UserError
from tools.evaluation.report import SweepResult
from tools.evaluation.spec import Point, SweepSpec
from tools.evaluation.sweep import Bench, report
from tools.own_server import own_server_of
from tools.running import find_server

__all__ = ["evaluate"]


def evaluate(
    spec: SweepSpec,
    deployment: Deployment,
    router_params: dict[str, Any],
    server: str | None,
    url: str | None,
    folder: Path,
    console: Console,
) -> SweepResult:
    """Asks what is missing in `folder` and writes the report there.

    spec: its temperature is given only where the router must sample.
    router_params: what each request overrides. server, url: of a running server of this deployment; None = start one.
    Raises UserError, GenerationError, ControlError, SandboxError; run again, it goes on where it was.
    """
    if server is not None and url is not None:
        raise UserError("--url: given beside --server; allowed: one of them")
    try:
        deployment.router.override(router_params, deployment.model_names)
    except ValueError as error:
        raise UserError(f"--router-params: {error}") from error
    if "temperature" in spec.model_fields_set and not deployment.router.algorithm().needs_sampling:
        raise UserError(
            f"--temperature: got {spec.temperature:g}; only of routers that must sample; the deployment's is"
            f" {deployment.router.name}, which answers greedily"
        )
    label = " ".join([deployment.router.name, *(f"{k}={v}" for k, v in router_params.items())])
    point = Point(label, deployment.router.name, deployment.router, router_params)
    bench = Bench(spec, deployment, folder, console)
    with bench.alone():
        if bench.missing(point):
            with _serving(deployment, server, url, console) as (grpc_url, control):
                bench.ask(point, grpc_url, control)
        return report(bench, [point], {}, folder)


@contextmanager
def _serving(
    deployment: Deployment, server: str | None, url: str | None, console: Console
) -> Iterator[tuple[str, ControlClient | None]]:
    """The gRPC address, and the way to its token_router if it is on this machine."""
    if server is None and url is None:
        with own_server_of(deployment, console) as own:
            yield own.grpc_url, own.control
        return
    found = None if server is None else find_server(server)
    grpc_url = url if found is None else found.grpc_url
    with TokenRouterClient(str(grpc_url)) as client:
        runs = client.runtime()
    there, wanted = _identity(runs), _identity(deployment.runtime())
    for key, value in wanted.items():
        if there[key] != value:
            raise UserError(
                f"the server has {key} {there[key]!r}, but the deployment {value!r};"
                " give the deployment that it was started with"
            )
    yield str(grpc_url), None if found is None else found.control


def _identity(runtime: RuntimeConfig) -> dict[str, object]:
    """What is the same in a deployment's file and in what its server was told: `memory` changes engines."""
    return {
        "models": [(model.name, model.url) for model in runtime.models],
        "tokenizer": runtime.tokenizer,
        "router": runtime.router,
    }
