# SPDX-License-Identifier: Apache-2.0
"""Which calls an LLM makes together, as one step."""

from __future__ import annotations

from collections.abc import Sequence

from python_backends.llm.contract import StepRequest

__all__ = ["joins"]


def joins(calls: Sequence[StepRequest], later: StepRequest) -> bool:
    """Whether `later`, which waits behind `calls`, becomes part of their step.

    The calls that a router sends while a step is being made are meant for the next one: one that follows, and others
    with sessions that have come since. Only one can follow: a second one means the step after that.
    """
    if any(call.hello or call.max_steps > 1 for call in (*calls, later)):
        return False
    if later.follows and any(call.follows for call in calls):
        return False
    brought = {step.session for call in calls for step in call.steps}
    return not any(step.session in brought for step in later.steps)
