# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter health`: whether a server on this machine serves, for health checks of containers."""

from __future__ import annotations

import math

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tools.client import GenerationError, TokenRouterClient
from tools.control import ControlError
from tools.deployment import ROUTER
from tools.errors import UserError
from tools.first_token import FirstToken
from tools.running import FoundServer, find_server

__all__ = ["health"]


def health(server: str, timeout_s: float) -> str:
    """What was found out, as one line: by a token of a request of its own; on a host that only has LLMs, by what
    Triton says of them. server: as `find_server` takes it. Raises UserError when it doesn't serve."""
    if not 0 < timeout_s < math.inf:
        raise UserError(f"--timeout-s: got {timeout_s:g}; must be more than 0")
    found = find_server(server)
    models = found.models()
    if ROUTER not in models:
        return _loaded(found, models, timeout_s)
    try:
        return _busy(found) or _token(found, timeout_s)
    except (ControlError, GenerationError) as error:
        raise UserError(f"not serving: {error}") from error


def _busy(found: FoundServer) -> str | None:
    """Of a server that is full: a request of ours would only wait, or be the one too many."""
    status = found.control.status()
    return f"busy: {status.live} requests running, {status.queued} waiting" if status.full else None


def _token(found: FoundServer, timeout_s: float) -> str:
    with TokenRouterClient(found.grpc_url) as client:
        router = client.runtime(timeout_s).router
    with FirstToken(found.grpc_url, router) as token:
        try:
            token.make(timeout_s)
        except UserError:
            if (busy := _busy(found)) is None:  # else others came before ours
                raise
            return busy
    return "a token was made"


def _loaded(found: FoundServer, models: list[str], timeout_s: float) -> str:
    with grpc.insecure_channel(found.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            for name in models:
                if not stub.ModelReady(service_pb2.ModelReadyRequest(name=name), timeout=timeout_s).ready:
                    raise UserError(f"not serving: model '{name}' is not loaded")
        except grpc.RpcError as error:
            raise UserError(f"not serving: {error.details()}") from error
    return f"{', '.join(models)} loaded"
