# SPDX-License-Identifier: Apache-2.0
"""What a model is allowed in one call, and when it waits for others, given what is known of their calls."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from python_backends.token_router.config import BatchingConfig, RuntimeConfig
from python_backends.token_router.delayed_batching import DelayedBatchingQueue, Thresholds
from python_backends.token_router.foresight import Allowance, Foresight
from python_backends.token_router.request import Session
from python_backends.token_router.scheduling import AsyncScheduler
from tests.unit.token_router.harness import Deployment, FakeLLM, run

SLM, LLM = 0, 1


class Waits:
    """What waits in a queue."""

    waiting_since = 0.0
    urgent = False
    must_not_wait = False
    prefill_tokens = 0


class Rig:
    """Two models whose steps took 6 and 28 ms so far, each call 1 ms more; 4 requests are live."""

    def __init__(self, **batching: Any) -> None:
        self.now = 0.0
        config = BatchingConfig.model_validate({"threshold": [1, 3], "run_ahead": 8, "max_wait_ms": 1e6, **batching})
        self.queues = [DelayedBatchingQueue[Any](lambda: self.now, 1e9) for _ in range(2)]
        self.scheduler = AsyncScheduler(self.queues, Thresholds(config, 2))
        self.scheduler.live_changed(4)
        self.foresight = Foresight(config, self.scheduler, 2, lambda: self.now)
        for _ in range(60):
            self.call(SLM, 2, 0.006, {LLM: 1})
            self.call(LLM, 3, 0.028, {SLM: 3})

    def call(self, model: int, sessions: int, compute_s: float, left: dict[int, int]) -> None:
        self.launch(model, sessions)
        self.now += compute_s + 0.001
        self.foresight.ended(model, 1, compute_s, left)
        self.scheduler.ended(model)

    def launch(self, model: int, sessions: int) -> None:
        self.scheduler.started(model)
        self.foresight.launched(model, sessions, 1)

    def allows(self, model: int, sessions: int, tokens: int = 5) -> Allowance:
        class Request:
            output_ids = [1] * tokens

        class Fake:
            request = Request()

        return self.foresight.allows(model, cast(list[Session], [Fake()] * sessions))


def test_alone_it_runs_ahead_until_enough_have_left_for_another_to_launch() -> None:
    assert Rig().allows(SLM, 4) == Allowance(8, 2)


def test_a_request_without_a_token_stops_the_call_when_it_leaves() -> None:
    assert Rig().allows(SLM, 4, tokens=0) == Allowance(8, 0)


@pytest.mark.parametrize(("waited_s", "steps"), [(0.0, 4), (0.004, 3), (0.016, 1), (0.028, 1), (0.1, 1)])
def test_beside_a_busy_model_it_is_back_before_that_one_is(waited_s: float, steps: int) -> None:
    rig = Rig()
    rig.launch(LLM, 3)
    rig.now += waited_s
    assert rig.allows(SLM, 1) == Allowance(steps, 1)  # and may lose everybody: nobody could launch with them
    assert waited_s + 0.001 + steps * 0.006 <= 0.029 or steps == 1


def test_those_who_wait_elsewhere_count() -> None:
    rig = Rig()
    rig.queues[LLM].put(Waits())
    assert rig.allows(SLM, 3) == Allowance(8, 1)
    rig.queues[LLM].put(Waits())
    assert rig.allows(SLM, 2) == Allowance(8, 0)
    rig.queues[LLM].put(Waits())  # and with this one it launches: they may be back at any time
    assert rig.allows(SLM, 1) == Allowance(1, 0)


def test_run_ahead_1_is_one_step() -> None:
    assert Rig(run_ahead=1).allows(SLM, 4) == Allowance()


def test_an_unknown_end_is_not_foreseen() -> None:
    config = BatchingConfig(run_ahead=8, hold=True)
    queues = [DelayedBatchingQueue[Any](lambda: 0.0, 1e9) for _ in range(2)]
    scheduler = AsyncScheduler(queues, Thresholds(config, 2))
    scheduler.live_changed(4)
    foresight = Foresight(config, scheduler, 2, lambda: 0.0)
    foresight.launched(LLM, 2, 1)
    scheduler.started(LLM)
    assert foresight.allows(SLM, []).max_steps == 1
    assert foresight.holds_until(SLM, 1) is None


@pytest.mark.parametrize(
    ("waited_s", "waiting", "held"),
    [
        (0.026, 1, True),  # 3 come in 3.5 ms: 1 x 3.5 < 3 x 3.5
        (0.026, 4, False),
        (0.0285, 3, True),  # in 1 ms
        (0.020, 1, False),  # in 9.5 ms: a step is over before
        (0.031, 1, False),  # it should have ended: nobody waits for ever
    ],
)
def test_it_holds_for_those_about_to_come(waited_s: float, waiting: int, held: bool) -> None:
    rig = Rig(hold=True)
    rig.launch(LLM, 3)
    ends = rig.now + 0.029
    rig.now += waited_s
    until = rig.foresight.holds_until(SLM, waiting)
    assert (until is not None) == held
    if until is not None:
        assert ends < until < ends + 0.001
    assert Rig().foresight.holds_until(SLM, waiting) is None


def test_what_a_prefill_took_is_no_forecast() -> None:
    rig = Rig(run_ahead=1)
    rig.scheduler.started(SLM)
    rig.foresight.launched(SLM, 2, 1, fresh=True)
    assert rig.foresight.sends_ahead_at(SLM) is None  # nor is its end foreseen
    rig.now += 0.4
    rig.foresight.ended(SLM, 1, 0.399, {})
    rig.launch(SLM, 2)
    assert rig.foresight.sends_ahead_at(SLM) == pytest.approx(rig.now + 0.007 - 0.0028, abs=1e-4)


def test_nobody_is_held_for_longer_than_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is foreseen."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(Foresight, "holds_until", lambda *_: loop.time() + 0.01)
        config = RuntimeConfig.model_validate(
            {
                "models": [{"name": "slm"}, {"name": "llm"}],
                "router": {"name": "random"},
                "batching": {"hold": True, "send_ahead": False},
            }
        )
        llms = [FakeLLM("slm", lambda *_: 0, lambda: 0.006), FakeLLM("llm", lambda *_: 1, lambda: 0.028)]
        async with Deployment(config, llms) as deployment:
            _, stream = deployment.submit(input_ids=[5], max_tokens=11)
            await asyncio.wait_for(stream.done.wait(), 100)
            return loop.time()

    assert run(main()) == pytest.approx(11 * 0.006 + 10 * 0.05)  # the first token isn't held


def test_a_held_batch_launches_with_those_who_came() -> None:
    """In the runtime: the SLM's steps of 6 ms, the LLM's of 28, and a third of the tokens are the LLM's."""
    sizes: dict[bool, list[int]] = {}

    async def main(hold: bool) -> None:
        config = RuntimeConfig.model_validate(
            {
                "models": [{"name": "slm"}, {"name": "llm"}],
                "router": {"name": "random"},
                "batching": {"threshold": [1, 2], "hold": hold},
            }
        )
        slm = FakeLLM("slm", lambda rid, at, _: int((at * at * 7 + rid * 13) % 20 < 7), step_s=lambda: 0.006)
        llm = FakeLLM("llm", lambda *_: 1, step_s=lambda: 0.028)
        async with Deployment(config, [slm, llm]) as deployment:
            streams = [deployment.submit(input_ids=[5], max_tokens=60, ignore_eos=True)[1] for _ in range(8)]
            await asyncio.gather(*(s.done.wait() for s in streams))
            await deployment.settled()
        sizes[hold] = [len(b.steps) for b in slm.batches if b.steps]

    for hold in (False, True):
        run(main(hold))
    mean = {hold: sum(counts) / len(counts) for hold, counts in sizes.items()}
    assert mean[True] > mean[False]


@pytest.mark.parametrize(
    ("waiting", "follows", "sent"),
    [
        (0, 2, True),  # about one of two stays
        (1, 0, True),
        (0, 0, False),  # nobody
    ],
)
def test_the_next_call_is_sent_shortly_before_the_present_one_is_over(waiting: int, follows: int, sent: bool) -> None:
    rig = Rig(run_ahead=1)
    rig.launch(SLM, 2)
    at = rig.foresight.sends_ahead_at(SLM)
    assert at == pytest.approx(rig.now + 0.007 - 0.0028, abs=1e-4)
    assert rig.foresight.sends_ahead(SLM, waiting, follows, at_least=1) == sent
    assert Rig(send_ahead=False).foresight.sends_ahead_at(SLM) is None


def test_a_call_does_not_overtake_the_one_sent_just_before() -> None:
    rig = Rig(run_ahead=1)
    for _ in range(60):
        rig.call(SLM, 1, 0.001, {})
    rig.launch(SLM, 1)
    assert rig.foresight.sends_ahead_at(SLM) == rig.now + 0.001  # 2.8 ms before the answer would be too early


def test_after_a_call_sent_ahead_the_next_one_leaves_at_once_if_its_step_is_short() -> None:
    """It was sent 2 ms before it began: none can overtake it any more, and another 1 ms would be too late."""
    rig = Rig(run_ahead=1)
    for _ in range(60):
        rig.call(SLM, 1, 0.001, {})
    rig.foresight.launched(SLM, 1, 1, sent_s=rig.now - 0.002)
    assert rig.foresight.sends_ahead_at(SLM) == rig.now
    rig.foresight.launched(SLM, 1, 1, sent_s=rig.now - 0.0002)
    assert rig.foresight.sends_ahead_at(SLM) == pytest.approx(rig.now + 0.0008)


@pytest.mark.parametrize("seed", range(5))
def test_whether_a_lone_request_stays_is_not_judged_by_its_last_steps(seed: int) -> None:
    """It leaves after a third of its steps: three in a row say nothing, and the next call is always sent ahead."""
    rig, rng = Rig(run_ahead=1), random.Random(seed)
    refused = 0
    for _ in range(300):
        rig.call(SLM, 1, 0.006, {LLM: int(rng.random() < 0.35)})
        rig.launch(SLM, 1)
        refused += not rig.foresight.sends_ahead(SLM, waiting=0, follows=1, at_least=1)
        rig.foresight.failed(SLM)
    assert refused == 0


def test_none_is_sent_ahead_while_b_is_not_surely_reached() -> None:
    rig = Rig(run_ahead=1)
    rig.launch(LLM, 3)
    assert not rig.foresight.sends_ahead(LLM, waiting=2, follows=3, at_least=3)  # they all leave
    assert rig.foresight.sends_ahead(LLM, waiting=3, follows=3, at_least=3)


def test_none_is_sent_ahead_that_cannot_be_made_and_one_that_will_be_is() -> None:
    rig = Rig(run_ahead=1)
    rig.launch(SLM, 2)
    assert rig.foresight.sends_ahead(SLM, waiting=1, follows=2, at_least=3)
    assert not rig.foresight.sends_ahead(SLM, waiting=0, follows=2, at_least=3)  # not if they all stay
    rig.foresight.ended(SLM, 1, 0.006, {LLM: 1})
    rig.launch(LLM, 3)
    assert rig.foresight.sends_ahead(LLM, waiting=1, follows=3, at_least=1)  # one waits who must not


@pytest.mark.parametrize(("apart_s", "sent"), [(-0.002, False), (0.0, True), (0.005, True)])
def test_nobody_who_is_about_to_come_misses_the_next_call(apart_s: float, sent: bool) -> None:
    """The LLM's call is over `apart_s` after the SLM's."""
    rig = Rig(run_ahead=1)
    rig.launch(LLM, 3)
    rig.now += 0.022 - apart_s
    rig.launch(SLM, 2)
    assert rig.foresight.sends_ahead(SLM, waiting=0, follows=2, at_least=1) == sent


def test_the_runtime_sends_ahead_and_the_stream_is_the_same() -> None:
    streams: dict[bool, list[list[int]]] = {}
    follows: dict[bool, int] = {}

    async def main(send_ahead: bool) -> None:
        config = RuntimeConfig.model_validate(
            {
                "models": [{"name": "slm"}, {"name": "llm"}],
                "router": {"name": "random"},
                "batching": {"send_ahead": send_ahead},
            }
        )
        slm = FakeLLM("slm", lambda rid, at, _: int((at * at * 7 + rid * 13) % 20 < 7), step_s=lambda: 0.006)
        llm = FakeLLM("llm", lambda *_: 1, step_s=lambda: 0.028)
        async with Deployment(config, [slm, llm]) as deployment:
            asked = [deployment.submit(input_ids=[5], max_tokens=60, ignore_eos=True)[1] for _ in range(4)]
            await asyncio.gather(*(s.done.wait() for s in asked))
            await deployment.settled()
        streams[send_ahead] = [s.token_ids for s in asked]
        follows[send_ahead] = sum(len(b.follows) for b in slm.batches)

    for send_ahead in (False, True):
        run(main(send_ahead))
    assert streams[True] == streams[False]
    assert follows[False] == 0 and follows[True] > 20
