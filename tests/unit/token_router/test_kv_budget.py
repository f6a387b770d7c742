# SPDX-License-Identifier: Apache-2.0
"""Every model's KV: never promised twice, given in order, and given back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import InvalidRequest, RequestCancelled, Unavailable
from python_backends.token_router.kv_budget import KvBudget, KvPool
from tests.unit.token_router.harness import Deployment, FakeLLM, Stream, run


def _config(**limits: Any) -> RuntimeConfig:
    return RuntimeConfig.model_validate(
        {"models": [{"name": "slm"}, {"name": "llm"}], "router": {"name": "random"}, "limits": limits}
    )


def _llms(slm: tuple[int, int], llm: tuple[int, int]) -> list[FakeLLM]:
    """(kv_tokens, kv_block) of each; every third token goes to the LLM and back."""
    return [
        FakeLLM("slm", lambda _, position, __: int(position % 3 == 0), lambda: 0.01, kv_tokens=slm[0], kv_block=slm[1]),
        FakeLLM("llm", lambda *_: 1, lambda: 0.03, kv_tokens=llm[0], kv_block=llm[1]),
    ]


def test_a_sequence_takes_whole_blocks() -> None:
    pool = KvPool("slm", 100, 32)
    assert [pool.takes(n) for n in (1, 32, 33, 96)] == [32, 32, 64, 96]
    assert pool.longest == 96


def test_what_is_reserved_on_one_model_is_reserved_on_all() -> None:
    kv = KvBudget(["slm", "llm"])
    assert not kv.fits(1)  # nobody has said what they hold
    kv.use([KvPool("slm", 100, 1), KvPool("llm", 128, 32)])
    kv.reserve(1, 33)
    assert kv.reserved() == [33, 64] and kv.free() == [67, 64]
    assert kv.fits(64) and not kv.fits(65)  # the LLM's last two blocks
    assert kv.could_fit(100) and not kv.could_fit(101)
    kv.release(1)
    assert kv.reserved() == [0, 0] and kv.free() == [100, 128]


@given(
    slm=st.tuples(st.integers(64, 200), st.sampled_from([1, 16, 32])),
    llm=st.tuples(st.integers(64, 200), st.sampled_from([1, 16, 32])),
    requests=st.lists(
        st.fixed_dictionaries(
            {
                "prompt": st.integers(1, 40),
                "max_tokens": st.integers(1, 24),
                "at": st.floats(0, 1.0),
                "cancel_after": st.one_of(st.none(), st.none(), st.floats(0, 1.0)),
            }
        ),
        min_size=1,
        max_size=16,
    ),
)
@settings(max_examples=100, deadline=None)
def test_never_over_committed_in_order_and_nothing_left(
    slm: tuple[int, int], llm: tuple[int, int], requests: list[dict[str, Any]]
) -> None:
    """FakeLLM asserts that it never holds more than it has. Everybody who isn't cancelled is served, and nobody is
    admitted before one who came earlier and still waits."""

    async def main() -> None:
        async with Deployment(_config(max_live=16, max_queue=100), _llms(slm, llm)) as d:
            admitted: list[int] = []
            admit = d.runtime._inter_model.admit

            def noted(request: Any) -> None:
                admitted.append(request.rid)
                client = d.runtime._client
                for pool, reserved in zip(d.runtime.require_served().pools, client.kv.reserved(), strict=True):
                    live = [pool.takes(r.limit) for r in client._live.values()]
                    assert sum(live) == reserved <= pool.tokens
                admit(request)

            d.runtime._inter_model.admit = noted  # type: ignore[method-assign]

            async def one(spec: dict[str, Any]) -> None:
                await asyncio.sleep(spec["at"])
                request, stream = d.submit(
                    input_ids=[7] * spec["prompt"], max_tokens=spec["max_tokens"], ignore_eos=True
                )
                if spec["cancel_after"] is not None:
                    await asyncio.sleep(spec["cancel_after"])
                    d.runtime.cancel(request)
                await stream.done.wait()
                if spec["cancel_after"] is None:
                    assert stream.error is None and len(stream.token_ids) == spec["max_tokens"]
                else:
                    assert stream.error is None or isinstance(stream.error, RequestCancelled)

            await asyncio.gather(*map(one, requests))
            assert admitted == sorted(admitted)
            await d.settled()
            pools = d.runtime.require_served().pools
            models = d.runtime.status()["models"].values()
            assert [(m["kv_reserved"], m["kv_free"]) for m in models] == [(0, pool.tokens) for pool in pools]

    run(main())


def test_what_does_not_fit_waits_and_a_short_one_does_not_overtake() -> None:
    async def main() -> None:
        async with Deployment(_config(), _llms((100, 1), (1000, 1))) as d:
            _, first = d.submit(input_ids=[5] * 10, max_tokens=50)
            _, long = d.submit(input_ids=[5] * 10, max_tokens=60)
            _, short = d.submit(input_ids=[5], max_tokens=4)
            status = d.runtime.status()
            assert (status["live"], status["queued"]) == (1, 2)
            assert [(m["kv_reserved"], m["kv_free"]) for m in status["models"].values()] == [(60, 40), (60, 940)]
            await short.done.wait()
            assert first.done.is_set() and len(long.token_ids) > 0
            await long.done.wait()
            assert all(s.error is None for s in (first, long, short))
            await d.settled()

    run(main())


@pytest.mark.parametrize(
    ("max_live", "block", "max_tokens", "full"),
    [(16, 1, 48, False), (16, 1, 49, True), (16, 16, 30, False), (16, 16, 31, True), (1, 1, 4, True)],
)
def test_full_is_whether_the_shortest_request_would_wait(
    max_live: int, block: int, max_tokens: int, full: bool
) -> None:
    """One request of 50 prompt tokens, on models that hold 100 tokens each."""

    async def main() -> None:
        async with Deployment(_config(max_live=max_live), _llms((100, 1), (100, block))) as d:
            assert (d.runtime.status()["full"], d.runtime.status()["max_live"]) == (False, max_live)
            _, first = d.submit(input_ids=[5] * 50, max_tokens=max_tokens)
            assert d.runtime.status()["full"] == full
            if full:
                _, second = d.submit(input_ids=[5], max_tokens=1)
                assert (d.runtime.status()["live"], d.runtime.status()["queued"]) == (1, 1)
                await second.done.wait()
            await first.done.wait()
            await d.settled()
            assert not d.runtime.status()["full"]

    run(main())


def test_a_cancelled_waiter_lets_the_next_one_in() -> None:
    async def main() -> None:
        async with Deployment(_config(), _llms((100, 1), (1000, 1))) as d:
            _, running = d.submit(input_ids=[5] * 10, max_tokens=50)
            request, waiting = d.submit(input_ids=[5] * 10, max_tokens=60)
            _, short = d.submit(input_ids=[5], max_tokens=4)
            d.runtime.cancel(request)
            assert isinstance(waiting.error, RequestCancelled)
            assert (d.runtime.status()["live"], d.runtime.status()["queued"]) == (2, 0)
            await short.done.wait()
            await running.done.wait()
            await d.settled()

    run(main())


def test_the_queue_limit_holds_for_those_who_wait_for_kv() -> None:
    async def main() -> None:
        async with Deployment(_config(max_queue=1), _llms((100, 1), (100, 1))) as d:
            streams = [d.submit(input_ids=[5] * 10, max_tokens=50)[1] for _ in range(3)]
            assert isinstance(streams[2].error, Unavailable)
            assert "the queue is full: 1 requests running, 1 waiting (limit 1)" in str(streams[2].error)
            _, short = d.submit(input_ids=[5], max_tokens=4)  # there is room for it, but somebody waits already
            assert isinstance(short.error, Unavailable)
            for stream in streams[:2]:
                await stream.done.wait()
                assert stream.error is None
            await d.settled()

    run(main())


def test_one_that_was_checked_before_a_model_came_back_smaller_does_not_block_the_queue() -> None:
    """The check is made in another thread, against what the models held then."""

    async def main() -> None:
        async with Deployment(_config(), _llms((100, 1), (100, 1))) as d:
            served = d.runtime.require_served()
            submission = d.runtime.intake.check({"input_ids": [5] * 10, "max_tokens": 60, "stream": True}, served)
            d.runtime._client.models_hold(16, [KvPool("slm", 100, 1), KvPool("llm", 50, 1)])
            late = Stream()
            assert d.runtime.submit(submission, late) is None
            assert isinstance(late.error, InvalidRequest)
            assert "70 tokens are more than the KV of the models holds: 'slm' 100, 'llm' 50" in str(late.error)
            _, short = d.submit(input_ids=[5], max_tokens=4)
            await short.done.wait()
            assert short.error is None
            await d.settled()

    run(main())


def test_none_of_those_who_wait_starts_when_all_are_ended() -> None:
    """The first of them waits for room; behind it is one that would have found some."""

    async def main() -> None:
        async with Deployment(_config(), _llms((100, 1), (1000, 1))) as d:
            streams = [d.submit(input_ids=[5] * 10, max_tokens=most)[1] for most in (50, 60, 4)]
            admitted: list[int] = []
            d.runtime._inter_model.admit = lambda request: admitted.append(request.rid)  # type: ignore[method-assign]
            d.runtime.abort("enough")
            assert all(isinstance(stream.error, Unavailable) for stream in streams)
            assert admitted == []
            await d.settled()

    run(main())


def test_a_model_that_comes_back_with_less_ends_the_latest() -> None:
    """Those on the other model only, which lost nothing."""

    async def main() -> None:
        config = RuntimeConfig.model_validate(
            {
                "models": [{"name": "slm"}, {"name": "llm"}],
                "router": {"name": "random"},
                "batching": {"llm_prefill": "lazy"},
            }
        )
        llms = _llms((200, 1), (200, 1))
        llms[0].route = lambda *_: 0
        async with Deployment(config, llms) as d:
            streams = [d.submit(input_ids=[5] * 10, max_tokens=50)[1] for _ in range(3)]
            llms[1].facts = FakeLLM("llm", lambda *_: 1, lambda: 0.03, kv_tokens=130).facts
            llms[1].die()
            for stream in streams:
                await stream.done.wait()
            assert [stream.error is None for stream in streams] == [True, True, False]
            assert isinstance(streams[2].error, Unavailable)
            await d.settled()

    run(main())


@pytest.mark.parametrize(("before", "after", "ended"), [(4, 2, [False, False, True, True]), (2, 4, [False] * 4)])
def test_a_model_that_comes_back_with_other_sessions(before: int, after: int, ended: list[bool]) -> None:
    """With fewer, the latest are ended; with more, those who wait are admitted at once."""

    async def main() -> None:
        llms = _llms((10**6, 1), (10**6, 1))
        llms[1].facts = replace(llms[1].facts, max_sessions=before)
        async with Deployment(_config(max_live=4), llms) as d:
            llms[1].facts = replace(llms[1].facts, max_sessions=after)
            reload = llms[1].reload

            async def slowly() -> None:
                await asyncio.sleep(0.5)
                await reload()

            llms[1].reload = slowly  # type: ignore[method-assign]
            llms[1].die()
            await asyncio.sleep(0.1)
            streams = [d.submit(input_ids=[5] * 10, max_tokens=50, ignore_eos=True)[1] for _ in range(4)]
            assert d.runtime.status()["live"] == before
            await asyncio.sleep(0.401)
            assert (d.runtime.status()["live"], d.runtime.status()["queued"]) == (after, 0)
            await asyncio.gather(*(stream.done.wait() for stream in streams))
            assert [isinstance(stream.error, Unavailable) for stream in streams] == ended
            assert [stream.error is not None for stream in streams] == ended
            await d.settled()

    run(main())


def test_a_model_that_comes_back_smaller_refuses_what_can_never_fit() -> None:
    async def main() -> None:
        llms = _llms((100, 1), (100, 1))
        async with Deployment(_config(), llms) as d:
            _, running = d.submit(input_ids=[5] * 10, max_tokens=50)
            _, long = d.submit(input_ids=[5] * 10, max_tokens=60)
            _, short = d.submit(input_ids=[5], max_tokens=4)
            llms[1].facts = FakeLLM("llm", lambda *_: 1, lambda: 0.03, kv_tokens=50).facts
            llms[1].die()
            await running.done.wait()
            await long.done.wait()
            await short.done.wait()
            assert isinstance(running.error, Unavailable)
            assert isinstance(long.error, InvalidRequest | Unavailable)
            assert short.error is None or isinstance(short.error, Unavailable)
            _, again = d.submit(input_ids=[5] * 10, max_tokens=40)
            await again.done.wait()
            assert again.error is None
            await d.settled()

    run(main())
