# SPDX-License-Identifier: Apache-2.0
"""An engine whose next token is a function of the tokens before it, and prompts and a tokenizer to go with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import Capacity, Engine, EngineError, EngineOutput
from tools.training import jobs
from tools.training.lockstep import Work, drive
from tools.training.workers import Item, Setup

VOCAB = 128  # tokens are ASCII characters
EOS = 0
HIDDEN = 4


class ScriptedEngine(Engine):
    """next_token: from the sequence to the token that gets the highest logit. Its KV is checked as a real one's is
    used: a step must start where the session ends, or before."""

    def __init__(self, next_token: Callable[[list[int]], int], max_sessions: int = 4, hidden: bool = False) -> None:
        self._next, self._max, self._hidden = next_token, max_sessions, hidden
        self.held: dict[int, list[int]] = {}
        self.batches: list[int] = []
        self.tokens = 0
        self.fails_at: int | None = None

    def capacity(self) -> Capacity:
        return Capacity(self._max, 10_000, 512, VOCAB, (EOS,), frozenset({"logits"}))

    def open(self, session: SessionOpen) -> None:
        if len(self.held) >= self._max:
            raise EngineError("full")
        self.held[session.session] = []

    def step(self, batch: Sequence[SessionStep]) -> EngineOutput:
        self.batches.append(len(batch))
        if self.fails_at == len(self.batches):
            return EngineOutput([], errors={batch[0].session: "scripted"})
        sampled = []
        for step in batch:
            sequence = self.held[step.session]
            assert step.token_ids and step.start <= len(sequence)
            sequence[step.start :] = step.token_ids
            self.tokens += len(step.token_ids)
            if step.sample:
                sampled.append(step.session)
        logits = torch.zeros(len(sampled), VOCAB)
        hidden = torch.zeros(len(sampled), HIDDEN) if self._hidden else None
        for row, session in enumerate(sampled):
            logits[row, self._next(self.held[session])] = 5.0
            if hidden is not None:
                hidden[row, 0] = len(self.held[session])
        return EngineOutput(sampled, logits, hidden)

    def free(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            self.held.pop(session, None)

    def close(self) -> None:
        self.held.clear()


class CharacterTokenizer:
    """A character is a token."""

    pieces: Sequence[bytes] = tuple(bytes([i]) if i else b"" for i in range(VOCAB))

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], begun: str = "") -> list[int]:
        return self.encode("".join(m["content"] for m in messages) + begun)

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in token_ids).decode()


def script(text: str, prompt: int) -> Callable[[list[int]], int]:
    """Writes `text` after a prompt of so many tokens, then ends."""
    tokens = [ord(c) for c in text]
    return lambda sequence: tokens[len(sequence) - prompt] if len(sequence) - prompt < len(tokens) else EOS


def texts(*stop: str, most: int = 100) -> jobs.Text:
    return jobs.Text(CharacterTokenizer.pieces, frozenset({EOS}), stop, most)


def run(job: Any, *engines: Engine) -> Any:
    """The result of one job."""
    ((_, result),) = drive(engines, [Work("job", 3, job)])
    return result


@dataclass
class ScriptedPool:
    """A `Pool` that answers with a function of the item, and can be interrupted after so many."""

    answer: Callable[[Setup, Item], Any]
    interrupt_after: int | None = None
    done: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, setup: Setup, items: Sequence[Item]) -> Iterator[tuple[str, Any]]:
        for item in items:
            if self.interrupt_after is not None and len(self.done) >= self.interrupt_after:
                raise KeyboardInterrupt
            self.done.append((item.kind, item.key))
            yield item.key, self.answer(setup, item)
