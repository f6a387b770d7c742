# SPDX-License-Identifier: Apache-2.0
"""HumanEval: what is asked, which code an answer means, and how it is judged."""

from __future__ import annotations

import pytest

from tools.errors import UserError
from tools.evaluation.humaneval import Problem, chat_prompt, extract_code, problems, run_tests
from tools.evaluation.sandbox import Limits, Verdict
from tools.evaluation.tasks import HumanEvalTask, digest, questions, selected

PROBLEM = Problem(
    "T/0",
    'from typing import List\n\n\ndef helper(x):\n    return x + 1\n\n\ndef twice(x: int):\n    """ double """\n',
    "def check(candidate):\n    assert candidate(2) == 4\n    assert helper(1) == 2\n",
    "twice",
)
FUNCTION = "def twice(x: int) -> List[int]:\n    return 2 * x\n"


@pytest.mark.parametrize(
    "answer",
    [
        FUNCTION,
        FUNCTION + "```\nThis doubles it.",
        f"{FUNCTION}```\n\n```python\nprint(twice(3))\n```",
        f"```python\n{FUNCTION}```",
        f"Here it is:\n\n```python\n{FUNCTION}```\nIt doubles.",
        f"Install it:\n```bash\npip install it\n```\nthen\n```python\n{FUNCTION}```",
        "    return 2 * x\n",  # goes on where the prompt stops
    ],
)
def test_the_function_is_found(answer: str) -> None:
    code = extract_code(answer, PROBLEM)
    outcome = run_tests(code, PROBLEM.tests, PROBLEM.entry_point)
    assert outcome.passed, (code, outcome)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("def twice(x): return x", Verdict.FAILED),
        ("def thrice(x): return x", Verdict.FAILED),  # the prompt's function, without a body of its own
        ("def twice(x):\n    return (2 *", Verdict.ERROR),
        ("", Verdict.FAILED),
        ("def twice(x):\n    while True: x += 1", Verdict.TIMEOUT),
    ],
)
def test_wrong_answers_fail(answer: str, verdict: Verdict) -> None:
    outcome = run_tests(extract_code(answer, PROBLEM), PROBLEM.tests, PROBLEM.entry_point, Limits(cpu_s=1))
    assert outcome.verdict is verdict


def test_the_data_set_is_whole_and_a_reference_solution_passes() -> None:
    all_problems = problems()
    assert [p.task_id for p in all_problems] == [f"HumanEval/{n}" for n in range(164)]
    needs_a_helper = all_problems[38]
    solution = "def decode_cyclic(s: str):\n    return encode_cyclic(encode_cyclic(s))\n"
    assert run_tests(extract_code(solution, needs_a_helper), needs_a_helper.tests, "decode_cyclic").passed


def test_the_prompt_has_the_function_in_a_block() -> None:
    (message,) = chat_prompt("\n\ndef f():\n")
    assert message["role"] == "user"
    assert message["content"].endswith(":\n```\ndef f():\n```")


def test_questions_are_chosen_as_slices() -> None:
    asked = questions(HumanEvalTask())

    def numbers(which: str | None) -> list[int]:
        return [int(q.id.removeprefix("HumanEval/")) for q in selected(asked, which)]

    assert numbers(None) == list(range(164))
    assert numbers("3") == [0, 1, 2]
    assert numbers("160:") == [160, 161, 162, 163]
    assert numbers("0:164:80") == [0, 80, 160]
    for wrong in ("0", "x", "200:300", "1:2:3:4", "", "-3", "::-1"):
        with pytest.raises(UserError, match="problems: got"):
            numbers(wrong)


def test_the_digest_changes_with_a_question() -> None:
    asked = questions(HumanEvalTask())
    assert digest(asked) == digest(questions(HumanEvalTask()))
    assert digest(asked) != digest(asked[:-1])
