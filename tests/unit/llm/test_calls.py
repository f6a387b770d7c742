# SPDX-License-Identifier: Apache-2.0
"""The calls of an LLM: their order, which are made together, and the thread that makes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import pytest

from python_backends.llm.call_order import CallOrder
from python_backends.llm.call_thread import CallThread
from python_backends.llm.contract import CALL_NUMBERS, SessionStep, StepRequest, StepResponse, StepStats
from python_backends.llm.joining import joins


def _brings(*sessions: int, follows: Sequence[int] = (), **more: int) -> StepRequest:
    return StepRequest([SessionStep(s, 0, [1]) for s in sessions], follows=list(follows), **more)


@pytest.mark.parametrize(
    ("calls", "later", "together"),
    [
        ([_brings(1)], _brings(2), True),
        ([_brings(1)], _brings(1), False),
        ([_brings(1), _brings(2)], _brings(3, 2), False),
        ([_brings(1)], _brings(2, follows=[3]), True),
        ([_brings(follows=[1])], _brings(2), True),
        ([_brings(follows=[1])], _brings(2, follows=[1]), False),
        ([_brings(1)], _brings(follows=[1]), True),
        ([_brings(1, max_steps=4)], _brings(2), False),
        ([_brings(1)], _brings(2, max_steps=4), False),
        ([_brings(1)], StepRequest(hello=True), False),
        ([StepRequest(hello=True)], _brings(1), False),
    ],
)
def test_which_calls_are_made_together(calls: list[StepRequest], later: StepRequest, together: bool) -> None:
    assert joins(calls, later) == together


def test_numbers_in_order() -> None:
    order = CallOrder()
    assert [order.came(n) for n in (7, 8, 10, 9, 11)] == [True, True, False, False, True]


def test_a_call_that_never_comes_is_waited_for_as_long_as_it_may_be_under_way() -> None:
    order = CallOrder()
    assert [order.came(n) for n in (1, 3, 4, 5, 6)] == [True, False, False, False, True]


def test_numbers_begin_again() -> None:
    order = CallOrder()
    assert [order.came(n) for n in (CALL_NUMBERS - 1, 0, 2, 1, 3)] == [True, True, False, False, True]


def test_a_late_call_opens_nobody_who_was_freed_meanwhile() -> None:
    order = CallOrder()
    order.came(1)
    order.freed([5])
    assert not order.over(5)
    order.came(4)  # 2 and 3 are missing
    order.freed([6])
    order.came(3)
    assert order.over(6) and not order.over(5)
    order.came(2)
    assert order.over(6)
    order.came(5)
    assert not order.over(6)


class Maker:
    """Makes what it is given once it may."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.made: list[list[int]] = []

    def __call__(self, calls: Sequence[StepRequest]) -> list[StepResponse]:
        assert self.may.acquire(timeout=10)
        self.made.append([call.number for call in calls])
        if any(call.number == 13 for call in calls):
            raise RuntimeError("13")
        return [StepResponse(stats=StepStats(steps=call.number, calls=len(calls))) for call in calls]


def test_calls_that_come_during_a_step_are_the_next_one() -> None:
    maker = Maker()
    thread = CallThread(maker)
    answers: queue.SimpleQueue[tuple[int, StepResponse | Exception]] = queue.SimpleQueue()

    def put(call: StepRequest) -> None:
        thread.put(call, lambda outcome: answers.put((call.number, outcome)))

    put(_brings(1, number=1))
    for call in (_brings(2, number=2), _brings(3, number=3), _brings(2, number=4), _brings(9, number=13)):
        put(call)
    for _ in range(3):
        maker.may.release()
    got = dict(answers.get(timeout=10) for _ in range(5))
    assert maker.made == [[1], [2, 3], [4, 13]]
    assert [got[n] for n in (1, 2, 3)] == [
        StepResponse(stats=StepStats(steps=n, calls=calls)) for n, calls in ((1, 1), (2, 2), (3, 2))
    ]
    assert str(got[4]) == str(got[13]) == "13"
    put(_brings(1, number=5))
    maker.may.release()
    thread.close()
    assert answers.get(timeout=10)[0] == 5
