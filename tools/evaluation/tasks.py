# SPDX-License-Identifier: Apache-2.0
"""What is asked and how an answer is judged: a task is a list of questions, the same in every run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tools.errors import UserError
from tools.evaluation import humaneval, reasoning

__all__ = ["HumanEvalTask", "Judgement", "Question", "ReasoningTask", "TaskConfig", "digest", "questions", "selected"]


@dataclass(frozen=True)
class Judgement:
    """verdict: passed, or how it failed. detail: one line on that."""

    verdict: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


@dataclass(frozen=True)
class Question:
    """begun: the beginning of the answer, which is given. judge: of the text that follows; any thread may call it."""

    id: str
    messages: Sequence[dict[str, str]]
    judge: Callable[[str], Judgement] = field(compare=False)
    begun: str = ""
    stop_words: Sequence[str] = ()


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HumanEvalTask(_Config):
    """All of HumanEval."""

    type: Literal["humaneval"] = "humaneval"


class ReasoningTask(_Config):
    """Tasks of `reasoning-gym`: some of each kind, made from the seed. No two seeds have tasks in common but by chance,
    and none has those that routers are trained on."""

    type: Literal["reasoning"] = "reasoning"
    kinds: list[str] = Field(list(reasoning.KINDS), min_length=1)
    per_kind: int = Field(20, ge=1, le=reasoning.MOST)
    seed: int = Field(2026, ge=0)

    @field_validator("kinds")
    @classmethod
    def _once(cls, kinds: list[str]) -> list[str]:
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(f"given twice: {', '.join(twice)}")
        return kinds


TaskConfig = Annotated[HumanEvalTask | ReasoningTask, Field(discriminator="type")]


def questions(task: HumanEvalTask | ReasoningTask) -> list[Question]:
    """All of them. Raises UserError when the package isn't installed or has no such kind."""
    if isinstance(task, HumanEvalTask):
        return [_humaneval(problem) for problem in humaneval.problems()]
    return [_reasoning(made) for made in reasoning.make(task.kinds, task.per_kind, task.seed)]


def digest(asked: Sequence[Question]) -> str:
    """It changes when a question or the way it is put does."""
    content = [[q.id, list(q.messages), q.begun, list(q.stop_words)] for q in asked]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def selected(asked: Sequence[Question], which: str | None) -> list[Question]:
    """None = all; "40" = the first 40; "0:164:4" = as Python slices, from 0 on. Raises UserError."""
    if which is None:
        return list(asked)
    try:
        bounds = [int(part) if part else None for part in which.split(":")]
        backwards = any(bound is not None and bound < 0 for bound in bounds)
        chosen = list(asked[slice(*bounds)]) if which and not backwards else []
    except (ValueError, TypeError):
        chosen = []
    if not chosen:
        raise UserError(f"problems: got {which!r}; must be N, FROM:TO or FROM:TO:STEP within 0 to {len(asked)}")
    return chosen


def _humaneval(problem: humaneval.Problem) -> Question:
    def judge(answer: str) -> Judgement:
        code = humaneval.extract_code(answer, problem)
        outcome = humaneval.run_tests(code, problem.tests, problem.entry_point)
        return Judgement(outcome.verdict.value, outcome.detail)

    return Question(
        problem.task_id, humaneval.chat_prompt(problem.prompt), judge, humaneval.ANSWER_PREFIX, humaneval.STOP_WORDS
    )


def _reasoning(made: reasoning.Made) -> Question:
    def judge(answer: str) -> Judgement:
        final = reasoning.final_answer(answer)
        if final is None:
            return Judgement("failed", "no answer given")
        return Judgement("passed") if made.verify(final) else Judgement("failed", f"answered {final[:80]!r}")

    return Question(made.id, reasoning.chat_prompt(made.question), judge)
