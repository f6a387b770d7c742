# SPDX-License-Identifier: Apache-2.0
"""The scheduling policies in the whole runtime: who runs together with whom, and what a handoff costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from python_backends.llm.contract import StepRequest, StepResponse
from python_backends.token_router.config import BatchingConfig, RuntimeConfig
from tests.unit.token_router.harness import Deployment, FakeLLM, run

PROMPT = [5, 6, 7, 8]


class TimedLLM(FakeLLM):
    """Remembers when each of its steps began and ended, in fake seconds."""

    spans: list[tuple[float, float, int]]

    async def _step(self, request: StepRequest) -> StepResponse:
        loop = asyncio.get_running_loop()
        began = loop.time()
        response = await super()._step(request)
        self.spans.append((began, loop.time(), len(request.steps)))
        return response


def _serve(batching: dict[str, Any], requests: int = 4, max_tokens: int = 30) -> list[TimedLLM]:
    """Some requests that go to the LLM at every third position, and what the models did."""
    routes: list[Callable[[int, int, int], int]] = [lambda rid, at, _: int((at + rid) % 3 == 0), lambda *_: 1]
    llms: list[TimedLLM] = []

    async def main() -> None:
        config = RuntimeConfig.model_validate(
            {"models": [{"name": "slm"}, {"name": "llm"}], "router": {"name": "random"}, "batching": batching}
        )
        for name, route, step_s in (("slm", routes[0], 0.006), ("llm", routes[1], 0.0279)):
            llm = TimedLLM(name, route, step_s=lambda step_s=step_s: step_s)  # type: ignore[misc]
            llm.spans = []
            llms.append(llm)
        async with Deployment(config, llms) as deployment:
            streams = [
                deployment.submit(input_ids=PROMPT, max_tokens=max_tokens, ignore_eos=True)[1] for _ in range(requests)
            ]
            await asyncio.gather(*(s.done.wait() for s in streams))
            assert all(len(s.token_ids) == max_tokens for s in streams)
            await deployment.settled()

    run(main())
    return llms


def _overlaps(llms: list[TimedLLM]) -> int:
    """How many pairs of an SLM step and an LLM step ran at the same time."""
    slm, llm = ([s for s in m.spans if s[2]] for m in llms)  # a call without sessions only frees
    return sum(a[0] < b[1] and b[0] < a[1] for a in slm for b in llm)


def test_async_models_run_side_by_side() -> None:
    assert _overlaps(_serve({})) > 10


def test_step_sync_launches_nothing_before_the_slowest_has_finished() -> None:
    slm, llm = _serve({"policy": "step_sync"})
    assert _overlaps([slm, llm]) > 5  # a round is of both models, where both have requests
    began = {span[0] for span in llm.spans if span[2]}
    for start, end, sessions in llm.spans:
        inside = [s for s in slm.spans if s[2] and s[0] < end and start < s[1]]
        assert not sessions or len(inside) <= 1  # one step of the SLM beside it, begun together with it
        assert all(s[0] in began for s in inside)


def test_model_sync_runs_one_model_at_a_time_until_all_have_left_it() -> None:
    slm, llm = _serve({"policy": "model_sync"})
    assert _overlaps([slm, llm]) == 0
    visits = [sessions for _, _, sessions in llm.spans if sessions]
    assert visits[1:] and max(visits) == 4  # the SLM goes on until every request has left it


@pytest.mark.parametrize("policy", ["async", "step_sync", "model_sync"])
def test_without_resume_a_request_that_comes_back_is_prefilled_as_a_new_one(policy: str) -> None:
    kept = _serve({"policy": policy, "llm_prefill": "lazy"})
    again = _serve({"policy": policy, "llm_prefill": "lazy", "resume": False})
    for model in (0, 1):
        opened = [len(b.opens) for b in kept[model].batches]
        assert sum(opened) == 4  # each request once
        visits = sum(len(b.opens) for b in again[model].batches)
        assert visits > 8
        assert all(step.start == 0 for b in again[model].batches for step in b.steps if step.session in
                   {o.session for o in b.opens})  # fmt: skip
    assert sum(len(s.token_ids) for b in again[1].batches for s in b.steps) > 4 * sum(
        len(s.token_ids) for b in kept[1].batches for s in b.steps
    )


@pytest.mark.parametrize("given", [{"threshold": 2}, {"max_wait_ms": 5.0}, {"hold": True}])
def test_what_only_async_knows_is_refused_with_another_policy(given: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(ValidationError, match=f"{name}: has no meaning with policy step_sync"):
        BatchingConfig.model_validate({"policy": "step_sync", **given})
