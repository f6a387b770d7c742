# SPDX-License-Identifier: Apache-2.0
"""A call that is sent ahead of the end of the one before: what it must not cost, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backends.llm.contract import StepRequest, StepResponse
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import RequestCancelled, RequestFailed, Unavailable
from tests.unit.token_router.harness import Deployment, FakeLLM, Stream, run, token_after


class FlakyLLM(FakeLLM):
    """Some of its calls fail: not made at all, or made and their answer lost."""

    rng: random.Random
    fails: float

    async def _step(self, request: StepRequest) -> StepResponse:
        luck = self.rng.random() if request.steps or request.follows else 1.0
        if luck < self.fails / 2:
            await asyncio.sleep(0.0003)
            raise RequestFailed("not made")
        response = await super()._step(request)
        if luck < self.fails:
            raise RequestFailed("the answer is lost")
        return response


def _leaves(seed: int, rid: int, position: int, share: float) -> int:
    return int(random.Random(repr((seed, rid, position))).random() < share)


@st.composite
def _worlds(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "batching": {
            "threshold": draw(st.sampled_from([1, [1, 2], [2, 2], [1, 4]])),
            "hold": draw(st.booleans()),
            "run_ahead": draw(st.sampled_from([1, 1, 4])),
            "llm_prefill": draw(st.sampled_from(["eager", "lazy"])),
        },
        "seed": draw(st.integers(0, 10**6)),
        "fails": draw(st.sampled_from([0.0, 0.01, 0.05])),
        "share": draw(st.sampled_from([0.02, 0.3])),
        "steps_s": draw(st.sampled_from([[0.006], [0.004, 0.0041], [0.001, 0.004, 0.02]])),
        "deaths": draw(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1)), max_size=3)),
        "requests": draw(
            st.lists(
                st.fixed_dictionaries(
                    {
                        "prompt": st.integers(1, 20),
                        "max_tokens": st.integers(1, 60),
                        "at": st.floats(0, 0.3),
                        "cancel_after": st.one_of(st.none(), st.none(), st.floats(0, 0.5)),
                        "stop_after": st.one_of(st.none(), st.integers(1, 30)),
                    }
                ),
                min_size=1,
                max_size=8,
            )
        ),
    }


@given(_worlds())
@settings(max_examples=60, deadline=None)
def test_whatever_fails_everybody_is_answered_and_nothing_is_left(world: dict[str, Any]) -> None:
    names = ["slm", "llm"]
    config = RuntimeConfig.model_validate(
        {
            "models": [{"name": name} for name in names],
            "router": {"name": "random"},
            "batching": world["batching"],
            "limits": {"max_live": 6},
        }
    )
    rng = random.Random(world["seed"])
    routes = (lambda rid, at, _: _leaves(world["seed"], rid, at, world["share"]), lambda *_: 1)
    llms = []
    for i, name in enumerate(names):
        llm = FlakyLLM(name, routes[i], lambda i=i: (1 + 3 * i) * rng.choice(world["steps_s"]))  # type: ignore[misc]
        llm.rng, llm.fails = rng, world["fails"]
        llms.append(llm)

    async def one(deployment: Deployment, spec: dict[str, Any]) -> None:
        await asyncio.sleep(spec["at"])
        prompt = [1 + k for k in range(spec["prompt"])]
        stream = Stream()
        inputs = {"stream": True, "input_ids": prompt, "max_tokens": spec["max_tokens"], "ignore_eos": True}
        submission = deployment.runtime.intake.check(inputs, deployment.runtime.require_served())
        request = deployment.runtime.submit(submission, stream)
        if request is None:
            assert isinstance(stream.error, Unavailable)
            return
        if spec["stop_after"] is not None:
            seen = 0

            def push(token: int) -> str:
                nonlocal seen
                seen += 1
                request.text.stopped = seen >= spec["stop_after"]
                return ""

            request.text.push = push  # type: ignore[method-assign]
        if spec["cancel_after"] is not None:
            await asyncio.sleep(spec["cancel_after"])
            deployment.runtime.cancel(request)
        await asyncio.wait_for(stream.done.wait(), 300)
        tokens = list(prompt)
        for token in stream.token_ids:
            leaves = routes[0](request.rid, len(tokens), 0)
            assert token == token_after(names[leaves], tokens)
            tokens.append(token)
        if stream.error is None:
            assert len(stream.token_ids) == min(spec["max_tokens"], spec["stop_after"] or 10**6)
        else:
            assert isinstance(stream.error, (Unavailable, RequestFailed, RequestCancelled))

    async def die(llm: FakeLLM, at: float) -> None:
        await asyncio.sleep(at)
        llm.die()

    async def main() -> None:
        async with Deployment(config, llms) as deployment:
            await asyncio.gather(
                *(one(deployment, spec) for spec in world["requests"]),
                *(die(llms[model], at) for model, at in world["deaths"]),
            )
            for llm in llms:
                llm.fails = 0.0
            await deployment.settled()

    run(main())


def _config(models: int = 2, **batching: Any) -> RuntimeConfig:
    names = ["slm", "llm"][:models]
    router = {"name": "random"} if models == 2 else {"name": "markov", "params": {"p": [[1.0]], "c": [[1]]}}
    return RuntimeConfig.model_validate(
        {"models": [{"name": name} for name in names], "router": router, "batching": batching}
    )


def test_a_long_prompt_is_in_every_call_until_it_is_through() -> None:
    """Ten chunks beside a request that decodes. A call sent ahead would be one without the prompt's next chunk."""

    async def main() -> float:
        llms = [FakeLLM("slm", lambda *_: 0, lambda: 0.01), FakeLLM("llm", lambda *_: 1, lambda: 0.01)]
        async with Deployment(_config(llm_prefill="lazy"), llms) as d:
            d.submit(input_ids=[5], max_tokens=400)
            await asyncio.sleep(0.5)
            began = asyncio.get_running_loop().time()
            _, stream = d.submit(input_ids=[5] * 80, max_tokens=1)
            await stream.done.wait()
            assert sum(len(b.follows) for b in llms[0].batches) > 20
            d.runtime.abort("enough")
            return asyncio.get_running_loop().time() - began

    assert run(main()) < 0.13


def test_step_times_are_learnt_of_calls_sent_ahead() -> None:
    """Also of a request that has never left: its first call was a prefill, the others weren't."""

    async def main() -> Any:
        async with Deployment(_config(models=1), [FakeLLM("slm", lambda *_: 0, lambda: 0.006)]) as d:
            for tokens in (5, 100):
                _, stream = d.submit(input_ids=[5, 6, 7], max_tokens=tokens)
                await stream.done.wait()
            return d.runtime.measured()["profile"]

    profile = run(main())
    assert profile is not None
    assert profile["latency"][0]["batch_ms"] == {"1": pytest.approx(6.0)}


def test_the_number_of_a_call_fits_its_place() -> None:
    async def main() -> None:
        llm = FakeLLM("slm", lambda *_: 0, lambda: 0.006)
        async with Deployment(_config(models=1), [llm]) as d:
            d.runtime._loops[0]._number = 2**31 - 10
            _, stream = d.submit(input_ids=[5], max_tokens=40)
            await stream.done.wait()
            assert len(stream.token_ids) == 40
            numbers = [request.number for request in llm.batches]
            assert 2**31 - 1 in numbers and max(numbers) < 2**31 and numbers[-1] < 40
            await d.settled()

    run(main())


def test_a_call_sent_ahead_makes_one_step() -> None:
    """The LLM prefills a prompt for one request, and another waits for it: whoever is prefilled may soon join."""

    async def main() -> None:
        slm = FakeLLM("slm", lambda rid, at, _: int(at % 3 == 0), lambda: 0.002)
        llm = FakeLLM("llm", lambda *_: 1, lambda: 0.012)
        ahead: list[StepRequest] = []
        step = llm.step

        def watched(request: StepRequest) -> asyncio.Future[StepResponse]:
            if llm._steps:
                ahead.append(request)
            return step(request)

        llm.step = watched  # type: ignore[method-assign]
        async with Deployment(_config(run_ahead=8), [slm, llm]) as d:
            streams = []
            for n in range(40):
                streams.append(d.submit(input_ids=[5] * (9 + n % 20), max_tokens=20)[1])
                await asyncio.sleep(0.031)
            await asyncio.gather(*(s.done.wait() for s in streams))
            await d.settled()
        assert ahead
        assert {request.max_steps for request in ahead} == {1}

    run(main())


def test_a_call_sent_ahead_waits_for_b_like_any_other() -> None:
    """Six requests, of which a third go to the LLM after each step: most steps reach the SLM's B = 2, not all."""

    async def main() -> None:
        slm = FakeLLM("slm", lambda rid, at, _: int((at * 7 + rid * 13) % 3 == 0), lambda: 0.006)
        llm = FakeLLM("llm", lambda *_: 1, lambda: 0.028)
        sizes: list[int] = []
        compute = slm._compute

        def watched(request: StepRequest, took_s: float) -> StepResponse:
            response = compute(request, took_s)
            made = sum(bool(result.token_ids) for result in response.results)
            if request.at_least > 1:
                sizes.append(made)
            return response

        slm._compute = watched  # type: ignore[method-assign]
        async with Deployment(_config(threshold=[2, 3], max_wait_ms=1e6), [slm, llm]) as d:
            streams = [d.submit(input_ids=[5], max_tokens=200)[1] for _ in range(6)]
            await asyncio.gather(*(s.done.wait() for s in streams))
            await d.settled()
        assert 1 not in sizes
        assert sizes.count(0) > 5 and sum(size > 1 for size in sizes) > 20

    run(main())


def test_no_call_is_sent_ahead_that_cannot_be_made() -> None:
    """Batches smaller than B, launched by the cap."""

    async def main() -> None:
        slm = FakeLLM("slm", lambda rid, at, _: int((at * 7 + rid * 13) % 5 == 0), lambda: 0.006)
        llm = FakeLLM("llm", lambda rid, at, _: int((at * 3 + rid) % 2), lambda: 0.028)
        async with Deployment(_config(threshold=[2, 3], max_wait_ms=20), [slm, llm]) as d:
            streams = [d.submit(input_ids=[5], max_tokens=200)[1] for _ in range(5)]
            await asyncio.gather(*(s.done.wait() for s in streams))
            await d.settled()
        ahead = [b for llm in (slm, llm) for b in llm.batches if b.follows]
        assert len(ahead) > 20
        assert all(len(b.steps) + len(b.follows) >= b.at_least for b in ahead)

    run(main())


def test_a_call_that_is_not_made_does_not_prolong_the_wait() -> None:
    """The third request comes back to the SLM, waits for B = 2, and is in a call sent ahead which nobody joins."""

    async def main() -> None:
        lasts = iter([0.045])
        slm = FakeLLM("slm", lambda rid, at, _: int(at == (16 if rid == 3 else 19)), lambda: 0.03)
        llm = FakeLLM("llm", lambda *_: 1, lambda: next(lasts, 0.3), chunk=64)
        config = _config(threshold=[2, 1], max_wait_ms=50, llm_prefill="lazy")
        async with Deployment(config, [slm, llm]) as d:
            stream = [d.submit(input_ids=[1] * 4, max_tokens=20)[1] for _ in range(3)][-1]
            came = []
            while not stream.done.is_set():
                if len(stream.token_ids) > len(came):
                    came.append(asyncio.get_running_loop().time())
                await asyncio.sleep(0.001)
            d.runtime.abort("enough")
        assert [b.at_least for b in slm.batches if b.follows and [s.session for s in b.steps] == [3]] == [2]
        gaps = [after - before for before, after in itertools.pairwise(came)]
        assert max(gaps) == pytest.approx(0.05 + 0.03, abs=0.003)

    run(main())


def test_after_a_call_that_made_nothing_the_next_launch_is_followed_again() -> None:
    """A request that leaves the SLM after every third token: the call sent ahead of that makes nothing. When the
    request is back, the SLM's first step there is sent late, and the others ahead."""

    async def main() -> None:
        slm = FakeLLM("slm", lambda rid, at, _: int(at % 4 == 3), lambda: 0.006)
        llm = FakeLLM("llm", lambda *_: 1, lambda: 0.028)
        async with Deployment(_config(), [slm, llm]) as d:
            _, stream = d.submit(input_ids=[5], max_tokens=200)
            await stream.done.wait()
            await d.settled()
        calls = [b for b in slm.batches if b.steps or b.follows][20:-2]
        late = [i for i, b in enumerate(calls[:-1]) if b.steps]
        assert len(late) > 20
        assert all(calls[i + 1].follows for i in late)

    run(main())


def test_nothing_is_under_way_when_the_runtime_has_ended() -> None:
    async def main() -> None:
        llms = [FakeLLM("slm", lambda *_: 0, lambda: 0.006), FakeLLM("llm", lambda *_: 1, lambda: 0.028)]
        async with Deployment(_config(), llms) as d:
            d.submit(input_ids=[5], max_tokens=400)
            while sum(len(llm._steps) for llm in llms) < 2:  # one is made, one is sent ahead of its end
                await asyncio.sleep(0.0005)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
