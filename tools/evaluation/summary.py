# SPDX-License-Identifier: Apache-2.0
"""From the answers of a setting to its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel
from scipy.stats import binomtest

from tools.evaluation.answers import Answered, Traffic

__all__ = ["PointResult", "Rates", "rates_of", "way_up", "wilson"]

_CONFIDENCE = 0.95
_RESAMPLES = 10_000
_CLEAR = 0.05  # a router drops its token where at most this share of the tokens that leave are kept


class Rates(BaseModel):
    """P, from -> to: the share of a model's steps after which a request went to another.

    steps: as the server counted its steps. answers: as the tokens and handoffs of the answers come to; None unless the
    router drops or keeps every token that leaves, between two models. given: what the Markov model would have been
    given (`Traffic`), the mean over the steps. c: tokens that a step commits, as counted.
    """

    steps: list[list[float]]
    answers: list[list[float]] | None
    given: list[list[float]] | None
    c: list[list[float]]


class PointResult(BaseModel):
    """One setting.

    low, high: the Wilson interval (95 %) of accuracy. llm_share: of all tokens, those not by the first model.
    tokens: of an answer, the mean. tokens_per_s: of all requests together, over the time that the run took;
    None where it isn't reported.
    cut: answers that ended at max_tokens. way, way_low, way_high: how far accuracy has come from the first model's
    alone (0) to the last one's (1), with an interval from resampling the questions; None where nothing tells.
    """

    label: str
    group: str
    value: Any = None
    router: str
    router_params: dict[str, Any]
    questions: int
    passed: int
    low: float
    high: float
    llm_share: float
    handoffs: float
    tokens: float
    tokens_per_s: float | None
    cut: int
    verdicts: dict[str, int]
    rates: Rates | None = None
    way: float | None = None
    way_low: float | None = None
    way_high: float | None = None

    @property
    def accuracy(self) -> float:
        return self.passed / self.questions

    @classmethod
    def of(
        cls,
        answers: Sequence[Answered],
        traffic: Mapping[int, Traffic],
        models: Sequence[str],
        **named: Any,
    ) -> PointResult:
        """The figures of at least one answer.

        traffic: by sitting. named: label, group, value, router, router_params.
        """
        passed = sum(a.passed for a in answers)
        tokens = sum(len(a.ids) for a in answers)
        by_entry = sum(a.by_model.get(models[0], 0) for a in answers)
        low, high = wilson(passed, len(answers))
        seconds = _seconds(answers)
        return cls(
            questions=len(answers),
            passed=passed,
            low=low,
            high=high,
            llm_share=1 - by_entry / tokens if tokens else 0.0,
            handoffs=sum(a.handoffs for a in answers) / len(answers),
            tokens=tokens / len(answers),
            tokens_per_s=tokens / seconds if seconds else 0.0,
            cut=sum(a.finish_reason == "length" for a in answers),
            verdicts=dict(Counter(a.verdict for a in answers).most_common()),
            rates=_rates(answers, traffic, models),
            **named,
        )


def wilson(passed: int, questions: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score."""
    interval = binomtest(passed, questions).proportion_ci(_CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def way_up(
    point: Sequence[Answered], slm: Sequence[Answered], llm: Sequence[Answered], seed: int = 0
) -> tuple[float, float, float] | None:
    """(point - slm) / (llm - slm) in accuracy over the questions that all three have answered, and its 95 % interval:
    the questions are resampled, each with its three answers. None where the models are too near to each other: where
    the LLM isn't ahead in more than 97.5 % of the resamples, the ratio has no interval."""
    columns = [{a.id: a.passed for a in answers} for answers in (point, slm, llm)]
    common = [i for i in columns[0] if i in columns[1] and i in columns[2]]
    if not common:
        return None
    passed = np.array([[column[i] for column in columns] for i in common], dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(common), (_RESAMPLES, len(common)))
    mean = passed[drawn].mean(axis=1)
    gap = mean[:, 2] - mean[:, 1]
    if (gap > 0).mean() <= 0.975:
        return None
    ratios = (mean[:, 0] - mean[:, 1])[gap > 0] / gap[gap > 0]
    low, high = np.percentile(ratios, [2.5, 97.5])
    at = passed.mean(axis=0)
    return float((at[0] - at[1]) / (at[2] - at[1])), float(low), float(high)


def _seconds(answers: Iterable[Answered]) -> float:
    """What the run took: of each sitting, from the first request to the last answer."""
    sittings: dict[int, tuple[float, float]] = {}
    for a in answers:
        begin, end = sittings.get(a.sitting, (a.sent_s, a.ended_s))
        sittings[a.sitting] = min(begin, a.sent_s), max(end, a.ended_s)
    return sum(end - begin for begin, end in sittings.values())


def _rates(answers: Sequence[Answered], traffic: Mapping[int, Traffic], models: Sequence[str]) -> Rates | None:
    """None where the server wasn't counted in each sitting that gave answers: the counts of the others wouldn't be
    those of the answers."""
    sittings = {a.sitting for a in answers}
    if not sittings <= traffic.keys():
        return None
    counted = [traffic[sitting] for sitting in sorted(sittings)]
    outcomes = np.sum([t.outcomes for t in counted], axis=0)
    tokens = np.sum([t.tokens for t in counted], axis=0)
    steps = outcomes / np.maximum(outcomes.sum(axis=1, keepdims=True), 1)
    c = tokens / np.maximum(outcomes, 1)
    return Rates(
        steps=steps.tolist(), answers=_from_answers(answers, models, c), given=_given(answers, counted), c=c.tolist()
    )


def _given(answers: Sequence[Answered], traffic: Sequence[Traffic]) -> list[list[float]] | None:
    """The mean over the sittings that have one, by how many answers each gave."""
    given = [(t.given, sum(a.sitting == t.sitting for a in answers)) for t in traffic if t.given is not None]
    if not given:
        return None
    mean: list[list[float]] = np.average([p for p, _ in given], axis=0, weights=[w for _, w in given]).tolist()
    return mean


def _from_answers(answers: Sequence[Answered], models: Sequence[str], c: Any) -> list[list[float]] | None:
    """Of two models, between which a request goes to and fro: handoffs alternate, so how many led to the LLM follows
    from their number and from who made the last token."""
    if len(models) != 2 or np.abs(c - np.round(c)).max() > _CLEAR:
        return None
    to_llm = sum((a.handoffs + (a.last_model == models[1])) // 2 for a in answers)
    moves = [to_llm, sum(a.handoffs for a in answers) - to_llm]
    rows = []
    for i, j in ((0, 1), (1, 0)):
        steps = sum(a.by_model.get(models[i], 0) for a in answers) + (moves[i] if c[i][j] < _CLEAR else 0)
        share = moves[i] / steps if steps else 0.0
        rows.append([1 - share, share] if i == 0 else [share, 1 - share])
    return rows


def rates_of(result: PointResult, model: int, to: int) -> Mapping[str, float | None]:
    """One entry of P, from each source."""
    rates = result.rates
    if rates is None:
        return {"steps": None, "answers": None, "given": None}
    return {
        name: None if matrix is None else matrix[model][to]
        for name, matrix in (("steps", rates.steps), ("answers", rates.answers), ("given", rates.given))
    }
