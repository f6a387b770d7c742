# SPDX-License-Identifier: Apache-2.0
"""The runner: what a call gives, when run-ahead stops, and that a failing session fails alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from python_backends.llm.contract import SamplingParams, SessionOpen, SessionResult, SessionStep, StepRequest
from python_backends.llm.engines.config import PacedConfig
from python_backends.llm.engines.paced import PacedEngine, next_token
from python_backends.llm.runner import LLMRunner, check_compatible
from python_backends.llm.sampling import routing_stream, uniform
from routers import Algorithm, RouterConfig, StepResult
from tests.unit.llm.fakes import EOS, FakeEngine, FakeParams, FakeRouter

FAKE = Algorithm(name="fake", params=FakeParams, entry=FakeRouter, peer=FakeRouter)
CONFIG = RouterConfig(name=f"{__name__}:FAKE")


class Rig:
    """A runner over the fakes, and the calls a test makes of it."""

    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine()
        self.router = FakeRouter(FakeParams(), ("slm", "llm"), 0)
        self.runner = LLMRunner("slm", 0, self.engine, self.router, CONFIG)

    def call(
        self, *steps: SessionStep, opens: dict[int, dict[str, Any]] | None = None, **more: Any
    ) -> list[SessionResult]:
        opened = [
            SessionOpen(**{"session": s, "prompt_tokens": 2, "limit": 100, **o}) for s, o in (opens or {}).items()
        ]
        return self.runner.execute(StepRequest(list(steps), opened, **more)).results

    def start(self, *sessions: int, last: int = 1, **opened: Any) -> list[SessionResult]:
        """Open these with the prompt [0, last] and make one step."""
        steps = [SessionStep(s, 0, [0, last]) for s in sessions]
        return self.call(*steps, opens={s: opened for s in sessions})


def test_a_step_gives_each_session_its_token() -> None:
    rig = Rig()
    first, second = rig.call(SessionStep(5, 0, [0, 3]), SessionStep(6, 0, [0, 8]), opens={5: {}, 6: {}})
    assert (first.token_ids, second.token_ids) == ([4], [9])
    assert first.fields == {"token": 4} and second.fields == {"token": 9}
    one_hot = torch.tensor([9.0] + [0.0] * 15)
    assert first.logprobs == pytest.approx([float(one_hot.log_softmax(-1)[0])], abs=1e-5)
    assert first.destination == 0 and first.error is None


def test_what_route_is_given() -> None:
    rig = Rig()
    seed = SamplingParams(seed=77)
    rig.call(SessionStep(5, 0, [0, 3]), opens={5: {"sampling": seed, "router_params": {"leave_at": 4}}})
    (seen,) = rig.router.seen
    assert (list(seen.rids), list(seen.places), list(seen.token_ids)) == ([5], [2], [4])
    assert (seen.next_token_ids.tolist(), seen.next_token_ids.dtype) == ([4], torch.int64)
    assert seen.draw(0) == uniform(77, 2, routing_stream(0))
    assert seen.params[0].leave_at == 4
    assert seen.logits.shape == (1, 16)
    assert (list(seen.sequences[0]), seen.prompt_tokens) == ([0, 3], [2])


@pytest.mark.parametrize(
    ("opened", "step", "tokens", "destination"),
    [
        ({}, {}, [2, 3, 4, 5, 6], 0),
        ({"router_params": {"leave_at": 4}}, {}, [2, 3, 4], 1),
        ({"limit": 5}, {}, [2, 3, 4], 0),
        ({}, {"token_ids": [0, 12]}, [13, 14, EOS], 0),
        ({"stop_at_eos": False}, {"token_ids": [0, 12]}, [13, 14, EOS, EOS, EOS], 0),
        ({}, {"sample": False}, [], 0),
    ],
    ids=["max_steps", "leaves", "limit", "eos", "eos ignored", "prefill only"],
)
def test_run_ahead_stops(opened: dict[str, Any], step: dict[str, Any], tokens: list[int], destination: int) -> None:
    rig = Rig()
    mine = SessionStep(**{"session": 1, "start": 0, "token_ids": [0, 1], **step})
    other = SessionStep(2, 0, [0, 1])
    results = rig.call(mine, other, opens={1: opened, 2: {}}, max_steps=5)
    assert results[0].token_ids == tokens and results[0].destination == destination
    assert len(results[0].logprobs) == len(tokens)
    # the other one is at the same point: nothing is thrown away, nothing computed in vain
    steps = max(1, len(tokens))
    assert results[1].token_ids == [2, 3, 4, 5, 6][:steps]
    assert len(rig.engine.steps) == steps
    assert rig.engine.steps[-1][-1] == (other if steps == 1 else SessionStep(2, steps, [steps]))


@pytest.mark.parametrize(("max_leaves", "counts"), [(0, [1, 1, 1]), (1, [1, 3, 3]), (2, [1, 3, 6])])
def test_run_ahead_goes_on_without_those_who_may_leave(max_leaves: int, counts: list[int]) -> None:
    rig = Rig()
    leave_at = {1: {"leave_at": 2}, 2: {"leave_at": 4}, 3: {}}
    results = rig.call(
        *(SessionStep(s, 0, [0, 1]) for s in leave_at),
        opens={s: {"router_params": params} for s, params in leave_at.items()},
        max_steps=6,
        max_leaves=max_leaves,
    )
    assert [r.token_ids for r in results] == [[2, 3, 4, 5, 6, 7][:n] for n in counts]
    assert [r.destination for r in results] == [1, int(counts[1] == 3), 0]
    assert [s.session for s in rig.engine.steps[-1]] == [s for s in leave_at if counts[s - 1] == max(counts)]


def test_the_last_token_of_run_ahead_is_not_committed() -> None:
    rig = Rig()
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {}}, max_steps=3)  # holds 0 1 2 3, has sampled 4
    (rejected,) = rig.call(SessionStep(1, 3, [7]))  # drops 3 as well, another model's 7 instead
    assert rejected.token_ids == [8]
    response = rig.runner.execute(StepRequest([SessionStep(1, 4, [8])]))
    assert response.stats.kv_tokens == 5 and response.stats.sessions == 1 and response.stats.steps == 1


def test_an_error_ends_run_ahead_and_takes_the_tokens() -> None:
    rig = Rig()
    rig.engine.error_after = {3}
    first, second = rig.call(SessionStep(1, 0, [0, 1]), SessionStep(2, 0, [0, 7]), opens={1: {}, 2: {}}, max_steps=9)
    assert first == SessionResult(error="the session broke")
    assert second.token_ids == [8, 9, 10] and second.error is None


def test_an_engine_that_fails_fails_its_batch_only() -> None:
    rig = Rig()
    rig.start(1, 2, 3)
    rig.engine.fail = True
    assert [r.error for r in rig.call(SessionStep(1, 2, [2]), SessionStep(2, 2, [2]))] == ["the engine broke"] * 2
    rig.engine.fail = False
    assert rig.call(SessionStep(3, 2, [2]))[0].token_ids == [3]


def test_logits_that_are_not_finite_fail_their_row() -> None:
    rig = Rig()
    rig.engine.nan_after = {9}
    good, bad, other = rig.call(
        *(SessionStep(s, 0, [0, t]) for s, t in ((1, 1), (2, 9), (3, 5))), opens={1: {}, 2: {}, 3: {}}, max_steps=4
    )
    assert bad.token_ids == [] and "not finite" in str(bad.error)
    assert (good.token_ids, other.token_ids) == ([2], [6])


def raises_for(token: int) -> Callable[[StepResult], torch.Tensor]:
    def route(result: StepResult) -> torch.Tensor:
        if token in result.token_ids:
            raise RuntimeError("my router broke")
        return torch.ones(len(result.rids), dtype=torch.int64)

    return route


def field_for(token: int) -> Callable[[StepResult], torch.Tensor]:
    def route(result: StepResult) -> torch.Tensor:
        for fields, mine in zip(result.fields, result.token_ids, strict=True):
            fields["value"] = torch.zeros(1) if mine == token else 1
        return torch.ones(len(result.rids), dtype=torch.int64)

    return route


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (raises_for(6), "RuntimeError: my router broke"),
        (field_for(6), "not JSON serializable"),
        (lambda r: torch.where(r.next_token_ids == 6, 2, 1), "0 to 1, it returned"),
        (lambda r: torch.where(r.next_token_ids == 6, -1, 1), "0 to 1, it returned"),
        (lambda r: [2 if token == 6 else 1 for token in r.token_ids], "0 to 1, it returned [2]"),
        (lambda r: [-1 if token == 6 else 1 for token in r.token_ids], "0 to 1, it returned [-1]"),
        (lambda r: [True if token == 6 else 1 for token in r.token_ids], "it returned a list with bool"),
        (lambda r: [1 for token in r.token_ids if token != 6], "it returned a list of 0"),
    ],
)
def test_a_row_that_route_fails_for_fails_alone(override: Callable[[StepResult], Any], message: str) -> None:
    rig = Rig()
    rig.router.override = override
    results = rig.call(
        *(SessionStep(s, 0, [0, t]) for s, t in ((1, 1), (2, 5), (3, 8))), opens={1: {}, 2: {}, 3: {}}, max_steps=4
    )
    assert [r.token_ids for r in results] == [[2], [], [9]]
    assert [r.destination for r in results] == [1, 0, 1]
    assert [r.fields.get("token") for r in results] == [2, None, 9]
    assert message in str(results[1].error) and "FakeRouter" in str(results[1].error)


def test_a_router_may_return_a_list() -> None:
    rig = Rig()
    rig.router.override = lambda result: [int(token == 6) for token in result.token_ids]
    results = rig.call(SessionStep(1, 0, [0, 1]), SessionStep(2, 0, [0, 5]), opens={1: {}, 2: {}})
    assert [r.destination for r in results] == [0, 1]
    assert [(r.token_ids, r.error) for r in results] == [([2], None), ([6], None)]


@pytest.mark.parametrize(
    ("rubbish", "told"),
    [
        (None, "NoneType"),
        (1, "int"),
        ((0,), "tuple"),
        (torch.zeros(1), "torch.float32 [1]"),
        (torch.zeros(2, 2, dtype=torch.int64), "torch.int64 [2, 2]"),
        ([], "a list of 0"),
        ([0, 0, 0], "a list of 3"),
        ([False], "a list with bool"),
        ([1.0, None, 0], "a list with NoneType and float"),
        ([torch.zeros((), dtype=torch.int64)], "a list with Tensor"),
    ],
)
def test_rubbish_from_route_is_an_error(rubbish: object, told: str) -> None:
    rig = Rig()
    rig.router.override = lambda _: rubbish
    message = f"it must return INT64 [1] or a list of as many ints, it returned {told}"
    assert [str(r.error).endswith(message) for r in rig.start(1, 2)] == [True, True]


def test_unknown_sessions_and_failed_opens() -> None:
    rig = Rig(FakeEngine(max_sessions=2))
    unknown, known = rig.call(SessionStep(8, 0, [1]), SessionStep(1, 0, [0, 1]), opens={1: {}}, max_steps=3)
    assert "session 8 is not open" in str(unknown.error) and known.token_ids == [2]
    (bad_params,) = rig.start(2, router_params={"nonsense": 1})
    assert "'nonsense' can't be set" in str(bad_params.error) and "leave_at" in str(bad_params.error)
    assert [r.error for r in rig.start(3, 4)] == [None, "full"]
    assert rig.start(4)[0].error == "full"
    with pytest.raises(ValueError, match="at most once"):
        rig.call(SessionStep(1, 2, [2]), SessionStep(1, 2, [2]))


def test_free_comes_first_and_hello_frees_everything() -> None:
    rig = Rig(FakeEngine(max_sessions=2))
    rig.start(1, 2)
    (result,) = rig.call(SessionStep(3, 0, [0, 1]), opens={3: {}}, free=[1, 44])
    assert result.token_ids == [2] and rig.engine.freed == [1, 44]
    assert rig.runner.execute(StepRequest(free=[2, 44])).stats.kv_tokens == 2
    response = rig.runner.execute(StepRequest(hello=True))
    assert rig.engine.freed == [1, 44, 2, 44, 3]
    assert response.stats.sessions == response.stats.kv_tokens == 0
    assert response.facts is not None
    assert (response.facts.name, response.facts.engine, response.facts.eos_token_ids) == ("slm", "fake", (EOS,))
    assert response.facts.samples and response.facts.pid == os.getpid()
    assert rig.runner.execute(StepRequest()).facts is None


def test_a_paced_engine_writes_its_function() -> None:
    engine = PacedEngine(PacedConfig(type="paced", step_ms=0), "slm")
    config = RouterConfig(name="random", params={"p": 0.0})
    runner = LLMRunner("slm", 0, engine, config.router(0, ("slm", "llm")), config)
    response = runner.execute(
        StepRequest([SessionStep(1, 0, [4, 5])], [SessionOpen(1, 2, 100)], max_steps=6, hello=True)
    )
    sequence = [4, 5]
    for _ in range(6):
        sequence.append(next_token("slm", sequence, 1000, 0))
    assert response.results[0].token_ids == sequence[2:]
    assert response.results[0].logprobs == [0.0] * 6
    assert response.facts is not None and not response.facts.samples
    hot = SessionOpen(2, 1, 9, SamplingParams(temperature=1.0))
    (refused,) = runner.execute(StepRequest([SessionStep(2, 0, [1])], [hot])).results
    assert "greedy requests only" in str(refused.error)


class NoTorch(TorchFunctionMode):
    """While it is entered, every call of torch fails."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"torch was called: {func}")


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("router", "params"),
    [
        ("random", {"p": 0.5}),
        ("single", {"model": 1}),
        ("markov", {"p": [[0.5, 0.5], [0.5, 0.5]], "c": [[1, 0], [1, 1]]}),
    ],
)
def test_without_logits_a_step_calls_no_torch(router: str, params: dict[str, Any], index: int) -> None:
    """A tensor of one number costs more than the rest of such a step."""
    engine = PacedEngine(PacedConfig(type="paced", step_ms=0), "slm")
    config = RouterConfig(name=router, params=params)
    runner = LLMRunner("slm", index, engine, config.router(index, ("slm", "llm")), config)
    steps = [SessionStep(session, 0, [4, session]) for session in range(9)]
    with NoTorch():
        response = runner.execute(StepRequest(steps, [SessionOpen(s.session, 2, 100) for s in steps]))
    assert [r.error for r in response.results] == [None] * 9
    assert [r.token_ids for r in response.results] == [[next_token("slm", s.token_ids, 1000, 0)] for s in steps]


def test_a_router_that_needs_what_the_engine_lacks_is_refused() -> None:
    config = RouterConfig(name="rstitch")
    paced = PacedEngine(PacedConfig(type="paced"), "slm")
    with pytest.raises(ValueError, match=r"RStitchSLM needs logits.*paced.*llama_cpp"):
        LLMRunner("slm", 0, paced, config.router(0, ("slm", "llm")), config)
    needy = type("Needy", (FakeRouter,), {"needs_hidden_states": True})(FakeParams(), ("slm", "llm"), 0)
    glimp = RouterConfig(name="glimp")
    with pytest.raises(ValueError, match="GlimpLLM needs token_bytes, which the engine in use"):
        check_compatible(glimp.router(1, ("slm", "llm")), FakeEngine().capacity())
    with pytest.raises(ValueError, match="Needy needs hidden_states"):
        check_compatible(needy, FakeEngine().capacity())
    check_compatible(needy, FakeEngine(("logits", "hidden_states")).capacity())


def test_a_call_sent_ahead_goes_on_with_those_who_stayed() -> None:
    rig = Rig()
    opens = {1: {}, 2: {"router_params": {"leave_at": 2}}, 3: {"limit": 3}}
    rig.call(*(SessionStep(s, 0, [0, 1]) for s in opens), opens=opens, number=4)
    stayed, left, full, new = 1, 2, 3, 9
    results = rig.call(SessionStep(new, 0, [0, 7]), opens={new: {}}, number=5, follows=[stayed, left, full])
    assert [r.token_ids for r in results] == [[8], [3], [], []]
    assert [r.error for r in results] == [None] * 4
    assert rig.engine.steps[-1] == [SessionStep(new, 0, [0, 7]), SessionStep(stayed, 2, [2])]
    (again,) = rig.call(number=6, follows=[stayed])
    assert again.token_ids == [4]


def test_a_call_sent_ahead_of_none_that_stays_does_nothing() -> None:
    rig = Rig()
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {"router_params": {"leave_at": 2}}}, number=1)
    made = len(rig.engine.steps)
    assert rig.call(number=2, follows=[1]) == [SessionResult()]
    assert len(rig.engine.steps) == made


@pytest.mark.parametrize("number", [2, 4])
def test_nobody_is_stepped_when_another_call_came_in_between(number: int) -> None:
    rig = Rig()
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {}}, number=2)
    assert rig.call(number=number, follows=[1]) == [SessionResult()]
    assert rig.call(SessionStep(1, 2, [2]), number=number + 1)[0].token_ids == [3]


def test_a_call_that_was_overtaken_is_made_and_opens_nobody_who_has_been_freed() -> None:
    rig = Rig()
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {}}, number=4)
    (follows,) = rig.call(number=6, follows=[1], free=[7])  # call 5 is still to come
    assert follows == SessionResult()
    ended, new = rig.call(
        SessionStep(7, 0, [0, 5]), SessionStep(8, 0, [0, 6]), opens={7: {}, 8: {}}, number=5, follows=[]
    )
    assert "session 7 is not open" in str(ended.error) and new.token_ids == [7]
    assert rig.runner.execute(StepRequest(number=7)).stats.sessions == 2
    assert rig.call(SessionStep(1, 2, [2]), number=8)[0].token_ids == [3]
    assert rig.call(number=9, follows=[1])[0].token_ids == [4]


def test_an_overtaken_call_leaves_those_who_follow_the_other_one() -> None:
    rig = Rig()
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {}}, number=6)
    rig.call(SessionStep(2, 0, [0, 1]), opens={2: {}}, number=5)
    assert [r.token_ids for r in rig.call(number=7, follows=[1, 2])] == [[3], []]


def test_a_router_that_says_hello_counts_anew() -> None:
    rig = Rig()
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {}}, number=6)
    rig.runner.execute(StepRequest(hello=True))
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {}}, number=1)
    assert rig.call(number=2, follows=[1])[0].token_ids == [3]


def test_a_number_that_begins_again_is_not_overtaken() -> None:
    rig = Rig()
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {}}, number=2**31 - 1)
    rig.call(SessionStep(1, 2, [2]), number=0)
    assert rig.call(number=1, follows=[1])[0].token_ids == [4]


def test_who_is_freed_does_not_follow() -> None:
    rig = Rig()
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {}}, number=1)
    assert rig.call(number=2, follows=[1], free=[1]) == [SessionResult()]


def test_too_few_sessions_are_not_stepped_and_are_sent_anew() -> None:
    rig = Rig()
    rig.call(SessionStep(1, 0, [0, 1]), opens={1: {}}, number=1)
    made = len(rig.engine.steps)
    too_few = rig.call(SessionStep(2, 0, [0, 5]), opens={2: {}}, number=2, follows=[1], at_least=3)
    assert too_few == [SessionResult()] * 2
    assert rig.call(number=3, follows=[1, 2]) == [SessionResult()] * 2
    assert len(rig.engine.steps) == made
    again = rig.call(SessionStep(2, 0, [0, 5]), SessionStep(1, 2, [2]), number=4, at_least=2)
    assert [r.token_ids for r in again] == [[6], [3]]
