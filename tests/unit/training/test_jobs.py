# SPDX-License-Identifier: Apache-2.0
"""The jobs on scripted engines: what is asked of the engine, and what comes out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from python_backends.llm.engines.base import EngineError
from tests.unit.training.fakes import EOS, ScriptedEngine, run, script, texts
from tools.training import jobs
from tools.training.lockstep import Ask, Work, drive

PROMPT = [ord(c) for c in "abc"]


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_an_answer_ends_at_eos_at_the_stop_text_and_at_the_limit() -> None:
    engine = ScriptedEngine(script("x = 1\n``` and more", 3))
    assert run(jobs.answer(PROMPT, texts()), engine).token_ids == [*ids("x = 1\n``` and more"), EOS]
    assert run(jobs.answer(PROMPT, texts("\n```")), engine).token_ids == ids("x = 1\n```")
    found = run(jobs.answer(PROMPT, texts(most=4)), engine)
    assert found.token_ids == ids("x = ")
    assert len(found.logprobs) == 4 and all(-1 < p < 0 for p in found.logprobs)


def test_following_a_text_says_at_each_token_what_the_model_would_have_written() -> None:
    engine = ScriptedEngine(script("hello", 3), hidden=True)
    found = run(jobs.follow(PROMPT, ids("help!")), engine)
    assert bytes(found.argmax.tolist()) == b"hello"
    assert (found.logprobs > -1).tolist() == [True, True, True, False, False]
    assert found.hidden[:, 0].tolist() == [3, 4, 5, 6, 7]  # the state before each token
    assert found.top_logits.shape == (5, jobs.TOP_LOGITS)
    assert (np.diff(found.top_logits, axis=1) <= 0).all()
    assert engine.tokens == 3 + 4  # the last token needn't be computed


def test_as_many_jobs_run_at_once_as_there_are_sessions_and_each_frees_its_own() -> None:
    engine = ScriptedEngine(script("hello", 3), max_sessions=2)
    works = [Work(n, 3, jobs.answer(PROMPT, texts())) for n in range(5)]
    found = dict(drive([engine], works))
    assert {n: a.token_ids for n, a in found.items()} == {n: [*ids("hello"), EOS] for n in range(5)}
    assert max(engine.batches) == 2
    assert engine.held == {}


def test_a_session_that_fails_fails_the_stage_and_names_the_job() -> None:
    engine = ScriptedEngine(script("hello", 3))
    engine.fails_at = 2
    with pytest.raises(EngineError, match="the one: scripted"):
        list(drive([engine], [Work("the one", 3, jobs.answer(PROMPT, texts()))]))


def _completes(sequence: list[int]) -> int:
    """Writes "total = 1", or after "sum" the variable "sum = 1", then a return, and ends."""
    text = bytes(sequence[3:]).decode()
    for whole in ("total = 1\nreturn total\n", "sum = 1\nreturn sum\n", "total =  1 # one\nreturn total\n"):
        if whole.startswith(text):
            return ord(whole[len(text)]) if len(text) < len(whole) else EOS
    return EOS


@pytest.mark.parametrize("whole", [True, False])
def test_branches_stop_where_the_statement_is_the_same_and_else_go_to_the_end_if_wanted(whole: bool) -> None:
    engine = ScriptedEngine(_completes)
    given = [*ids("total = 1\nreturn total\n"), EOS]
    marks = [(0, ord("s")), (8, ord(" "))]  # "sum ...", "total =  1 # one"
    found = run(jobs.branches(PROMPT, given, marks, code=True, whole=whole, text=texts()), engine)
    assert [b.position for b in found] == [8, 0]
    same, other = found
    assert (same.equal, same.whole) == (True, False)
    assert bytes(same.token_ids) == b" 1 # one\n"
    assert (other.equal, other.whole) == (False, whole)
    assert bytes(other.token_ids).rstrip(b"\0") == (b"sum = 1\nreturn sum\n" if whole else b"sum = 1\n")


def test_a_branch_that_ends_the_answer_at_once_is_whole() -> None:
    engine = ScriptedEngine(_completes)
    given = [*ids("total = 1\nreturn total\n"), EOS]
    (found,) = run(jobs.branches(PROMPT, given, [(10, EOS)], code=True, whole=True, text=texts()), engine)
    assert (found.token_ids, found.equal, found.whole) == ([EOS], False, True)


@pytest.mark.parametrize(
    ("most", "equal", "whole"),
    [
        (20, False, True),  # "sum = 1\nreturn sum\n" and the token that ends it, just so
        (19, False, False),  # cut off before that
        (8, False, False),  # after the first line
        (7, None, False),  # in the first line
    ],
)
def test_a_branch_that_is_cut_off_at_the_longest_answer_says_so(most: int, equal: bool | None, whole: bool) -> None:
    given = [*ids("total = 1\nreturn total\n"), EOS]
    job = jobs.branches(PROMPT, given, [(0, ord("s"))], code=True, whole=True, text=texts(most=most))
    (found,) = run(job, ScriptedEngine(_completes))
    assert (len(found.token_ids), found.equal, found.whole) == (most, equal, whole)


def test_a_branch_that_ends_by_itself_at_the_longest_answer_is_whole() -> None:
    given = [*ids("total = 1\nreturn total\n"), EOS]
    text = texts("\nreturn", most=len("sum = 1\nreturn"))
    (found,) = run(jobs.branches(PROMPT, given, [(0, ord("s"))], True, True, text), ScriptedEngine(_completes))
    assert (bytes(found.token_ids), found.whole) == (b"sum = 1\nreturn", True)


@pytest.mark.parametrize(("most", "whole"), [(7, True), (6, False)])
def test_a_roll_out_that_is_cut_off_says_so(most: int, whole: bool) -> None:
    engine = ScriptedEngine(script("aaaaaa", 3))
    (found,) = run(jobs.rollouts(PROMPT, ids("xyz"), [(1, ord("1"))], texts(most=most), None), engine)
    assert (1 + len(found.token_ids), found.whole) == (most, whole)


@pytest.mark.parametrize(
    ("position", "wanted"), [(0, "total = 1\n"), (8, "1\n"), (9, "\n"), (10, "# so\n\nreturn 1"), (14, "\n\nreturn 1")]
)
def test_the_statement_of_an_answer_is_cut_where_a_branch_would_be(position: int, wanted: str) -> None:
    given = ids("total = 1\n# so\n\nreturn 1")
    assert bytes(jobs.first_statement(given, position, True, texts())) == wanted.encode()


def test_branches_prefill_the_answer_once() -> None:
    engine = ScriptedEngine(_completes)
    given = [*ids("total = 1\nreturn total\n"), EOS]
    marks = [(n, ord("s")) for n in range(9)]
    found = run(jobs.branches(PROMPT, given, marks, code=True, whole=False, text=texts()), engine)
    made = sum(len(b.token_ids) for b in found)
    assert engine.tokens <= 3 + 8 + made


def test_a_job_that_has_nothing_to_ask_is_done_at_once() -> None:
    engine = ScriptedEngine(_completes)
    works = [Work(n, 3, jobs.branches(PROMPT, [1], [], code=True, whole=True, text=texts())) for n in range(9)]
    assert list(drive([engine], works)) == [(n, []) for n in range(9)]
    assert engine.batches == []


def test_rollouts_write_to_the_end_and_a_policy_lets_the_other_model_write() -> None:
    slm = ScriptedEngine(script("aaaaaa", 3), hidden=True)
    llm = ScriptedEngine(script("BBBBBB", 3))
    given = ids("xyz...")
    marks = [(1, ord("1")), (3, ord("2"))]
    alone = run(jobs.rollouts(PROMPT, given, marks, texts(), None), slm)
    assert [bytes(b.token_ids) for b in alone] == [b"2aa\0", b"1aaaa\0"]

    def policy(hidden: torch.Tensor) -> bool:
        return int(hidden[0]) % 2 == 0  # the state before an even position

    routed = run(jobs.rollouts(PROMPT, given, marks, texts(), policy), slm, llm)
    assert [bytes(b.token_ids) for b in routed] == [b"2aB\0", b"1aBaB\0"]


def test_a_job_has_a_session_of_its_own_on_each_model_that_it_asks() -> None:
    slm, llm = ScriptedEngine(script("hello", 1)), ScriptedEngine(script("HELLO", 1))

    def both():  # type: ignore[no-untyped-def]
        a = yield Ask(0, [1])
        b = yield Ask(0, [1], model=1)
        return int(a.logits.argmax()), int(b.logits.argmax())

    assert run(both(), slm, llm) == (ord("h"), ord("H"))
    assert slm.held == llm.held == {}
