# SPDX-License-Identifier: Apache-2.0
"""An LLM on another host in the runtime: when its calls leave, and what their way costs, on a clock that jumps."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from python_backends.llm.contract import LLMFacts, StepRequest, StepResponse
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import Unavailable
from tests.unit.token_router.harness import VOCABULARY, Deployment, FakeLLM, run

STEP_S = 0.006
TOKENS = 200


class FarLLM(FakeLLM):
    """A fake LLM that a message reaches after half of round_trip_s, and whose answer takes as long."""

    def __init__(self, far_s: float, vocabulary: int = VOCABULARY, **fake: Any) -> None:
        super().__init__("slm", lambda *_: 0, lambda: STEP_S, **fake)
        self.facts = LLMFacts(**{**vars(self.facts), "vocab_size": vocabulary})
        self.far_s = far_s

    @property
    def round_trip_s(self) -> float:
        return self.far_s

    def step(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        async def there_and_back() -> StepResponse:
            await asyncio.sleep(self.far_s / 2)
            response = await FakeLLM.step(self, request)
            await asyncio.sleep(self.far_s / 2)
            return response

        return asyncio.ensure_future(there_and_back())


def _config(**batching: Any) -> RuntimeConfig:
    return RuntimeConfig.model_validate(
        {
            "models": [{"name": "slm", "url": "far:8001"}],
            "router": {"name": "markov", "params": {"p": [[1.0]], "c": [[1]]}},
            "batching": batching,
        }
    )


def _answer(far_s: float, **batching: Any) -> tuple[float, dict[str, float]]:
    """The time of a token, and the step times that were learnt."""

    async def main() -> tuple[float, dict[str, float]]:
        async with Deployment(_config(**batching), [FarLLM(far_s)]) as d:
            _, first = d.submit(input_ids=[5], max_tokens=20)  # the step time is learnt
            await first.done.wait()
            began_s = asyncio.get_running_loop().time()
            _, stream = d.submit(input_ids=[5], max_tokens=TOKENS)
            await stream.done.wait()
            per_token_s = (asyncio.get_running_loop().time() - began_s) / TOKENS
            await d.settled()
            return per_token_s, d.runtime.measured()["profile"]["latency"][0]["batch_ms"]

    answer: tuple[float, dict[str, float]] = run(main())
    return answer


@pytest.mark.parametrize("far_s", [0.0, 0.001, 0.002, 0.005])
def test_the_way_is_hidden_behind_the_steps(far_s: float) -> None:
    """The next call is there when the step is over, so that the LLM never waits for one."""
    per_token_s, learnt = _answer(far_s)
    assert per_token_s == pytest.approx(STEP_S, rel=0.03)
    assert learnt == {"1": pytest.approx(STEP_S * 1000, rel=0.01)}


def test_a_way_longer_than_a_step_is_hidden_as_far_as_two_calls_can() -> None:
    per_token_s, _ = _answer(0.020)
    apart_s = 0.001  # between a call and the next one
    assert per_token_s == pytest.approx((STEP_S + 0.020 + apart_s) / 2, rel=0.03)


def test_without_calls_sent_ahead_each_step_takes_its_way_too_and_the_model_is_told_so() -> None:
    """What `batching: auto` and `tokenrouter threshold` solve for: the way is part of a step."""
    per_token_s, learnt = _answer(0.004, send_ahead=False)
    assert per_token_s == pytest.approx(STEP_S + 0.004, rel=0.01)
    assert learnt == {"1": pytest.approx((STEP_S + 0.004) * 1000, rel=0.01)}


@pytest.mark.parametrize("seed", range(40))
def test_two_who_wait_for_each_other_on_a_far_llm_do_not_do_so_for_ever(seed: int) -> None:
    """The LLM's batch is two. A call that makes nothing, since too few stayed, says so only after the next one has been
    sent ahead, which counts on them to stay."""

    def leaves(share: float) -> Any:
        return lambda rid, position, _: int(random.Random(repr((seed, share, rid, position))).random() < share)

    async def main() -> None:
        config = RuntimeConfig.model_validate(
            {
                "models": [{"name": "slm"}, {"name": "llm", "url": "far:8001"}],
                "router": {"name": "random"},
                "batching": {"threshold": [1, 2], "llm_prefill": "lazy"},
            }
        )
        far = FarLLM(0.012)
        far.name, far.route, far.step_s = "llm", leaves(0.1), lambda: 0.008
        rng = random.Random(seed)
        async with Deployment(config, [FakeLLM("slm", leaves(0.3), lambda: 0.002), far]) as d:
            streams = []
            for _ in range(3):
                await asyncio.sleep(rng.uniform(0, 0.05))
                streams.append(d.submit(input_ids=[5], max_tokens=40, ignore_eos=True)[1])
            for stream in streams:
                await asyncio.wait_for(stream.done.wait(), 20)
                assert stream.error is None
            await d.settled()

    run(main())


def test_a_far_model_of_another_vocabulary_serves_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        config = RuntimeConfig.model_validate(
            {"models": [{"name": "slm"}, {"name": "llm", "url": "far:8001"}], "router": {"name": "random"}}
        )
        far = FarLLM(0.002, vocabulary=900)
        far.name = "llm"
        async with Deployment(config, [FakeLLM("slm", lambda *_: 0, lambda: STEP_S), far]) as d:
            _, stream = d.submit(input_ids=[5], max_tokens=1)
            assert isinstance(stream.error, Unavailable)
            assert str(stream.error) == (
                "model 'llm' at far:8001 has a vocabulary of 900 tokens, and 'slm' one of 1000;"
                " all models need the same"
            )
            assert caplog.messages == [f"no request is taken: {stream.error}"]

    run(main())


def test_a_lost_llm_is_tried_again_after_ever_longer_pauses_and_says_why() -> None:
    async def main() -> None:
        llm = FarLLM(0.002)
        tried_s: list[float] = []

        async def reload() -> None:
            tried_s.append(asyncio.get_running_loop().time())
            raise Unavailable("model 'slm' can't be reloaded: far:8001: nobody is there")

        llm.reload = reload  # type: ignore[method-assign]
        async with Deployment(_config(), [llm]) as d:
            llm.die()
            await asyncio.sleep(40)
            assert [b - a for a, b in itertools.pairwise(tried_s)] == pytest.approx([1, 2, 4, 8, 8, 8, 8])
            assert d.runtime.status()["models"]["slm"]["problem"] == "can't be reloaded: far:8001: nobody is there"
            _, stream = d.submit(input_ids=[5], max_tokens=1)
            assert str(stream.error) == "model 'slm' is down: can't be reloaded: far:8001: nobody is there"
            del llm.reload  # it is there again
            await asyncio.sleep(10)
            assert d.runtime.status()["models"]["slm"]["problem"] is None

    run(main())
