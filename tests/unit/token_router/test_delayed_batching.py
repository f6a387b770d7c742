# SPDX-License-Identifier: Apache-2.0
"""When a batch is released, and that no threshold can leave everybody waiting."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.llm.contract import SamplingParams
from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.delayed_batching import DelayedBatchingQueue, Thresholds, feasible
from python_backends.token_router.request import Request, Session


def _session(prompt: int = 1, output: int = 1, kv: int | None = None) -> Session:
    request = Request(
        rid=1, prompt_ids=[7] * prompt, limit=99, eos_token_ids=frozenset(), sampling=SamplingParams(),
        router_params={}, stream=cast(Any, None), text=cast(Any, None), output_ids=[8] * output,
    )  # fmt: skip
    session = Session(request, model=0, peer_locs=[0], output_ids=[8] * output, here=True)
    session.kv_tokens = prompt + output - 1 if kv is None else kv
    return session


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 40))
def test_feasible_leaves_no_deadlock_and_lowers_no_more_than_needed(b: list[int], live: int) -> None:
    lowered = feasible(tuple(b), live)
    assert all(1 <= new <= old for new, old in zip(lowered, b, strict=True))
    assert sum(x - 1 for x in lowered) < max(live, 1)
    if sum(x - 1 for x in b) < live and max(b) <= live:
        assert lowered == tuple(b)


@pytest.mark.parametrize(
    ("threshold", "live", "expected"),
    [
        (3, 8, (3, 3)),
        (3, 2, (1, 2)),
        ([1, 4], 3, (1, 3)),
        ({2: [1, 2], 4: [2, 3]}, 1, (1, 1)),
        ({2: [1, 2], 4: [2, 3]}, 3, (1, 2)),
        ({2: [1, 2], 4: [2, 3]}, 9, (2, 3)),
    ],
)
def test_thresholds_by_live_requests(threshold: Any, live: int, expected: tuple[int, ...]) -> None:
    assert Thresholds(BatchingConfig(threshold=threshold), 2).at(live) == expected


@pytest.mark.parametrize("threshold", [[1], {3: [1, 2, 3]}])
def test_a_threshold_for_another_number_of_models_is_refused(threshold: Any) -> None:
    with pytest.raises(ValueError, match="one for each of 2 models"):
        Thresholds(BatchingConfig(threshold=threshold), 2)


def test_released_at_the_threshold_or_at_the_cap() -> None:
    clock = Clock()
    queue = DelayedBatchingQueue(clock, max_wait_s=0.5)
    assert not queue.releases(1) and queue.due() is None
    first, second = _session(), _session()
    queue.put(first)
    assert queue.releases(1) and not queue.releases(2)
    clock.now = 0.4
    queue.put(second)
    assert queue.releases(2) and not queue.releases(3)
    assert queue.due() == 0.5
    clock.now = 0.5
    assert queue.releases(3)
    queue.discard(first)
    assert not queue.releases(3) and queue.due() == 0.9
    assert queue.take(100) == [second] and queue.waiting() == []


@pytest.mark.parametrize("urgent", [_session(output=0), _session(prompt=9, kv=0)])
def test_a_first_token_and_a_prefill_never_wait(urgent: Session) -> None:
    queue = DelayedBatchingQueue(Clock(), max_wait_s=0.5)
    queue.put(_session())
    queue.put(urgent)
    assert queue.releases(10)
    assert len(queue.take(100)) == 2
    queue.put(_session())
    assert not queue.releases(10)


def test_who_was_taken_in_vain_waits_on_in_its_place() -> None:
    clock = Clock()
    queue = DelayedBatchingQueue(clock, max_wait_s=0.5)
    first, second, ended, late = (_session() for _ in range(4))
    for session in (first, ended, second):
        queue.put(session)
    assert queue.take(100) == [first, ended, second]
    clock.now = 0.4
    queue.put(late)
    queue.put_back([first, second])
    assert queue.waiting() == [first, second, late] and queue.due() == 0.5
    assert queue.releases(3) and not queue.releases(4)
    queue.discard(first)
    assert queue.due() == 0.5


def test_prefills_are_taken_only_as_far_as_they_fit() -> None:
    queue = DelayedBatchingQueue(Clock(), max_wait_s=0.5)
    decoding = _session()
    prefills = [_session(prompt=60, output=0, kv=0) for _ in range(3)]
    for session in [*prefills, decoding]:
        queue.put(session)
    assert queue.take(128) == [prefills[0], prefills[1], decoding]
    assert queue.take(128) == [prefills[2]]
    queue.put(huge := _session(prompt=999, output=0, kv=0))
    assert queue.take(128) == [huge]
