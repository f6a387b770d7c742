# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a request. Each error becomes the one final answer of that request.

TokenRouterError
├── InvalidRequest     the client asked for something that isn't allowed         INVALID_ARG
├── Unavailable        not now: the queue is full, a model is down, draining     UNAVAILABLE
├── RequestFailed      a step, a router or an engine failed for this request     INTERNAL
└── RequestCancelled   the client cancelled or went away                         CANCELLED
"""

from __future__ import annotations

from typing import ClassVar

__all__ = ["InvalidRequest", "RequestCancelled", "RequestFailed", "TokenRouterError", "Unavailable"]


class TokenRouterError(Exception):
    """Base of all. code: the name of the code in Triton's Python backend (pb_utils.TritonError)."""

    code: ClassVar[str] = "INTERNAL"


class InvalidRequest(TokenRouterError):
    """The message names the field, the value and what is allowed."""

    code = "INVALID_ARG"


class Unavailable(TokenRouterError):
    """The request may be tried again later."""

    code = "UNAVAILABLE"


class RequestFailed(TokenRouterError):
    """The request failed; others may go on."""

    code = "INTERNAL"


class RequestCancelled(TokenRouterError):
    """Nobody waits for the answer any more."""

    code = "CANCELLED"
