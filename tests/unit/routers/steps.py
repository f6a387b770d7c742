# SPDX-License-Identifier: Apache-2.0
"""What the tests do with one step."""

from __future__ import annotations

from typing import Any

from routers import BaseRouter, StepResult
from routers.base import destinations

__all__ = ["routed"]


def routed(router: BaseRouter[Any], step: StepResult) -> list[int]:
    """Where the router sends each row."""
    return destinations(router.route(step), len(step.rids))
