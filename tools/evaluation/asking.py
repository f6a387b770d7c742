# SPDX-License-Identifier: Apache-2.0
"""Asking a served deployment many questions at once, and judging the answers as they come."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np

from python_backends.token_router.tokenizer import Tokenizer
from tools.client import Answer, GenerationError, TokenRouterClient
from tools.control import ControlClient, ControlError
from tools.evaluation.answers import Answered, AnswerFile, Traffic
from tools.evaluation.tasks import Question

__all__ = ["Asking", "ask_all"]


@dataclass(frozen=True)
class Asking:
    """How each question is put. router_params: what the request overrides. temperature: 0 = greedy. seed: each
    question's draws depend on it and on the question."""

    max_tokens: int
    router_params: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    seed: int = 0
    concurrency: int = 8


def ask_all(
    grpc_url: str,
    control: ControlClient | None,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    asking: Asking,
    file: AnswerFile,
    told: Callable[[Answered], None],
) -> None:
    """Asks what `file` has no answer to, `asking.concurrency` at a time, and adds the answers to it.

    control: of the server, to count what its models did; None = it is elsewhere, and isn't counted.
    told: of each answer.
    A question whose request fails doesn't keep the others from being asked, unless nothing is served any more.
    Raises GenerationError when one failed, ControlError, SandboxError, UserError; what has been answered by then is in
    the file.
    """
    asked = [q for q in questions if q.id not in file.answers]
    if not asked:
        return
    counting = None if control is None else _Counting(control, file)
    began = time.monotonic()

    def one(question: Question) -> Answered:
        answered = _ask(client, tokenizer, question, asking, file.sitting, began)
        file.add(answered)
        return answered

    failed: list[GenerationError] = []
    with TokenRouterClient(grpc_url) as client, ThreadPoolExecutor(asking.concurrency) as pool:
        under_way = [pool.submit(one, question) for question in asked]
        try:
            for done in as_completed(under_way):
                try:
                    told(done.result())
                except GenerationError as error:
                    if error.status is grpc.StatusCode.UNAVAILABLE:
                        raise
                    failed.append(error)
                else:
                    if counting is not None:
                        counting.answered()
        except BaseException:
            for future in under_way:
                future.cancel()
            client.close()  # ends the requests under way, and so their threads
            raise
    if counting is not None:
        counting.end()
    if failed:
        others = f" (and {len(failed) - 1} questions more)" if len(failed) > 1 else ""
        raise GenerationError(failed[0].status, failed[0].message + others)


def _ask(
    client: TokenRouterClient, tokenizer: Tokenizer, question: Question, asking: Asking, sitting: int, began: float
) -> Answered:
    generation = client.generate(
        input_ids=tokenizer.encode_chat(list(question.messages), question.begun),
        max_tokens=asking.max_tokens,
        stop_words=list(question.stop_words) or None,
        router_params=asking.router_params or None,
        temperature=asking.temperature,
        seed=asking.seed + zlib.crc32(question.id.encode()),
    )
    try:
        answer = Answer.of(generation)
    except GenerationError as error:
        raise GenerationError(error.status, f"{question.id}: {error.message}") from error
    ended_s = time.monotonic() - began
    judgement = question.judge(answer.text)
    return Answered(
        id=question.id,
        passed=judgement.passed,
        verdict=judgement.verdict,
        detail=judgement.detail,
        text=answer.text,
        ids=answer.ids,
        by_model=dict(answer.tokens_by_model),
        last_model=answer.models[-1],
        handoffs=int(answer.usage["handoffs"]),
        finish_reason=answer.finish_reason,
        sitting=sitting,
        sent_s=answer.sent_at - began,
        ended_s=ended_s,
    )


class _Counting:
    """What the server counts during a sitting, written down after each answer. Raises ControlError, UserError."""

    def __init__(self, control: ControlClient, file: AnswerFile) -> None:
        self._control = control
        self._file = file
        self._before = self._seen = control.traffic()["counts"]
        self._beliefs: list[list[list[float]]] = []
        self._weights: list[int] = []  # of each: the steps since the reading before it

    def answered(self) -> None:
        """One more. That the server can't be asked now is no reason to lose the others: the next count has all."""
        try:
            measured = self._control.traffic()
        except ControlError:
            return
        steps = int(np.sum(measured["counts"]["outcomes"]) - np.sum(self._seen["outcomes"]))
        self._seen = measured["counts"]
        if (profile := measured["profile"]) is not None and steps:
            self._beliefs.append(profile["p"])
            self._weights.append(steps)
        self._write(measured["counts"])

    def end(self) -> None:
        """All are answered, or failed."""
        self._write(self._control.traffic()["counts"])

    def _write(self, counts: dict[str, Any]) -> None:
        def grown(name: str) -> list[list[int]]:
            pairs = zip(counts[name], self._before[name], strict=True)
            return [[now - then for now, then in zip(*rows, strict=True)] for rows in pairs]

        given = np.average(self._beliefs, axis=0, weights=self._weights).tolist() if self._beliefs else None
        self._file.add(
            Traffic(sitting=self._file.sitting, outcomes=grown("outcomes"), tokens=grown("tokens"), given=given)
        )
