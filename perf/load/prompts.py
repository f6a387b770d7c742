# SPDX-License-Identifier: Apache-2.0
"""What the users of a load run ask: built-in sets of prompts, and a file of one's own."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from python_backends.token_router.errors import InvalidRequest
from python_backends.token_router.params import GenerateParams

__all__ = ["BUILT_IN", "FixedPrompts", "IntRange", "PromptSet", "RandomIds", "prompt_set"]

_IDS = "ids"
# Any real tokenizer has these tokens: the first 256 are its bytes or what stands for them. 0 is the end of
# sequence of a paced model.
_FIRST_ID, _LAST_ID = 1, 255


@dataclass(frozen=True)
class IntRange:
    """The whole numbers from `least` to `most`; written "16" or "16:64"."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> IntRange:
        """Raises ValueError for anything but N or N:M with 1 <= N <= M."""
        least, _, most = text.partition(":")
        if not (least.isdecimal() and (most or least).isdecimal() and (most or ":" not in text)):
            raise ValueError(f"must be N or N:M, whole numbers; got {text!r}")
        values = cls(int(least), int(most or least))
        if not 1 <= values.least <= values.most:
            raise ValueError(f"must be N or N:M with 1 <= N <= M; got {text!r}")
        return values

    def draw(self, rng: random.Random) -> int:
        """One of them, each as likely as any other."""
        return rng.randint(self.least, self.most)


@runtime_checkable
class PromptSet(Protocol):
    """Where requests come from."""

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """A prompt, and whatever else the set says of that request: inputs of the public model by name, as Python
        values (see `python_backends.token_router.public.INPUTS`)."""


@dataclass(frozen=True)
class RandomIds:
    """Random token ids, for deployments without a tokenizer (`paced`). lengths: of a prompt, in tokens."""

    lengths: IntRange

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """See `PromptSet`."""
        return {"input_ids": [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(self.lengths.draw(rng))]}


@dataclass(frozen=True)
class FixedPrompts:
    """Prompts that are drawn from again and again, each as likely as any other."""

    prompts: Sequence[Mapping[str, Any]]

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """See `PromptSet`."""
        return rng.choice(self.prompts)


def _chats(*questions: str) -> FixedPrompts:
    return FixedPrompts([{"messages": [{"role": "user", "content": question}]} for question in questions])


def _texts(*beginnings: str) -> FixedPrompts:
    return FixedPrompts([{"text_input": beginning} for beginning in beginnings])


BUILT_IN: Mapping[str, PromptSet] = {
    _IDS: RandomIds(IntRange(16, 64)),
    "code": _chats(
        "Write a Python function that returns the n-th Fibonacci number.",
        "Write a Python function that checks whether a string is a palindrome, ignoring case and spaces.",
        "Write a Python function that merges two sorted lists into one sorted list.",
        "Write a Python function that counts the vowels in a string.",
        "Write a Python function that removes duplicates from a list and keeps the order.",
        "Write a Python class for a stack with push, pop and peek.",
        "Write a Python function that finds the longest common prefix of a list of strings.",
        "Write a Python function that turns a roman numeral into a number.",
    ),
    "chat": _chats(
        "Why is the sky blue?",
        "Name three things to do on a rainy Sunday.",
        "Explain to a child what a budget is.",
        "What is the difference between weather and climate?",
        "I have 12 eggs, use 5 and buy 6 more. How many do I have?",
        "Write a polite e-mail that moves a meeting from Monday to Tuesday.",
        "Which is heavier, a kilogram of feathers or a kilogram of iron?",
        "Summarise how a bill becomes a law.",
    ),
    "text": _texts(
        "Once upon a time",
        "The history of the bicycle begins",
        "To make a good cup of coffee, you",
        "The three most important properties of water are",
        "In the year 2100, the city",
        "Dear neighbour, I am writing to you because",
    ),
}


def prompt_set(name: str) -> PromptSet:
    """A built-in set by its name, random ids of given lengths ("ids:16:64"), or the file of that path.

    A file has one request a line, a JSON object of inputs of the public model: the prompt (text_input, messages or
    input_ids) and, if wanted, what is sent along with it, such as max_tokens. Raises ValueError that names the line
    and what is wrong with it.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(f"{_IDS}:"):
        try:
            return RandomIds(IntRange.parse(name.removeprefix(f"{_IDS}:")))
        except ValueError as error:
            raise ValueError(f"{_IDS}: the prompt's length in tokens {error}") from None
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"is neither a file nor one of {', '.join(BUILT_IN)}, {_IDS}:N, {_IDS}:N:M; got {name!r}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read {name}: {error}") from None
    prompts = [_checked(line, f"{name}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{name} has no prompts; it wants a JSON object on each line")
    return FixedPrompts(prompts)


def _checked(line: str, where: str) -> Mapping[str, Any]:
    """The request on a line of a file. Raises ValueError."""
    try:
        inputs = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from None
    if not isinstance(inputs, dict):
        raise ValueError(f"{where}: must be a JSON object of inputs of the public model, got {line[:80]!r}")
    if "stream" in inputs:
        raise ValueError(f"{where}: stream: can't be set; every answer is streamed")
    try:
        params = GenerateParams.parse(inputs)
    except InvalidRequest as error:
        raise ValueError(f"{where}: {error}") from None
    return params.model_dump(include=set(inputs), exclude_none=True)
