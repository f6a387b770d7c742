# SPDX-License-Identifier: Apache-2.0
"""Runs inside the executor (`pending: reuse`, one rank): the tokens of a call of several steps are those of as many
calls of one, and each session's are one request."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from python_backends.llm.contract import SamplingParams, SessionOpen, SessionResult, SessionStep, StepRequest
from python_backends.llm.engines import build_engine, parse_engine_config
from python_backends.llm.engines.tensorrt_llm.compute import Piece
from python_backends.llm.engines.tensorrt_llm.deciding import Deciding
from python_backends.llm.engines.tensorrt_llm.engine import TensorRTLLMEngine
from python_backends.llm.runner import LLMRunner
from routers import Algorithm, RouterConfig, StepResult
from tests.unit.llm import fake_tensorrt_llm
from tests.unit.llm.fake_tensorrt_llm import CHUNK, EOS, VOCAB, Fake, toy_logits
from tests.unit.llm.fakes import FakeParams, FakeRouter

FAKE = Algorithm(name="fake", params=FakeParams, entry=FakeRouter, peer=FakeRouter)
LONG = list(range(5, 5 + 3 * CHUNK))  # a prompt of three of the executor's own chunks
PROMPTS = {1: LONG, 2: [9, 8, 7], 3: [20]}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "0")  # so that monkeypatch puts back what the engine sets
    return fake_tensorrt_llm.install(monkeypatch)


class Rig:
    """A runner over the engine. runs: false = the runner makes each step, as it does with other engines."""

    def __init__(self, folder: Path, runs: bool = True, eos: int = EOS, **settings: Any) -> None:
        (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": eos}))
        values = {"type": "tensorrt_llm", "weights": str(folder), "max_sessions": 4, "context_tokens": 60, **settings}
        engine = build_engine(parse_engine_config(values), "slm", hidden_states=False)
        assert isinstance(engine, TensorRTLLMEngine)
        self.engine = engine
        if not runs:
            engine.runs = False
        self.router = FakeRouter(FakeParams(), ("slm", "llm"), 0)
        self.runner = LLMRunner("slm", 0, engine, self.router, RouterConfig(name=f"{__name__}:FAKE"))

    def start(self, opened: dict[int, dict[str, Any]], **more: Any) -> list[SessionResult]:
        """The sessions' first call, over their whole prompts."""
        opens = [
            SessionOpen(**{"session": s, "prompt_tokens": len(PROMPTS[s]), "limit": 60, "stop_at_eos": False, **o})
            for s, o in opened.items()
        ]
        return self.call(*(SessionStep(s, 0, PROMPTS[s]) for s in opened), opens=opens, **more)

    def call(self, *steps: SessionStep, **more: Any) -> list[SessionResult]:
        self.response = self.runner.execute(StepRequest(list(steps), **more))
        return self.response.results


def plain(prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of a loop on the toy model itself."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def token(session: int, place: int) -> int:
    """Of a session's greedy answer."""
    return plain(PROMPTS[session], place + 1)[-1]


SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=12)
PENALTIES = SamplingParams(temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, seed=5)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, PENALTIES], ids=["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("apart", [0, 2])
def test_the_tokens_are_those_of_the_runners_own_loop(
    fake: Fake, tmp_path: Path, sampling: SamplingParams, apart: int
) -> None:
    opened = {s: {"sampling": sampling} for s in PROMPTS}
    expected = Rig(tmp_path, runs=False).start(opened, max_steps=8)
    assert len(fake.sent) == 8 * len(PROMPTS)
    fake.sent.clear()
    fake.stored.clear()
    fake.apart = apart
    rig = Rig(tmp_path)
    assert rig.start(opened, max_steps=8) == expected
    assert [len(r.token_ids) for r in expected] == [8, 8, 8]
    assert [(s.tokens, s.params.max_tokens) for s in fake.sent] == [(p, 8) for p in PROMPTS.values()]
    stats = rig.response.stats
    assert (stats.steps, stats.kv_tokens) == (8, sum(len(p) + 7 for p in PROMPTS.values()))
    assert 0 <= stats.engine_ms <= stats.compute_ms


@pytest.mark.parametrize("apart", [0, 3])
def test_a_call_after_a_run_finds_what_the_run_left(fake: Fake, tmp_path: Path, apart: int) -> None:
    fake.apart = apart
    rig = Rig(tmp_path)
    first = rig.start({s: {"router_params": {"leave_at": token(1, 2)}} for s in PROMPTS}, max_steps=5, max_leaves=3)
    assert first[0].token_ids == plain(LONG, 3) and first[0].destination == 1
    fake.computed.clear()
    steps = [
        SessionStep(s, len(PROMPTS[s]) + len(r.token_ids) - 1, r.token_ids[-1:])
        for s, r in zip(PROMPTS, first, strict=True)
    ]
    second = rig.call(*steps)
    for prompt, before, after in zip(PROMPTS.values(), first, second, strict=True):
        assert [*before.token_ids, *after.token_ids] == plain(prompt, len(before.token_ids) + 1)
    assert fake.computed == [1, 1, 1]
    (rejected,) = rig.call(SessionStep(1, len(LONG) + 1, [40]), max_steps=3)  # of the run's tokens, one stays
    assert rejected.token_ids == plain([*LONG, token(1, 0), 40], 3)


def test_sessions_leave_at_different_steps_and_the_others_go_on(fake: Fake, tmp_path: Path) -> None:
    leaves = {1: 1, 2: 3, 3: 99}
    opened = {s: {"router_params": {"leave_at": token(s, n) if n < 9 else 99}} for s, n in leaves.items()}
    for max_leaves, counts in ((0, [2, 2, 2]), (1, [2, 4, 4]), (2, [2, 4, 7])):
        rig = Rig(tmp_path)
        results = rig.start(opened, max_steps=7, max_leaves=max_leaves)
        loop = Rig(tmp_path, runs=False).start(opened, max_steps=7, max_leaves=max_leaves)
        # in one pass of the executor, those whose turn was before have gone on already; they stop at their next token
        for s, mine, theirs, count in zip(PROMPTS, results, loop, counts, strict=True):
            assert len(theirs.token_ids) == count and 0 <= len(mine.token_ids) - count <= 1
            assert mine.token_ids == plain(PROMPTS[s], len(mine.token_ids))
        assert results[0] == loop[0] and results[0].fields == {"token": token(1, 1)}
        assert rig.response.stats.steps == max(len(r.token_ids) for r in results)


@pytest.mark.parametrize(
    ("opened", "count"),
    [({"limit": len(PROMPTS[2]) + 3}, 3), ({"limit": len(PROMPTS[2]) + 1}, 1), ({"stop_at_eos": True}, 2)],
    ids=["limit", "limit of one", "eos"],
)
def test_a_session_that_ends_ends_the_run(fake: Fake, tmp_path: Path, opened: dict[str, Any], count: int) -> None:
    ended, other = Rig(tmp_path, eos=token(2, 1)).start({2: opened, 1: {}}, max_steps=9)
    assert ended.token_ids == plain(PROMPTS[2], count) and ended.destination == 0
    assert other.token_ids == plain(LONG, count)  # its turn in the pass comes after: nothing is computed in vain
    assert fake.sent[0].params.max_tokens == min(9, opened.get("limit", 60) - len(PROMPTS[2]))


def test_what_was_decided_on_a_part_of_the_prompt_is_forgotten(fake: Fake, tmp_path: Path) -> None:
    in_between = plain(LONG[:CHUNK], 1)[0]
    assert in_between not in [*plain(LONG, 4), *plain(PROMPTS[2], 4)]
    rig = Rig(tmp_path)
    results = rig.start({1: {"router_params": {"leave_at": in_between}}, 2: {}}, max_steps=4)
    assert [(r.token_ids, r.destination) for r in results] == [(plain(LONG, 4), 0), (plain(PROMPTS[2], 4), 0)]
    assert rig.router.seen[0].next_token_ids.tolist() == [in_between]  # it was asked
    rig = Rig(tmp_path, eos=in_between)
    fake.stored.clear()
    (result,) = rig.start({1: {"stop_at_eos": True}}, max_steps=4)
    assert result.token_ids == plain(LONG, 4)


def test_a_run_stops_where_the_context_is_full(fake: Fake, tmp_path: Path) -> None:
    rig = Rig(tmp_path, context_tokens=len(LONG) + 2, prefill_chunk=32)
    (result,) = rig.start({1: {}}, max_steps=9)
    assert result.token_ids == plain(LONG, 3)  # the last one needs no KV


def test_the_token_that_ends_a_request_may_be_the_sessions_own(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_id = VOCAB - 1
    monkeypatch.setattr("tests.unit.llm.fake_tensorrt_llm.toy_logits", lambda kv: torch.arange(float(VOCAB)))
    rig = Rig(tmp_path)
    (first,) = rig.start({1: {}}, max_steps=4)
    assert first.token_ids == [end_id] and first.error is None  # fewer than it might have got
    (second,) = rig.call(SessionStep(1, len(LONG), [end_id]))
    assert second.token_ids == [end_id] and fake.sent[-1].tokens == [*LONG, end_id]


def test_a_session_whose_route_fails_fails_alone(fake: Fake, tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    def fails(result: StepResult) -> torch.Tensor:
        if result.rids[0] == 1 and result.places[0] == len(LONG) + 2:
            raise KeyError("no such weight")
        return torch.zeros(1, dtype=torch.int64)

    rig.router.override = fails
    failed, good = rig.start({1: {}, 2: {}}, max_steps=6)
    assert failed == SessionResult(error="route of FakeRouter failed: KeyError: 'no such weight'")
    assert good.token_ids == plain(PROMPTS[2], 3) and good.error is None  # and the run ends, as with the loop
    (result,) = rig.call(SessionStep(2, len(PROMPTS[2]) + 2, [token(2, 2)]), free=[1], max_steps=2)
    assert result.token_ids == plain(PROMPTS[2], 5)[3:]


def test_what_breaks_under_a_decision_breaks_its_session_not_the_executor(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)

    def broken(logits: torch.Tensor, rows: Any) -> Any:
        raise RuntimeError("CUDA error:\nout of memory")

    with monkeypatch.context() as patch:
        patch.setattr("python_backends.llm.runner.sample", broken)
        results = rig.start({1: {}, 2: {}}, max_steps=6)
    assert [r.error for r in results] == ["RuntimeError: CUDA error: out of memory"] * 2
    assert rig.start({3: {}}, max_steps=6)[0].token_ids == plain(PROMPTS[3], 6)


def test_a_request_that_is_refused_fails_alone_and_what_does_not_fit_ends_the_run(fake: Fake, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    fake.refuse = {PROMPTS[3][-1]}
    refused, good = rig.start({3: {}, 2: {}}, max_steps=4)
    assert refused.error == "token 20 isn't liked" and good.token_ids == plain(PROMPTS[2], 4)
    steps = [SessionStep(2, len(PROMPTS[2]) + 3, good.token_ids[-1:]), SessionStep(3, 7, [1])]
    good, wrong = rig.call(*steps, max_steps=4)
    assert good.token_ids == plain(PROMPTS[2], 5)[4:] and wrong.error is not None and "start: 7" in wrong.error


def test_a_request_that_is_refused_at_once_fails_alone(fake: Fake, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    fake.refuse_at_once = {PROMPTS[3][-1]}
    refused, good = rig.start({3: {}, 2: {}}, max_steps=4)
    assert refused.error == "token 20 isn't taken" and good.token_ids == plain(PROMPTS[2], 4)


def test_a_run_that_breaks_fails_its_sessions_and_calls_nothing_afterwards(fake: Fake, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    fake.break_at = {token(2, 1)}
    results = rig.start({1: {}, 2: {}}, max_steps=6)
    assert [r.error for r in results] == ["tensorrt_llm: RuntimeError: CUDA error: an illegal memory access"] * 2
    assert fake.aborted == 2
    seen = len(rig.router.seen)
    logits = torch.randn(1, 1, VOCAB)
    fake.sent[0].params.logits_processor(7, logits, [LONG], None, None)  # the abort hasn't reached the executor yet
    assert len(rig.router.seen) == seen and int(logits.argmax()) == fake.sent[0].params.end_id
    fake.break_at = set()
    assert rig.start({3: {}}, free=[1, 2], max_steps=3)[0].token_ids == plain(PROMPTS[3], 3)


def test_a_processor_that_is_not_called_is_an_error(fake: Fake, tmp_path: Path) -> None:
    fake.processes_logits = False
    (result,) = Rig(tmp_path).start({2: {}}, max_steps=4)
    assert "without calling its logits processor" in str(result.error)


def test_an_executor_that_takes_other_tokens_is_noticed() -> None:
    deciding = Deciding(Piece(1, [3, 4], 0, 0, True), lambda session, made, logits: 7 + made, VOCAB)
    logits = torch.randn(1, 1, VOCAB)
    deciding(0, logits, [[3, 4]], None, None)
    assert int(logits.argmax()) == 7 and torch.isneginf(logits).sum() == VOCAB - 1
    deciding(0, logits, [[3, 4]], None, None)  # it was a chunk of the prompt
    deciding(0, logits, [[3, 4, 7]], None, None)
    assert int(logits.argmax()) == 8 and (deciding.error, deciding.went_on) == (None, [7])
    deciding(0, logits, [[3, 4, 7, 9]], None, None)
    assert deciding.error == "EngineError: tensorrt_llm took [7, 9] where [7, 8] was chosen"
    assert int(logits.argmax()) == deciding.end_id


def test_route_sees_in_a_run_what_it_sees_in_a_step(fake: Fake, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    kept = torch.zeros(1)
    threads = []

    def remembers(result: StepResult) -> torch.Tensor:
        nonlocal kept
        threads.append(threading.current_thread())
        kept += result.logits.max()  # a state of its own, made in a run and changed in a step
        kept = kept.clone()
        return torch.zeros(1, dtype=torch.int64)

    rig.router.override = remembers
    (first,) = rig.start({2: {}}, max_steps=2)
    (second,) = rig.call(SessionStep(2, len(PROMPTS[2]) + 1, first.token_ids[-1:]))
    assert second.error is None and first.error is None and not kept.is_inference()
    assert threads[0] is threads[1] is not threads[2]
    for n, seen in enumerate(rig.router.seen):
        assert torch.equal(seen.logits[0], toy_logits([*PROMPTS[2], *plain(PROMPTS[2], n)]))


@pytest.mark.parametrize("settings", [{"pending": "kept", "max_tokens": 240}, {"tensor_parallel": 2}])
def test_kept_sessions_and_several_ranks_are_stepped(fake: Fake, tmp_path: Path, settings: dict[str, Any]) -> None:
    rig = Rig(tmp_path, **settings)
    (result,) = rig.start({2: {}}, max_steps=3)
    assert result.token_ids == plain(PROMPTS[2], 3)
    assert not rig.engine.runs and len(fake.sent) == (0 if "pending" in settings else 3)


def test_a_call_with_a_prefill_is_one_step(fake: Fake, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    opens = [SessionOpen(s, len(PROMPTS[s]), 60) for s in (1, 2)]
    steps = [SessionStep(1, 0, LONG[:16], sample=False), SessionStep(2, 0, PROMPTS[2])]
    first, second = rig.call(*steps, opens=opens, max_steps=4)
    assert first == SessionResult() and second.token_ids == plain(PROMPTS[2], 1)
    assert rig.call(free=[1], max_steps=4) == [] and rig.response.stats.steps == 0
