# SPDX-License-Identifier: Apache-2.0
"""Whether leaving the large model's answer at a token led elsewhere: R2R's verdict on a branch (arXiv 2505.21600).

Where the next statement came out the same but for its form, it didn't, whoever judges.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Protocol

from tools.errors import UserError
from tools.training.prompts import Prompt, passes

__all__ = ["API_KEY", "Case", "ContinuationJudge", "Judge", "LLMJudge", "TestsJudge", "judge_named"]

API_KEY = "OPENAI_API_KEY"  # the environment variable, as with OpenAI's own clients
DROPPED = -1  # no verdict: the token is left out of the training data


@dataclass(frozen=True)
class Case:
    """before: the answer up to the token. original, branch: what followed it from either choice, to the end of the
    statement, or of a right answer where the judge wants it whole. passed: whether the original answer is right.
    cut_off: the branch didn't come that far; it is as long as an answer may be."""

    prompt: Prompt
    before: str
    original: str
    branch: str
    passed: bool
    cut_off: bool = False


class Judge(Protocol):
    """name: of the files that hold its verdicts. whole: whether it wants branches that go to the end of the answer."""

    @property
    def name(self) -> str: ...
    @property
    def whole(self) -> bool: ...

    def __call__(self, case: Case) -> int:
        """1 = the statements differ in what they lead to; 0 = they don't; -1 = no verdict."""
        ...


class TestsJudge:
    """Test execution, or the exact answer: divergent when the original answer is right and the branch's isn't. Where
    the original is wrong, tests can't say which tokens matter, and another statement counts as divergent. A branch that
    was cut off may still be right; else nobody knows what it would have become, and there is no verdict."""

    name = "tests"
    whole = True

    def __call__(self, case: Case) -> int:
        if case.passed and passes(case.prompt, case.before + case.branch):
            return 0
        return DROPPED if case.cut_off else 1


class ContinuationJudge:
    """Another statement is divergent; half a one has no verdict."""

    name = "continuation"
    whole = False

    def __call__(self, case: Case) -> int:
        return DROPPED if case.cut_off else 1


@dataclass(frozen=True)
class LLMJudge:
    """A language model at an OpenAI-compatible URL. It sees two examples, and answers 0 or 1; anything else is -1, as
    is a branch that was cut off. api_key: sent as a bearer token; None = none is.

    Raises UserError when the server can't be reached or refuses.
    """

    url: str
    model: str
    whole: bool = False
    api_key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """With the model's and a fingerprint of it and the URL: one's verdicts are not another's."""
        where = hashlib.sha256(f"{self._endpoint}\n{self.model}".encode()).hexdigest()[:8]
        return f"llm-{re.sub(r'[^A-Za-z0-9._-]', '-', self.model)}-{where}"

    @property
    def _endpoint(self) -> str:
        return f"{self.url.rstrip('/')}/chat/completions"

    def __call__(self, case: Case) -> int:
        if case.cut_off:
            return DROPPED
        content = _QUESTION.format(task=case.prompt.text, before=case.before, one=case.original, two=case.branch)
        messages = [{"role": "user", "content": content}]
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 16}
        try:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._endpoint, json.dumps(body).encode(), headers)
            if self.api_key is not None:
                # a redirect could lead to somebody else's machine
                request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
            with urllib.request.urlopen(request, timeout=120) as response:
                reply: Any = json.load(response)
            text = str(reply["choices"][0]["message"]["content"])
        except (http.client.HTTPException, OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"--judge: {self.url} gave no verdict: {error}") from error
        found = re.match(r"\s*([01])\b", text)
        return int(found.group(1)) if found else DROPPED


def judge_named(name: str, model: str | None) -> Judge:
    """The judge of that name, or at that URL, with the key in `API_KEY`. Raises UserError that says what is allowed."""
    judges: dict[str, Judge] = {"tests": TestsJudge(), "continuation": ContinuationJudge()}
    if name in judges:
        if model is not None:
            raise UserError(f"--judge-model: got '{model}'; only with a URL as --judge, which is '{name}'")
        return judges[name]
    if re.fullmatch(r"https?://\S+", name):
        if not model:
            raise UserError("--judge-model: must name the model that judges at the URL of --judge")
        api_key = os.environ.get(API_KEY, "").strip() or None
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UserError(f"{API_KEY}: must be printable ASCII characters, which can stand in a header of HTTP")
        return LLMJudge(name, model, api_key=api_key)
    raise UserError(f"--judge: got '{name}'; must be tests, continuation, or the http:// URL of an API like OpenAI's")


_QUESTION = """Two continuations of the same unfinished answer are given. Do they differ in what they mean: in the \
result, the reasoning or the behaviour of the code? Answer with one digit: 1 if they do, 0 if they only say the same \
in another way.

Task: add up the numbers of a list.
So far: def total(numbers):
    result = 0
One:     for number in numbers:
Two:     for n in numbers:
Answer: 0

Task: how many eggs are left of 12 when 5 break?
So far: We have 12 eggs.
One: 5 break, so 12 - 5 = 7 are left.
Two: 5 more come, so there are 17.
Answer: 1

Task: {task}
So far: {before}
One: {one}
Two: {two}
Answer:"""
