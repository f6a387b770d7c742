# SPDX-License-Identifier: Apache-2.0
"""Tasks of reasoning-gym: made from a seed, judged by their verifiers."""

from __future__ import annotations

import pytest

from tools.errors import UserError
from tools.evaluation import reasoning
from tools.evaluation.reasoning import KINDS, final_answer, make
from tools.evaluation.tasks import ReasoningTask, questions
from tools.training.prompts import REASONING_KINDS, reasoning_prompts


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4 - 1 = 3\nAnswer: 3", "3"),
        ("Answer: 1\nno, wait\nanswer: 2\n", "2"),
        ("**Answer:** 42", "42"),
        ("**Final answer: 42**", "42"),
        ("Answer: $-7$", "-7"),
        ("The answer is 3", None),
        ("", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_every_kind_is_made_the_same_from_a_seed_and_judged_by_its_verifier() -> None:
    made = list(make(KINDS, 2, 7))
    assert [m.id for m in made] == [f"{kind}/{n}" for kind in KINDS for n in range(2)]
    assert [m.question for m in made] == [m.question for m in make(KINDS, 2, 7)]
    assert [m.question for m in made] != [m.question for m in make(KINDS, 2, 8)]


def _asked(seed: int, per_kind: int = 20) -> set[str]:
    """Of kinds that make hardly any task twice by chance."""
    return {made.question for made in make(("basic_arithmetic", "chain_sum", "gsm_symbolic"), per_kind, seed)}


@pytest.mark.parametrize("near", [1, 2, 19])
def test_seeds_near_each_other_have_no_task_in_common(near: int) -> None:
    assert _asked(2026).isdisjoint(_asked(2026 + near))


def test_no_task_is_one_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = {prompt.text for prompt in reasoning_prompts(60, 0)}
    assert all(trained.isdisjoint(_asked(seed)) for seed in (0, 2026, 19_999, 20_000, 20_001))
    monkeypatch.setattr(reasoning, "_first_seed", lambda kind, seed: seed)
    assert len(trained & _asked(20_001)) > 20  # as the package has it


def test_the_package_s_seeds_are_blocks_above_training_s() -> None:
    seeds = [reasoning._first_seed(kind, seed) for kind in REASONING_KINDS for seed in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(seed >= reasoning.MOST > 20_000 + 1000 and seed % reasoning.MOST == 0 for seed in seeds)


def test_answers_are_judged() -> None:
    (question,) = questions(ReasoningTask(kinds=["chain_sum"], per_kind=1, seed=1))
    assert "9 + 4 =" in question.messages[0]["content"]
    assert question.judge("so\nAnswer: 13").passed
    assert question.judge("so\nAnswer: 4").detail == "answered '4'"
    assert question.judge("so -4").detail == "no answer given"


def test_verifiers_take_any_text() -> None:
    for made in make(KINDS, 1, 3):
        for text in ("", "nan", "1e999", "[1, 2", "\x00", "__import__('os').abort()", "9" * 5000):
            assert made.verify(text) is False, (made.id, text)


def test_a_kind_that_is_unknown_or_whose_verifier_is_not_safe_is_refused() -> None:
    with pytest.raises(UserError, match=r"kinds: got chain_sums \(did you mean 'chain_sum'\?\); allowed: basic_"):
        list(make(["chain_sums"], 1, 1))
    with pytest.raises(UserError, match=r"kinds: got bitwise_arithmetic.*; allowed: "):
        list(make(["chain_sum", "bitwise_arithmetic"], 1, 1))
