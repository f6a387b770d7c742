# SPDX-License-Identifier: Apache-2.0
"""What the controller asks, what it applies, and what it doesn't."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.token_router.delayed_batching import feasible
from python_backends.token_router.threshold.controller import Answer, Question, ThresholdController
from python_backends.token_router.threshold.profile import Profile, StepLatency


def profile(p: float = 0.35, llm_ms: float = 27.9, **more: Any) -> Profile:
    return Profile(
        models=["slm", "llm"],
        p=[[1 - p, p], [1.0, 0.0]],
        c=[[1.0, 0.0], [1.0, 0.0]],
        latency=[StepLatency.constant(6.0), StepLatency.constant(llm_ms)],
        **more,
    )


def ask(controller: ThresholdController, traffic: Profile) -> Question:
    question = controller.question(traffic)
    assert question is not None
    return question


def answered(controller: ThresholdController, live: int, traffic: Profile, best: tuple[int, int], gain: float) -> bool:
    """Live requests appear, the controller asks, and hears that `best` gains that much on what is applied."""
    applied = controller.at(live)
    question = ask(controller, traffic)
    assert (question.live, question.applied) == (live, applied)
    return controller.answered(question, Answer(best, {applied: 100.0, best: 100.0 * (1 + gain)}))


def test_before_there_is_a_solution_b_is_1() -> None:
    controller = ThresholdController(2)
    assert controller.at(4) == (1, 1)
    assert answered(controller, 4, profile(), (1, 3), gain=0.1)
    assert controller.at(4) == (1, 3)
    assert controller.at(5) == (1, 1)
    assert controller.at(3) == (1, 1)


def test_the_present_n_is_asked_for_first_and_each_once() -> None:
    controller = ThresholdController(2)
    for live in (2, 3, 4):
        controller.at(live)
    for live in (4, 3, 2):
        question = ask(controller, profile())
        assert question.live == live
        controller.answered(question, Answer((1, 1), {(1, 1): 100.0}))
    assert controller.question(profile()) is None


def test_nobody_asks_for_no_requests() -> None:
    controller = ThresholdController(2)
    controller.at(0)
    assert controller.question(profile()) is None


def test_a_small_gain_changes_nothing() -> None:
    controller = ThresholdController(2)
    answered(controller, 4, profile(), (1, 3), gain=0.1)
    assert not answered(controller, 4, profile(p=0.5), (1, 2), gain=0.005)
    assert controller.at(4) == (1, 3)
    assert answered(controller, 4, profile(p=0.1), (1, 2), gain=0.02)
    assert controller.at(4) == (1, 2)
    assert controller.changes == 2


@pytest.mark.parametrize(
    "now",
    [
        profile(p=0.42),
        profile(llm_ms=30.0),
        profile(run_lengths=[[0.2, 0.5, 0.3], None]),
        profile(slowdown=[[1.0, 1.2], [1.0, 1.0]]),
        profile().model_copy(update={"c": [[1.0, 0.2], [1.0, 0.0]]}),
        profile().model_copy(
            update={"latency": [StepLatency(batch_ms={1: 6.0, 4: 8.0}), StepLatency.constant(27.9)]},
        ),
    ],
)
def test_traffic_that_has_moved_is_solved_anew(now: Profile) -> None:
    controller = ThresholdController(2)
    answered(controller, 4, profile(), (1, 3), gain=0.1)
    assert ask(controller, now).live == 4


def test_noise_in_the_estimates_is_not_solved_anew() -> None:
    controller = ThresholdController(2)
    answered(controller, 4, profile(), (1, 3), gain=0.1)
    assert controller.question(profile(p=0.37, llm_ms=28.3)) is None


def test_an_unanswered_question_is_asked_again() -> None:
    controller = ThresholdController(2)
    controller.at(4)
    first = ask(controller, profile())
    controller.failed()
    assert ask(controller, profile()) == first
    assert controller.status()["failures"] == 1


def test_what_is_believed_and_chosen_is_told(caplog: pytest.LogCaptureFixture) -> None:
    controller = ThresholdController(2)
    with caplog.at_level("INFO"):
        answered(controller, 4, profile(), (1, 3), gain=0.064)
    assert caplog.messages == [
        "N = 4: B 1,1 -> 1,3, predicted 106.4 tokens/s (+6.4%) for P = 0.650 0.350; 1.000 0.000;"
        " L = 6.00 to 6.00, 27.90 to 27.90 ms (1 to 4 requests)"
    ]
    status = controller.status()
    assert status["thresholds"] == {"4": [1, 3]}
    assert status["predicted"]["4"] == pytest.approx(106.4)
    assert controller.predicted(4) == pytest.approx(106.4)
    assert controller.predicted(5) is None


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),
            st.floats(0.01, 0.99),
            st.tuples(st.integers(-1, 8), st.integers(-1, 8)),
            st.floats(0.0, 1000.0),
        ),
        max_size=30,
    )
)
def test_whatever_the_solver_says_b_is_feasible(events: list[tuple[int, float, tuple[int, int], float]]) -> None:
    controller = ThresholdController(2)
    for live, p, best, rate in events:
        controller.at(live)
        question = controller.question(profile(p=p))
        if question is not None:
            controller.answered(question, Answer(best, {question.applied: 100.0, best: rate}))
        for n in range(1, 8):
            assert feasible(controller.at(n), n) == controller.at(n)
