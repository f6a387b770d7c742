# SPDX-License-Identifier: Apache-2.0
"""Routing algorithms: `route`, `send`, `receive`. Nothing here knows Triton or an engine."""

from routers.base import (
    Algorithm,
    BaseRouter,
    LogitsOutput,
    OneTokenRouter,
    PeerReq,
    RoutedRequest,
    RouterParams,
    ServedModel,
    StepResult,
    model_to_peer,
    peer_request,
    peer_to_model,
    send_without_last,
)
from routers.registry import ALGORITHMS, RouterConfig, load_algorithm

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "BaseRouter",
    "LogitsOutput",
    "OneTokenRouter",
    "PeerReq",
    "RoutedRequest",
    "RouterConfig",
    "RouterParams",
    "ServedModel",
    "StepResult",
    "load_algorithm",
    "model_to_peer",
    "peer_request",
    "peer_to_model",
    "send_without_last",
]
