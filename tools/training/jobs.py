# SPDX-License-Identifier: Apache-2.0
"""What the models are asked to do, as jobs for `lockstep.drive`: write an answer, follow one, leave one and go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from routers.rstitch import normalized_entropy
from tools.training.lockstep import Ask, Job, Row
from tools.training.statements import next_statement

__all__ = [
    "TOP_LOGITS",
    "Answer",
    "Branch",
    "Followed",
    "Policy",
    "Text",
    "answer",
    "branches",
    "first_statement",
    "follow",
    "rollouts",
]

TOP_LOGITS = 100  # what the R2R network reads
Policy = Callable[[torch.Tensor], bool]
"""Whether model 1 makes the token, from model 0's hidden state FP32 [hidden size]."""


@dataclass(frozen=True)
class Text:
    """How tokens read, and where an answer ends.

    pieces: the bytes of every token. eos: the tokens that end an answer. stop: texts that end it too.
    most: tokens of an answer.
    """

    pieces: Sequence[bytes]
    eos: frozenset[int]
    stop: Sequence[str]
    most: int

    def of(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, special ones left out."""
        return b"".join(self.pieces[i] for i in token_ids if i < len(self.pieces)).decode("utf-8", errors="replace")

    def ended(self, token_ids: Sequence[int]) -> bool:
        """Whether an answer that has grown by its last token is at its end, or as long as it may be."""
        return len(token_ids) >= self.most or self.complete(token_ids)

    def complete(self, token_ids: Sequence[int]) -> bool:
        """Whether an answer that has grown by its last token ends by itself."""
        if token_ids[-1] in self.eos:
            return True
        # a stop text's last character is in the last token: the few before it hold the rest
        tail = self.of(token_ids[-max(map(len, self.stop), default=0) - 1 :])
        return any(stop in tail for stop in self.stop)


@dataclass(frozen=True)
class Answer:
    """token_ids: the answer, with the token that ends it if it came. logprobs: of each."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Followed:
    """What a model says at each of n positions of a text that is given to it.

    argmax: INT64 [n], its own choice. logprobs: FP32 [n], of the text's token. entropy: FP32 [n], normalised.
    hidden: FP32 [n, hidden size]. top_logits: FP32 [n, TOP_LOGITS], raw, falling. The last two only of a model with
    hidden states, that is, one that a router sits beside.
    """

    argmax: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]
    hidden: NDArray[np.float32] | None = None
    top_logits: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Branch:
    """An answer left at `position` (from 0) with another token.

    token_ids: what stands there then, that token first. equal: whether the next statement is the same but for its
    form; None = not looked at, or cut off in it. whole: whether token_ids go to the end of the answer, and weren't
    cut off at the longest one.
    """

    position: int
    token_ids: list[int]
    equal: bool | None
    whole: bool


def answer(prompt: Sequence[int], text: Text) -> Job:
    """The model writes greedily. Returns an Answer."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    row = yield Ask(0, prompt)
    while True:
        logits = _asked(row).logits
        token_ids.append(int(logits.argmax()))
        logprobs.append(_logprob(logits, token_ids[-1]))
        if text.ended(token_ids):
            return Answer(token_ids, logprobs)
        row = yield Ask(len(prompt) + len(token_ids) - 1, token_ids[-1:])


def follow(prompt: Sequence[int], given: Sequence[int]) -> Job:
    """The model is led along the tokens `given`, one a step, as it would be when it is served. Returns Followed."""
    rows: list[tuple[int, float, float]] = []
    hidden, top = [], []
    row = yield Ask(0, prompt)
    for at, token in enumerate(given):
        logits = _asked(row).logits
        rows.append((int(logits.argmax()), _logprob(logits, token), float(normalized_entropy(logits[None])[0])))
        if (state := _asked(row).hidden) is not None:
            hidden.append(state.numpy().copy())
            top.append(logits.topk(min(TOP_LOGITS, len(logits))).values.numpy())
        if at + 1 < len(given):
            row = yield Ask(len(prompt) + at, [token])
    argmax, logprobs, entropy = zip(*rows, strict=True)
    return Followed(
        np.array(argmax, np.int64),
        np.array(logprobs, np.float32),
        np.array(entropy, np.float32),
        np.stack(hidden) if hidden else None,
        np.stack(top) if top else None,
    )


def branches(
    prompt: Sequence[int], given: Sequence[int], marks: Sequence[tuple[int, int]], code: bool, whole: bool, text: Text
) -> Job:
    """The model is led along its own answer `given`, and leaves it at each of `marks`: a position and the token that
    stands there instead. It goes on greedily to the end of the statement, and to the end of the answer where the
    statement comes out another one and `whole` is wanted. Returns the Branches, the last position first.

    The last mark comes first: what the KV holds before a mark is then still the answer's.
    """
    found: list[Branch] = []
    start = 0
    for position, token in sorted(marks, reverse=True):
        line = text.of(given[:position]).rpartition("\n")[2]
        original = next_statement(line + text.of(given[position:]), code, ended=True)
        if start == 0:
            yield Ask(0, [*prompt, *given[:position]], sample=False)
        start = len(prompt) + position
        token_ids, equal, row = [token], None, None
        while True:
            sequence = [*given[:position], *token_ids]
            complete = text.complete(sequence)
            if equal is None:
                statement = next_statement(line + text.of(token_ids), code, complete)
                equal = None if statement is None else statement == original
            if text.ended(sequence) or equal or (equal is False and not whole):
                found.append(Branch(position, token_ids, equal, complete))
                break
            row = yield Ask(start + len(token_ids) - 1, token_ids[-1:])
            token_ids.append(int(_asked(row).logits.argmax()))
    return found


def first_statement(given: Sequence[int], position: int, code: bool, text: Text) -> Sequence[int]:
    """The tokens of an answer from a position to the end of its next statement: where a branch from there ends."""
    line = text.of(given[:position]).rpartition("\n")[2]
    for end in range(position + 1, len(given)):
        if next_statement(line + text.of(given[position:end]), code, ended=False) is not None:
            return given[position:end]
    return given[position:]


def rollouts(
    prompt: Sequence[int], given: Sequence[int], marks: Sequence[tuple[int, int]], text: Text, policy: Policy | None
) -> Job:
    """Model 0 leaves the text `given` at each of `marks` and writes to the end of the answer, greedily; with a policy,
    model 1 makes the tokens that it says. Returns the Branches, the last position first."""
    found: list[Branch] = []
    sequence = [*prompt, *given]
    held = [0, 0]  # of the sequence, by each model
    for position, token in sorted(marks, reverse=True):
        start = len(prompt) + position
        sequence[start:] = [token]
        held = [min(h, start) for h in held]
        while not text.ended(sequence[len(prompt) :]):
            row = yield Ask(held[0], sequence[held[0] :])
            held[0] = len(sequence)
            hidden = _asked(row).hidden
            if policy is not None and hidden is not None and policy(hidden):
                row = yield Ask(held[1], sequence[held[1] :], model=1)
                held[1] = len(sequence)
            sequence.append(int(_asked(row).logits.argmax()))
        found.append(Branch(position, sequence[start:], None, text.complete(sequence[len(prompt) :])))
    return found


def _asked(row: Row | None) -> Row:
    if row is None:
        raise RuntimeError("the engine gave nothing for a step that asked for a token")
    return row


def _logprob(logits: torch.Tensor, token: int) -> float:
    return float(logits[token] - logits.logsumexp(-1))
