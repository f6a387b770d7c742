# SPDX-License-Identifier: Apache-2.0
"""The token invariants under random schedules (design, section 6), on a fake clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import RequestFailed, Unavailable
from routers import OneTokenRouter, peer_to_model
from routers.random_draw import RandomSLM
from tests.unit.token_router.harness import Deployment, FakeLLM, Stream, run, token_after


def _drawn(seed: int, model: int, rid: int, position: int, models: int, leave: float) -> int:
    """A destination that depends on nothing but its arguments."""
    rng = random.Random(repr((seed, model, rid, position)))
    return rng.randrange(1, models) if models > 1 and rng.random() < leave else 0


def _reference(
    names: Sequence[str], keep: Sequence[Sequence[int]], prompt: list[int], max_tokens: int, draw: Any
) -> tuple[list[int], list[str]]:
    """The plain sequential loop: one model at a time, one token at a time."""
    tokens, makers, at = list(prompt), [], 0
    while len(makers) < max_tokens:
        token = token_after(names[at], tokens)
        to = peer_to_model(at, draw(at, len(tokens)))
        if to == at or keep[at][to]:
            tokens.append(token)
            makers.append(names[at])
        at = to
    return tokens[len(prompt) :], makers


@st.composite
def _worlds(draw: st.DrawFn) -> dict[str, Any]:
    models = draw(st.integers(1, 3))
    threshold = draw(st.one_of(st.integers(1, 12), st.lists(st.integers(1, 12), min_size=models, max_size=models)))
    policy = draw(st.sampled_from(["async", "async", "step_sync", "model_sync"]))
    waits = {
        "threshold": threshold,
        "max_wait_ms": draw(st.sampled_from([0.1, 20.0, 1e6])),
        "hold": draw(st.booleans()),
    }
    return {
        "models": models,
        "batching": {
            "policy": policy,
            **(waits if policy == "async" else {}),
            "run_ahead": draw(st.integers(1, 6)),
            "send_ahead": draw(st.booleans()),
            "llm_prefill": draw(st.sampled_from(["eager", "lazy"])),
            "resume": draw(st.booleans()),
        },
        "max_live": draw(st.integers(1, 8)),
        "kv": [(draw(st.integers(96, 300)), draw(st.sampled_from([1, 16, 32]))) for _ in range(models)],
        "seed": draw(st.integers(0, 10**6)),
        "steps_s": draw(st.sampled_from([[0.001, 0.004, 0.02], [0.006], [0.004, 0.0041]])),  # foreseen or not
        "leave": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "requests": draw(
            st.lists(
                st.fixed_dictionaries(
                    {
                        "prompt": st.integers(1, 40),
                        "max_tokens": st.integers(1, 25),
                        "at": st.floats(0, 0.5),
                        "cancel_after": st.one_of(st.none(), st.floats(0, 0.5)),
                    }
                ),
                min_size=1,
                max_size=10,
            )
        ),
    }


@given(_worlds())
@settings(max_examples=150, deadline=None)
def test_every_stream_is_what_the_sequential_loop_gives(world: dict[str, Any]) -> None:
    """Invariants 1, 2, 4 and 5: one final answer each, the right tokens, nothing left, no deadlock."""
    names = ["a", "b", "c"][: world["models"]]
    n = len(names)
    keep = [[1 if j == i or i > 0 else 0 for j in range(n)] for i in range(n)]  # the entry drops, the others keep
    config = RuntimeConfig.model_validate(
        {
            "models": [{"name": name} for name in names],
            "router": {"name": "markov", "params": {"p": [[1.0 / n] * n] * n, "c": keep}},
            "batching": world["batching"],
            "limits": {"max_live": world["max_live"], "max_queue": 100},
        }
    )
    steps = random.Random(world["seed"])

    def llm(i: int) -> FakeLLM:
        return FakeLLM(
            names[i],
            lambda rid, position, token: _drawn(world["seed"], i, rid, position, n, world["leave"]),
            step_s=lambda: (1 + 3 * i) * steps.choice(world["steps_s"]),
            kv_tokens=world["kv"][i][0],
            kv_block=world["kv"][i][1],
        )

    async def one(deployment: Deployment, number: int, spec: dict[str, Any]) -> None:
        await asyncio.sleep(spec["at"])
        prompt = [1 + (number * 7 + k) % 900 for k in range(spec["prompt"])]
        request, stream = deployment.submit(input_ids=prompt, max_tokens=spec["max_tokens"], ignore_eos=True)
        if spec["cancel_after"] is not None:
            await asyncio.sleep(spec["cancel_after"])
            deployment.runtime.cancel(request)
        await stream.done.wait()
        expected, makers = _reference(
            names, keep, prompt, spec["max_tokens"],
            lambda at, position: _drawn(world["seed"], at, request.rid, position, n, world["leave"]),
        )  # fmt: skip
        if stream.error is None:
            assert stream.token_ids == expected
            assert stream.models == makers
            usage = stream.chunks[-1].usage
            assert usage is not None and usage.completion_tokens == len(expected)
            assert {k: v for k, v in usage.completion_tokens_by_model.items() if v} == {
                k: makers.count(k) for k in set(makers)
            }
        else:
            assert spec["cancel_after"] is not None
            assert stream.token_ids == expected[: len(stream.token_ids)]

    async def main() -> None:
        async with Deployment(config, [llm(i) for i in range(n)]) as deployment:
            await asyncio.gather(*(one(deployment, i, spec) for i, spec in enumerate(world["requests"])))
            await deployment.settled()

    run(main())


def _two(
    batching: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, router: Any = None
) -> RuntimeConfig:
    return RuntimeConfig.model_validate(
        {
            "models": [{"name": "slm"}, {"name": "llm"}],
            "router": router or {"name": "random"},
            "batching": batching or {},
            "limits": limits or {},
        }
    )


def _llms(slm: Any = lambda *_: 0, llm: Any = lambda *_: 1, step_s: float = 0.01) -> list[FakeLLM]:
    return [FakeLLM("slm", slm, lambda: step_s), FakeLLM("llm", llm, lambda: step_s)]


def test_delayed_batching_waits_for_b_requests() -> None:
    """Two requests delegate at different times: with B = 2 the LLM makes one batch of them."""

    async def main(threshold: list[int]) -> list[int]:
        llms = _llms(slm=lambda rid, position, _: int(position == 2 + rid))
        async with Deployment(_two({"threshold": threshold, "max_wait_ms": 1e6}), llms) as d:
            streams = [d.submit(input_ids=[1, 2], max_tokens=8)[1] for _ in range(2)]
            for stream in streams:
                await stream.done.wait()
            await d.settled()
        return [len(b.steps) for b in llms[1].batches if any(s.sample for s in b.steps)]

    assert run(main([1, 1])) == [1, 1]
    assert run(main([1, 2])) == [2]


def test_a_lost_llm_fails_its_requests_at_once_and_serves_again() -> None:
    async def main() -> None:
        llms = _llms(slm=lambda rid, *_: int(rid % 2 == 0))
        async with Deployment(_two(), llms) as d:
            (_, stays), (_, leaves) = (d.submit(input_ids=[5] * 20, max_tokens=1000) for _ in range(2))
            await asyncio.sleep(0.5)
            llms[1].die()
            await asyncio.sleep(0.001)
            assert isinstance(leaves.error, Unavailable) and isinstance(stays.error, Unavailable)  # both had KV there
            assert "'llm'" in str(leaves.error)
            _, after = d.submit(input_ids=[5], max_tokens=3)
            await after.done.wait()
            assert after.error is None and len(after.token_ids) == 3
            assert llms[1].reloads == 1
            await d.settled()

    run(main())


def test_an_llm_lost_while_idle_is_reloaded() -> None:
    async def main() -> None:
        llms = _llms()
        async with Deployment(_two(), llms) as d:
            llms[0].die()
            await asyncio.sleep(0.1)
            assert llms[0].reloads == 1
            _, stream = d.submit(input_ids=[5], max_tokens=3)
            await stream.done.wait()
            assert stream.error is None

    run(main())


def test_the_queue_is_bounded_and_first_come_first_served() -> None:
    async def main() -> None:
        async with Deployment(_two(limits={"max_live": 2, "max_queue": 3}), _llms()) as d:
            streams = [d.submit(input_ids=[5], max_tokens=4)[1] for _ in range(8)]
            refused = [s for s in streams if s.done.is_set()]
            assert [streams.index(s) for s in refused] == [5, 6, 7]
            assert all(isinstance(s.error, Unavailable) and "queue is full" in str(s.error) for s in refused)
            for stream in streams[:5]:
                await stream.done.wait()
                assert stream.error is None
            await d.settled()

    run(main())


def test_draining_refuses_new_requests_and_finishes_the_others() -> None:
    async def main() -> None:
        async with Deployment(_two(), _llms()) as d:
            _, running = d.submit(input_ids=[5], max_tokens=50)
            await asyncio.sleep(0.05)
            d.runtime.drain()
            _, refused = d.submit(input_ids=[5], max_tokens=50)
            assert isinstance(refused.error, Unavailable) and "draining" in str(refused.error)
            await running.done.wait()
            assert running.error is None and len(running.token_ids) == 50

    run(main())


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (lambda req: 1 / 0, "ZeroDivisionError"),
        (lambda req: _peer(req, loc=len(req.origin_input_ids) + len(req.output_ids) + 3), "nothing may be missing"),
        (lambda req: _peer(req, loc=2), "final"),
        (lambda req: _peer(req, rid=77), "rid: 77"),
        (lambda req: _tampered(req, "x"), "aren't those of the sequence from"),
        (lambda req: _tampered(req, 7), "token_ids: [5, 6, 7, "),
        (lambda req: _tampered(req, None), "aren't those of the sequence from position 0 on"),
        (lambda req: _longer(req), "aren't those of the sequence from"),
    ],
)
def test_a_broken_send_fails_only_its_request(send: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from routers.random_draw import RandomSLM

    honest = RandomSLM.send
    monkeypatch.setattr(RandomSLM, "send", lambda self, req: send(req) if req.rid == 1 else honest(self, req))

    async def main() -> None:
        async with Deployment(_two(), _llms(slm=lambda rid, position, _: int(position == 6))) as d:
            (_, broken), (_, good) = (d.submit(input_ids=[5, 6, 7], max_tokens=9) for _ in range(2))
            await broken.done.wait()
            await good.done.wait()
            assert isinstance(broken.error, RequestFailed) and message in str(broken.error)
            assert good.error is None and len(good.token_ids) == 9
            await d.settled()

    run(main())


def _peer(req: Any, loc: int | None = None, rid: int | None = None) -> Any:
    from routers import PeerReq

    tokens = req.origin_input_ids + req.output_ids
    return PeerReq(
        rid=req.rid if rid is None else rid,
        token_ids=tokens[-2:] if loc is None else tokens[max(0, loc - 2) : loc],
        loc=loc or len(tokens),
    )


def _tampered(req: Any, token: Any) -> Any:
    from routers import PeerReq

    tokens = [*req.origin_input_ids, *req.output_ids[:-1], token]
    return PeerReq(rid=req.rid, token_ids=tokens, loc=len(tokens))


def _longer(req: Any) -> Any:
    from routers import PeerReq

    tokens = [*req.origin_input_ids, *req.output_ids, 7]
    return PeerReq(rid=req.rid, token_ids=tokens[req.peer_locs[req.destination] :], loc=len(tokens))


def test_a_send_may_take_back_all_that_is_not_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the prompt's end, which both have: three tokens of one call are dropped."""
    honest = RandomSLM.send

    def send(self: Any, req: Any) -> Any:
        return honest(self, req) if req.peer_locs[1] else _peer(req, loc=2)

    monkeypatch.setattr(RandomSLM, "send", send)

    async def main() -> None:
        llms = _llms(slm=lambda rid, position, _: int(position == 5))
        async with Deployment(_two({"run_ahead": 4, "llm_prefill": "lazy"}), llms) as d:
            _, stream = d.submit(input_ids=[5, 6, 7], max_tokens=5)
            await stream.done.wait()
            assert [len(b.steps) for b in llms[0].batches[:1]] == [1] and stream.error is None
            assert stream.models[0] == "llm" and stream.token_ids[0] == token_after("llm", [5, 6, 7])

    run(main())


def test_the_metric_counts_the_handoffs_of_the_answers() -> None:
    """The LLM's token is the last: its way back to the SLM doesn't happen."""

    async def main() -> None:
        async with Deployment(_two(), _llms(slm=lambda rid, position, _: int(position == 6))) as d:
            streams = [d.submit(input_ids=[1] * 4, max_tokens=3)[1] for _ in range(5)]
            await asyncio.gather(*(stream.done.wait() for stream in streams))
            usages = [stream.chunks[-1].usage for stream in streams]
            assert [usage.handoffs for usage in usages if usage is not None] == [1] * 5
            assert d.runtime.readings().handoffs == [[0, 5], [0, 0]]
            assert d.runtime.measured()["counts"]["outcomes"] == [[10, 5], [5, 0]]  # where each would have gone

    run(main())


def test_a_model_that_cannot_be_reloaded_keeps_nobody_waiting() -> None:
    """Who comes to it while it is down is answered; the others go on; and when it is up again it serves."""

    async def main() -> None:
        llms = _llms(slm=lambda rid, position, _: int(rid == 1 and position > 60))
        async with Deployment(_two({"llm_prefill": "lazy"}), llms) as d:
            (_, comes), (_, stays) = (d.submit(input_ids=[5, 6], max_tokens=200) for _ in range(2))
            await asyncio.sleep(0.05)
            llms[1].reload_fails = True
            llms[1].die()
            await asyncio.sleep(0.05)
            _, refused = d.submit(input_ids=[5], max_tokens=3)
            assert isinstance(refused.error, Unavailable) and "'llm' is down" in str(refused.error)
            await comes.done.wait()
            assert isinstance(comes.error, Unavailable) and len(comes.token_ids) > 40
            await stays.done.wait()
            assert stays.error is None
            llms[1].reload_fails = False
            await asyncio.sleep(2)
            _, served = d.submit(input_ids=[5], max_tokens=3)
            await served.done.wait()
            assert served.error is None
            await d.settled()

    run(main())


def test_a_drain_keeps_the_queue_when_a_model_comes_back() -> None:
    async def main() -> None:
        llms = _llms()
        async with Deployment(_two({"llm_prefill": "lazy"}, {"max_live": 1}), llms) as d:
            _, running = d.submit(input_ids=[5], max_tokens=50)
            _, queued = d.submit(input_ids=[6], max_tokens=5)
            d.runtime.drain()
            llms[1].die()
            await running.done.wait()
            await queued.done.wait()
            assert running.error is None and queued.error is None

    run(main())


def test_tokens_committed_on_the_way_are_progress() -> None:
    """Each side keeps two tokens and drops the one that it leaves with: slow, but never in a circle."""

    async def main(monkeypatch: pytest.MonkeyPatch) -> Stream:
        monkeypatch.setattr(OneTokenRouter, "send", RandomSLM.send)
        llms = _llms(
            slm=lambda rid, position, _: int(position % 4 == 1), llm=lambda rid, position, _: int(position % 4 == 3)
        )
        async with Deployment(_two(), llms) as d:
            _, stream = d.submit(input_ids=[5, 6], max_tokens=60)
            await stream.done.wait()
            return stream

    with pytest.MonkeyPatch.context() as monkeypatch:
        stream = run(main(monkeypatch))
    assert stream.error is None and len(stream.token_ids) == 60
    assert set(stream.models) == {"slm", "llm"}


def test_a_long_catch_up_waits_for_a_batch_only_once() -> None:
    """40 tokens go to the LLM in five chunks of 8; B = 2 delays the first, not each of them."""

    async def main() -> float:
        llms = _llms(slm=lambda rid, position, _: int(rid == 1 and position == 45))
        async with Deployment(_two({"threshold": [1, 2], "max_wait_ms": 1000}), llms) as d:
            (_, goes), _ = (d.submit(input_ids=[5, 6], max_tokens=max_tokens) for max_tokens in (60, 2000))
            while goes.models[-1:] != ["slm"] or len(goes.token_ids) < 43:
                await asyncio.sleep(0.001)
            left = asyncio.get_running_loop().time()
            while "llm" not in goes.models:
                await asyncio.sleep(0.001)
            return asyncio.get_running_loop().time() - left

    assert 1.0 < run(main()) < 1.5


def test_receive_knows_when_the_sequence_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    from routers.markov import MarkovRouter

    seen: list[tuple[int, bool]] = []

    def receive(self: Any, peer_req: Any) -> Any:
        seen.append((peer_req.loc, peer_req.finished))
        return peer_req.token_ids

    monkeypatch.setattr(MarkovRouter, "receive", receive)
    keeps = {"name": "markov", "params": {"p": [[0.0, 1.0], [1.0, 0.0]], "c": [[1, 1], [1, 1]]}}

    async def main() -> None:
        async with Deployment(_two(router=keeps), _llms(slm=lambda *_: 1)) as d:
            _, stream = d.submit(input_ids=[5, 6], max_tokens=3)
            await stream.done.wait()

    run(main())
    assert seen == [(3, False), (4, False), (5, True)]


def test_a_router_that_makes_no_progress_is_stopped() -> None:
    """R-Stitch's trap: both sides drop the token (algorithms.md, section 8.1)."""
    drops = {"name": "markov", "params": {"p": [[0.0, 1.0], [1.0, 0.0]], "c": [[1, 0], [1, 1]]}}

    async def main() -> Stream:
        config = _two(router=drops)
        async with Deployment(config, _llms(slm=lambda *_: 1)) as d:
            d.runtime._inter_model._routers[1].send = d.runtime._inter_model._routers[0].send  # type: ignore[attr-defined]
            _, stream = d.submit(input_ids=[5, 6, 7], max_tokens=9)
            await stream.done.wait()
            await d.settled()
            return stream

    stream = run(main())
    assert isinstance(stream.error, RequestFailed) and "no progress" in str(stream.error)


def test_a_long_prompt_does_not_stall_the_others() -> None:
    """A prompt of many chunks is prefilled one chunk a step, in the steps of a request that decodes."""

    async def main() -> None:
        llms = _llms()
        async with Deployment(_two({"llm_prefill": "lazy"}), llms) as d:
            _, short = d.submit(input_ids=[5], max_tokens=100)
            await asyncio.sleep(0.05)
            before = len(short.token_ids)
            _, long = d.submit(input_ids=[5] * 80, max_tokens=1)  # 10 chunks of 8
            await long.done.wait()
            assert len(short.token_ids) - before >= 9

    run(main())
