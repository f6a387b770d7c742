# SPDX-License-Identifier: Apache-2.0
"""Functions out of sources, the tasks made of them, and how answers to them are judged."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tools.errors import UserError
from tools.evaluation import humaneval, reasoning
from tools.training.judges import API_KEY, Case, ContinuationJudge, LLMJudge, TestsJudge, judge_named
from tools.training.prompts import REASONING_KINDS, Prompt, code_prompt, overlaps, passes, reasoning_prompts
from tools.training.sources import Function, functions_of, package_functions

SOURCE = '''
import math
import third_party
from collections import deque as queue

LIMIT = 3

def area(r: float) -> float:
    """The area of a circle.

    >>> round(area(1), 2)
    3.14
    """
    # of radius r
    return math.pi * r * r

def typed(a: Shape, b: "Shape" = None) -> "int | Shape":
    """>>> typed(1)
    1
    """
    return a

def first(items, count: int = 1) -> queue[int]:
    r"""A \\d.

    >>> list(first([1, 2]))
    [1]
    """
    return queue(items[:count])

def limited(n=LIMIT):
    """>>> limited()
    3
    """
    return n

def untested(n):
    """Says nothing of what comes out.

    >>> untested(1)
    """
    return n

def elsewhere(n):
    """>>> area(1) > 3
    True
    """
    return n

def empty(n):
    """>>> empty(1)
    """

def _private(n):
    """>>> _private(1)
    1
    """
    return n

@decorated
def decorated_one(n):
    """>>> decorated_one(1)
    1
    """
    return n
'''


@pytest.fixture
def functions() -> dict[str, Function]:
    return {f.name: f for f in functions_of(SOURCE, "math")}  # a module that is there, for the doctests


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.training.sources.PACKAGES", ("no-such-package",))
    with pytest.raises(UserError, match="needs the package no-such-package"):
        list(package_functions())


def test_only_functions_that_mean_something_by_themselves_are_asked_for(functions: dict[str, Function]) -> None:
    assert list(functions) == ["area", "typed", "first"]


def test_a_prompt_has_the_imports_that_its_function_uses_its_head_and_its_docstring(
    functions: dict[str, Function],
) -> None:
    area = functions["area"]
    assert area.prompt.startswith(
        'import math\n\n\ndef area(r: float) -> float:\n    """The area of a circle.\n\n    >>>'
    )
    assert area.prompt.endswith('    3.14\n    """\n')
    assert area.body == "    return math.pi * r * r\n"
    assert functions["typed"].prompt.startswith("def typed(a, b=None):\n")  # Shape means nothing outside
    assert "from collections import deque as queue\n" in functions["first"].prompt
    assert 'r"""A \\d.' in functions["first"].prompt


def test_a_task_is_asked_as_the_evaluation_asks_and_its_answer_ends_where_that_ones_does(
    functions: dict[str, Function],
) -> None:
    code, (question, *_) = code_prompt(functions["area"]), reasoning_prompts(1, 0)
    assert code.messages == humaneval.chat_prompt(code.text)
    assert (code.answer_prefix, code.stop) == (humaneval.ANSWER_PREFIX, humaneval.STOP_WORDS)
    assert question.messages == reasoning.chat_prompt(question.text)
    assert (question.answer_prefix, question.stop) == ("", ())


def test_an_answer_passes_by_its_doctests(functions: dict[str, Function]) -> None:
    prompt = code_prompt(functions["area"])
    assert passes(prompt, str(prompt.reference_answer))
    assert passes(prompt, "import math\ndef area(r):\n    return math.pi * r**2\n```\nwhich is the area")
    assert passes(
        prompt, "import math\ndef area(r):\n    return math.pi * r**2\n\nprint(area("
    )  # cut off at a stop text
    assert not passes(prompt, "def area(r):\n    return 3 * r\n```")
    assert not passes(prompt, "def area(r):\n    return 3.14 *")
    assert not passes(prompt, "")


def test_reasoning_tasks_are_seeded_and_scored_by_their_generator() -> None:
    first, second = list(reasoning_prompts(7, 1)), list(reasoning_prompts(7, 1))
    assert first == second
    assert first != list(reasoning_prompts(7, 2))
    assert len({p.id for p in first}) == 7
    prompt = first[1]
    assert prompt.entry is not None
    right = prompt.entry["answer"]
    assert passes(prompt, f"We add. Answer: 1\nNo.\nAnswer: {right}")
    assert not passes(prompt, f"Answer: {right}1")
    assert not passes(prompt, f"It is {right}")
    stored = Prompt(**json.loads(json.dumps(vars(prompt))))
    assert passes(stored, f"Answer: {right}")


def test_near_seeds_share_reasoning_tasks() -> None:
    """What the documentation says: reasoning-gym makes item i from seed + i, of all kinds but one."""
    here, there, far = (list(reasoning_prompts(20, seed)) for seed in (0, 1, 4))  # four of each kind
    shared = [p for p in here if p.text in {other.text for other in there}]
    assert Counter(p.entry_point for p in shared) == {kind: 3 for kind in REASONING_KINDS if kind != "gsm_symbolic"}
    assert {p.text for p in here}.isdisjoint(p.text for p in far)


def test_what_could_be_one_of_humanevals_is_found(functions: dict[str, Function]) -> None:
    own = functions["area"]
    named = Function("m:is_prime", "is_prime", "m", "", "", "Whether n is prime.", [])
    told = Function(
        "m:f",
        "f",
        "m",
        "",
        "",
        'Check if in given list of numbers, are any two numbers closer to each other than "x"',
        [],
    )
    assert overlaps([own, named, told]) == {"m:is_prime", "m:f"}


PROMPT = Prompt("p", "code", "def f():\n", "f", "def check(candidate):\n    assert candidate() == 1\n")


def case(branch: str, passed: bool, cut_off: bool = False) -> Case:
    return Case(PROMPT, "def f():\n", "    return 1\n```", branch, passed, cut_off)


def test_the_tests_decide_where_the_original_answer_is_right() -> None:
    judge = TestsJudge()
    assert judge(case("    return 2 - 1\n```", True)) == 0
    assert judge(case("    return 2\n```", True)) == 1
    assert judge(case("    return 2 - 1\n```", False)) == 1


def test_what_was_cut_off_has_no_verdict_but_where_it_is_right_already() -> None:
    assert TestsJudge()(case("    return 1\n# and", True, cut_off=True)) == 0
    assert TestsJudge()(case("    x = 2\n    return x -", True, cut_off=True)) == -1
    assert TestsJudge()(case("    return", False, cut_off=True)) == -1
    assert ContinuationJudge()(case("    return", True)) == 1
    assert ContinuationJudge()(case("    return", True, cut_off=True)) == -1
    with api({}) as (url, asked):
        assert LLMJudge(url, "big")(case("    return", True, cut_off=True)) == -1
    assert asked == []


@contextmanager
def api(reply: Any, status: int = 200, location: str | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server that always says the same. location: where it sends one on to."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = {"path": self.path, "authorization": self.headers["Authorization"]}
            asked.append(told | json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer()

        def do_GET(self) -> None:
            asked.append({"path": self.path, "authorization": self.headers["Authorization"]})
            self._answer()

        def _answer(self) -> None:
            body = json.dumps(reply).encode()
            self.send_response(status)
            if location is not None:
                self.send_header("Location", location)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("text", "verdict"), [("1", 1), (" 0.", 0), ("They differ: 1", -1), ("", -1), ("10", -1)])
def test_a_language_model_judges_by_its_first_digit_and_else_the_token_is_dropped(text: str, verdict: int) -> None:
    with api({"choices": [{"message": {"content": text}}]}) as (url, asked):
        assert LLMJudge(url, "big")(case("    return 2\n", True)) == verdict
    assert asked[0]["path"] == "/v1/chat/completions"
    assert (asked[0]["model"], asked[0]["temperature"], asked[0]["max_tokens"]) == ("big", 0, 16)
    assert asked[0]["messages"][0]["content"].count("Answer:") == 3  # two examples and the question


def test_a_judge_that_cannot_be_reached_is_an_error_that_names_it() -> None:
    with api({"choices": []}) as (url, _), pytest.raises(UserError, match=f"--judge: {url} gave no verdict"):
        LLMJudge(url, "big")(case("", True))
    with api({}, status=500) as (url, _), pytest.raises(UserError, match="gave no verdict: HTTP Error 500"):
        LLMJudge(url, "big")(case("", True))
    for nowhere in (url, "http://judge:port/v1"):
        with pytest.raises(UserError, match="gave no verdict"):
            LLMJudge(nowhere, "big")(case("", True))


ONE = {"choices": [{"message": {"content": "1"}}]}


def test_a_key_in_the_environment_goes_to_the_judge_and_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, sent in (("sk-secret\n", "Bearer sk-secret"), ("", None), (None, None)):
        monkeypatch.delenv(API_KEY, raising=False)
        if key is not None:
            monkeypatch.setenv(API_KEY, key)
        with api(ONE) as (url, asked):
            judge = judge_named(url, "big")
            assert judge(case("    return 2\n", True)) == 1
        assert [request["authorization"] for request in asked] == [sent]
        assert "secret" not in f"{judge} {judge.name}"
    monkeypatch.setenv(API_KEY, "sk-secret")
    with api(ONE) as (elsewhere, got), api({}, 302, f"{elsewhere}/chat/completions") as (url, asked):
        judge_named(url, "big")(case("    return 2\n", True))
    assert [request["authorization"] for request in (*asked, *got)] == ["Bearer sk-secret", None]


def test_a_key_that_no_header_can_hold_is_an_error_that_does_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("sk-\nsecret", "sk-s\u00e9cret"):
        monkeypatch.setenv(API_KEY, key)
        with pytest.raises(UserError, match=r"^OPENAI_API_KEY: must be printable ASCII") as told:
            judge_named("https://judge/v1", "big")
        assert "cret" not in str(told.value)


def test_verdicts_are_kept_by_model_and_url() -> None:
    def name(url: str, model: str) -> str:
        return judge_named(url, model).name

    assert re.fullmatch(r"llm-org-big-[0-9a-f]{8}", name("https://judge/v1", "org/big"))
    assert name("https://judge/v1", "org/big") == name("https://judge/v1/", "org/big")
    others = [("https://other/v1", "org/big"), ("https://judge/v1", "org-big"), ("https://judge/v1", "org/small")]
    assert len({name("https://judge/v1", "org/big"), *(name(*other) for other in others)}) == 4


def test_judges_by_name() -> None:
    assert judge_named("tests", None).whole
    assert not judge_named("continuation", None).whole
    with pytest.raises(UserError, match="--judge: got 'oracle'; must be tests, continuation, or"):
        judge_named("oracle", None)
    with pytest.raises(UserError, match="--judge-model"):
        judge_named("http://judge/v1", None)
