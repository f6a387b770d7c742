# SPDX-License-Identifier: Apache-2.0
"""Calling `route`, which is somebody's own code: what it returns is checked, and a row for which it fails
takes no other row with it."""

from __future__ import annotations

import json
from typing import Any

from routers import BaseRouter, LogitsOutput, StepResult
from routers.base import destinations

__all__ = ["route_rows"]


def route_rows(router: BaseRouter[Any], step: StepResult, model_count: int) -> tuple[list[int], dict[int, str]]:
    """The destination of each row, and row -> error for those that `route` fails for (destination 0).

    When it fails for the batch, it is called again row by row. Fields are left in `step.fields`.
    """
    try:
        return _checked_route(router, step, model_count), {}
    except Exception as error:
        if len(step.rids) == 1:
            step.fields[0] = {}
            return [0], {0: f"route of {type(router).__name__} failed: {type(error).__name__}: {error}"}
    routed: list[int] = []
    errors: dict[int, str] = {}
    for r in range(len(step.rids)):
        row = _row(step, r)
        (destination,), failed = route_rows(router, row, model_count)
        routed.append(destination)
        step.fields[r] = row.fields[0]
        if failed:
            errors[r] = failed[0]
    return routed, errors


def _checked_route(router: BaseRouter[Any], step: StepResult, model_count: int) -> list[int]:
    """What `route` returned. Raises ValueError or TypeError when it isn't what the interface says."""
    routed = destinations(router.route(step), len(step.rids))
    if min(routed) < 0 or max(routed) >= model_count:
        raise ValueError(f"destinations must be 0 to {model_count - 1}, it returned {routed}")
    if any(step.fields):
        json.dumps(step.fields)  # they will travel as JSON: better that this row fails than the whole response
    return routed


def _row(step: StepResult, r: int) -> StepResult:
    """Row r as a step of its own, without the fields that a failed call left."""
    logits, hidden = step.logits_output.next_token_logits, step.logits_output.hidden_states
    one = slice(r, r + 1)
    return StepResult(
        logits_output=LogitsOutput(None if logits is None else logits[one], None if hidden is None else hidden[one]),
        token_ids=step.token_ids[one],
        places=step.places[one],
        sequences=step.sequences[one],
        prompt_tokens=step.prompt_tokens[one],
        rids=step.rids[one],
        params=step.params[one],
        draw=lambda _: step.draw(r),
        fields=[{}],
    )
