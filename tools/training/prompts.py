# SPDX-License-Identifier: Apache-2.0
"""What the models are asked while labels are made: functions to write, and reasoning tasks; none of HumanEval's."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from tools.errors import UserError
from tools.evaluation import humaneval, reasoning
from tools.evaluation.sandbox import Limits
from tools.training.sources import Function, package_functions

__all__ = [
    "REASONING_KINDS",
    "Prompt",
    "choose_prompts",
    "code_prompt",
    "fingerprint",
    "grams",
    "overlaps",
    "passes",
    "reasoning_prompts",
    "wording",
]

REASONING_KINDS = ("basic_arithmetic", "chain_sum", "gsm_symbolic", "leg_counting", "letter_counting")
# Of the generators. reasoning-gym makes item i from seed + i (gsm_symbolic draws its templates from the seed alone), so
# near --seed values share tasks. An evaluation's seeds lie above 2^20 (`evaluation.reasoning`). Kept as it is: work
# folders hold such tasks.
_REASONING_SEED = 20_000
_NGRAM_WORDS = 10  # a docstring that shares so many words in a row with one of HumanEval's is taken for the same
_LIMITS = Limits(cpu_s=5, wall_s=30.0)
_CHECKED_AT_ONCE = 2


@dataclass(frozen=True)
class Prompt:
    """One task. id: unique. text: a function's beginning, or a question.

    Of a function: entry_point is its name, tests define `check(candidate)`, reference is a body that passes them.
    Of a question: kind is "reasoning", entry_point the name of its generator, entry what that made.
    """

    id: str
    kind: Literal["code", "reasoning"]
    text: str
    entry_point: str
    tests: str = ""
    reference: str | None = None
    entry: dict[str, Any] | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation."""
        if self.kind == "code":
            return humaneval.chat_prompt(self.text)
        return reasoning.chat_prompt(self.text)

    @property
    def answer_prefix(self) -> str:
        """What the answer is made to begin with, the same as in the evaluation."""
        return humaneval.ANSWER_PREFIX if self.kind == "code" else ""

    @property
    def stop(self) -> tuple[str, ...]:
        """The texts at which the answer ends, the same as in the evaluation."""
        return humaneval.STOP_WORDS if self.kind == "code" else ()

    @property
    def reference_answer(self) -> str | None:
        """An answer that is right, in the form in which the models answer."""
        return None if self.reference is None else f"{self.text.strip()}\n{self.reference.rstrip()}\n```"


def passes(prompt: Prompt, answer: str) -> bool:
    """Whether an answer (what follows the prefix) is right: by its doctests, in the sandbox, or the verifier."""
    for stop in prompt.stop:
        answer = answer.split(stop, 1)[0]
    if prompt.kind == "code":
        problem = humaneval.Problem(prompt.id, prompt.text, prompt.tests, prompt.entry_point)
        code = humaneval.extract_code(answer, problem)
        return humaneval.run_tests(code, prompt.tests, prompt.entry_point, _LIMITS).passed
    final = reasoning.final_answer(answer)
    score: float = _generator(prompt.entry_point).score_answer(answer=final, entry=prompt.entry)
    return score >= 1.0


def wording() -> str:
    """A fingerprint of how tasks are asked and answers end: 16 hex digits."""
    parts = [humaneval.chat_prompt(""), humaneval.ANSWER_PREFIX, humaneval.STOP_WORDS, reasoning.chat_prompt("")]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """Of prompts in their order: 16 hex digits. A router's header has it."""
    return hashlib.sha256("\n".join(p.id + p.text for p in prompts).encode()).hexdigest()[:16]


def choose_prompts(
    code: int, reasoning: int, seed: int, fits: Callable[[Prompt], bool], progress: Callable[[], None]
) -> tuple[list[Prompt], dict[str, int]]:
    """So many prompts of each kind, in a random order, and how many were left out for which reason.

    fits: whether a prompt is short enough. progress: is called for each one chosen. Raises UserError when there
    are too few.
    """
    left_out = {"overlap with HumanEval": 0, "too long": 0, "own source fails its doctests": 0}
    functions = list(package_functions())
    random.Random(seed).shuffle(functions)
    same = overlaps(functions)
    candidates = []
    for function in functions:
        prompt = code_prompt(function)
        if function.id in same:
            left_out["overlap with HumanEval"] += 1
        elif not fits(prompt):
            left_out["too long"] += 1
        else:
            candidates.append(prompt)
    chosen = list(reasoning_prompts(reasoning, seed))
    for _ in chosen:
        progress()
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:
        at = 0
        while (missing := code + reasoning - len(chosen)) > 0 and at < len(candidates):
            part, at = candidates[at : at + missing], at + missing
            sound = pool.map(lambda p: passes(p, str(p.reference_answer)), part)
            for prompt, passed in zip(part, sound, strict=True):
                if passed:
                    chosen.append(prompt)
                    progress()
                else:
                    left_out["own source fails its doctests"] += 1
    if len(chosen) < code + reasoning:
        raise UserError(
            f"--prompts: got {code}; the packages have {len(chosen) - reasoning} that fit into --max-tokens"
        )
    random.Random(seed).shuffle(chosen)
    return chosen, left_out


def code_prompt(function: Function) -> Prompt:
    """The task to write that function."""
    tests = (
        "def check(candidate):\n"
        "    import doctest, importlib, sys\n"
        f"    sys.path += {function.paths!r}\n"
        f"    names = {{**vars(importlib.import_module({function.module!r})), {function.name!r}: candidate}}\n"
        f"    test = doctest.DocTestParser().get_doctest({function.doc!r}, names, {function.name!r}, None, 0)\n"
        "    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE\n"
        "    runner = doctest.DocTestRunner(verbose=False, optionflags=flags)\n"
        "    assert runner.run(test, out=lambda text: None).failed == 0\n"
    )
    return Prompt(function.id, "code", function.prompt, function.name, tests, function.body)


def reasoning_prompts(count: int, seed: int) -> Iterator[Prompt]:
    """Tasks of `REASONING_KINDS` in turn."""
    for number in range(count):
        kind = REASONING_KINDS[number % len(REASONING_KINDS)]
        entry = _generator(kind, seed)[number // len(REASONING_KINDS)]
        yield Prompt(f"{kind}:{number}", "reasoning", entry["question"].strip(), kind, entry=entry)


def overlaps(functions: Iterable[Function]) -> set[str]:
    """The ids of the functions that could be one of HumanEval's: the name is one of its entry points, or the
    docstrings share `_NGRAM_WORDS` words in a row."""
    names = {problem.entry_point for problem in humaneval.problems()}
    known = {gram for problem in humaneval.problems() for gram in grams(problem.prompt)}
    return {f.id for f in functions if f.name in names or not known.isdisjoint(grams(f.doc))}


def grams(text: str) -> Iterator[tuple[str, ...]]:
    """Every `_NGRAM_WORDS` words in a row."""
    words: Sequence[str] = re.findall(r"\w+", text.lower())
    return zip(*(words[i:] for i in range(_NGRAM_WORDS)), strict=False)


def _generator(kind: str, seed: int = 0) -> Any:
    try:
        from reasoning_gym import create_dataset
    except ImportError:
        raise UserError("train: needs the package reasoning-gym (pip install -e '.[train]')") from None
    return create_dataset(kind, size=1000, seed=_REASONING_SEED + seed)
