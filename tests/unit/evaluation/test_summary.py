# SPDX-License-Identifier: Apache-2.0
"""From answers to figures: intervals, rates, the way up, query-level routing."""

from __future__ import annotations

import pytest

from tests.unit.evaluation.made import answered
from tools.evaluation.answers import Traffic
from tools.evaluation.query_level import frontier, random_line
from tools.evaluation.summary import PointResult, way_up, wilson

MODELS = ["slm", "llm"]
NAMED = {"label": "r2r", "group": "r2r", "router": "r2r", "router_params": {}}


def test_wilson() -> None:
    # Wilson (1927), as in the tables of Newcombe (1998)
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(20, 20)[1] == pytest.approx(1.0)


def test_figures_of_a_point() -> None:
    answers = [
        answered(0, slm=90, llm=10, handoffs=20, sent_s=0.0, ended_s=4.0),
        answered(1, passed=False, slm=50, llm=50, handoffs=99, last="llm", sent_s=1.0, ended_s=10.0),
        answered(2, slm=100, sitting=1, sent_s=5.0, ended_s=15.0),
    ]
    result = PointResult.of(answers, {}, MODELS, **NAMED)
    assert (result.questions, result.passed) == (3, 2)
    assert (result.low, result.high) == wilson(2, 3)
    assert result.llm_share == pytest.approx(0.2)
    assert result.handoffs == pytest.approx(119 / 3)
    assert result.tokens == pytest.approx(100)
    assert result.tokens_per_s == pytest.approx(300 / 20)  # two sittings of 10 s, the time between them not counted
    assert result.verdicts == {"passed": 2, "failed": 1}
    assert result.rates is None


def test_rates_of_a_router_that_drops_what_it_hands_over() -> None:
    """90 + 50 SLM tokens kept and 60 dropped; 60 LLM tokens, the last of them an answer's last."""
    answers = [
        answered(0, slm=90, llm=10, handoffs=20),
        answered(1, slm=50, llm=50, handoffs=99, last="llm"),
    ]
    traffic = Traffic(sitting=0, outcomes=[[140, 60], [59, 1]], tokens=[[140, 0], [59, 1]], given=[[0.6, 0.4], [1, 0]])
    rates = PointResult.of(answers, {0: traffic}, MODELS, **NAMED).rates
    assert rates is not None
    assert rates.steps == [[0.7, 0.3], pytest.approx([59 / 60, 1 / 60])]
    assert rates.answers == [pytest.approx([0.7, 0.3]), pytest.approx([59 / 60, 1 / 60])]
    assert rates.given == [[0.6, 0.4], [1, 0]]
    assert rates.c == [[1, 0], [1, 1]]


def test_what_was_given_counts_by_the_answers_of_its_sitting() -> None:
    answers = [answered(n, slm=9, sitting=sitting) for n, sitting in enumerate((0, 0, 0, 1, 2))]
    counted = {"outcomes": [[9, 1], [1, 0]], "tokens": [[9, 0], [1, 0]]}
    first, second, unknown, unanswered = (
        Traffic(sitting=n, **counted, given=given)
        for n, given in enumerate(([[0.8, 0.2], [1, 0]], [[0.4, 0.6], [0.6, 0.4]], None, [[0.0, 1.0], [0.0, 1.0]]))
    )
    traffic = dict(enumerate((first, second, unknown, unanswered)))
    rates = PointResult.of(answers, traffic, MODELS, **NAMED).rates
    assert rates is not None
    assert rates.given == [pytest.approx([0.7, 0.3]), pytest.approx([0.9, 0.1])]
    rates = PointResult.of(answers[4:], traffic, MODELS, **NAMED).rates
    assert rates is not None
    assert rates.given is None


def test_rates_are_of_the_sittings_that_gave_the_answers_all_of_them_or_none() -> None:
    """A sitting that was killed before its first count, or was of a server that can't be counted, leaves them blank."""
    first = Traffic(sitting=0, outcomes=[[8, 2], [2, 0]], tokens=[[8, 0], [2, 0]], given=None)
    second = Traffic(sitting=1, outcomes=[[4, 6], [6, 0]], tokens=[[4, 0], [6, 0]], given=None)
    answers = [answered(0, slm=8, llm=2), answered(1, slm=4, llm=6, sitting=1)]
    for known, asked, to_llm in (
        ({0: first, 1: second}, answers, 0.4),
        ({0: first, 1: second}, answers[1:], 0.6),
        ({0: first}, answers[:1], 0.2),
    ):
        rates = PointResult.of(asked, known, MODELS, **NAMED).rates
        assert rates is not None
        assert rates.steps[0] == pytest.approx([1 - to_llm, to_llm])
    assert PointResult.of(answers, {0: first}, MODELS, **NAMED).rates is None
    assert PointResult.of(answers, {1: second}, MODELS, **NAMED).rates is None


def test_rates_of_a_router_that_keeps_its_tokens() -> None:
    answers = [answered(0, slm=50, llm=50, handoffs=50, last="slm")]
    traffic = Traffic(sitting=0, outcomes=[[25, 25], [25, 25]], tokens=[[25, 25], [25, 25]], given=None)
    rates = PointResult.of(answers, {0: traffic}, MODELS, **NAMED).rates
    assert rates is not None
    assert rates.answers == [[0.5, 0.5], [0.5, 0.5]]
    mixed = Traffic(sitting=0, outcomes=[[25, 25], [25, 25]], tokens=[[25, 12], [25, 25]], given=None)
    rates = PointResult.of(answers, {0: mixed}, MODELS, **NAMED).rates
    assert rates is not None
    assert rates.answers is None  # it can't be told from the answers


def test_the_way_up_and_its_interval() -> None:
    slm = [answered(n, n < 50) for n in range(100)]
    llm = [answered(n, n < 90) for n in range(100)]
    found = way_up([answered(n, n < 80) for n in range(100)], slm, llm)
    assert found is not None
    at, low, high = found
    assert at == pytest.approx(30 / 40)
    assert 0.55 < low < at < high < 0.92
    assert way_up(slm, slm, llm) == pytest.approx((0, 0, 0))
    assert way_up(llm, slm, llm) == pytest.approx((1, 1, 1))
    assert way_up(slm, slm, slm) is None  # no way to go
    nearly = [answered(n, n < 51) for n in range(100)]
    assert way_up(slm, slm, nearly) is None  # one question more says nothing
    assert way_up(slm[:50], slm[50:], llm) is None  # no question in common


def test_query_level_routing_picks_whole_answers() -> None:
    slm = [answered(0, True, slm=10), answered(1, False, slm=10), answered(2, False, slm=20)]
    llm = [answered(0, False, llm=30), answered(1, True, llm=30), answered(2, True, llm=60)]
    points = frontier(slm, llm, {"q/0": 0.1, "q/1": 0.9, "q/2": 0.5})
    assert [p.to_llm for p in points] == [0, 1, 2, 3]
    assert [p.accuracy for p in points] == pytest.approx([1 / 3, 2 / 3, 1.0, 2 / 3])
    assert [p.llm_share for p in points] == pytest.approx([0.0, 30 / 60, 90 / 100, 1.0])


def test_query_level_routing_at_random_is_the_mean_of_all_choices() -> None:
    slm = [answered(0, True, slm=10), answered(1, False, slm=30)]
    llm = [answered(0, False, llm=20), answered(1, True, llm=40)]
    points = random_line(slm, llm)
    assert [p.accuracy for p in points] == pytest.approx([0.5, 0.5, 0.5])
    assert [p.llm_share for p in points] == pytest.approx([0.0, 30 / 50, 1.0])
