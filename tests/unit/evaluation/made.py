# SPDX-License-Identifier: Apache-2.0
"""Answers for the tests, with what matters in one of them."""

from __future__ import annotations

from tools.evaluation.answers import Answered

__all__ = ["answered"]


def answered(
    number: int,
    passed: bool = True,
    *,
    slm: int = 0,
    llm: int = 0,
    handoffs: int = 0,
    last: str = "slm",
    sitting: int = 0,
    sent_s: float = 0.0,
    ended_s: float = 1.0,
) -> Answered:
    return Answered(
        id=f"q/{number}",
        passed=passed,
        verdict="passed" if passed else "failed",
        detail="",
        text="x",
        ids=list(range(slm + llm)),
        by_model={"slm": slm, "llm": llm},
        last_model=last,
        handoffs=handoffs,
        finish_reason="stop",
        sitting=sitting,
        sent_s=sent_s,
        ended_s=ended_s,
    )
