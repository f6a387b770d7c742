# SPDX-License-Identifier: Apache-2.0
"""Many pieces of work on the same engines at once: each is a generator that asks for one step at a time, and the
steps that are asked for at the same time are made as one batch."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import Engine, EngineError

__all__ = ["Ask", "Job", "Row", "Work", "drive"]


class Ask(NamedTuple):
    """A step that a job wants. start, token_ids: see `SessionStep`. sample: whether it wants what comes next.
    model: the number of the engine; a job has a session of its own on each engine that it asks."""

    start: int
    token_ids: Sequence[int]
    sample: bool = True
    model: int = 0


class Row(NamedTuple):
    """What the model says about the next token: raw logits FP32 [vocabulary], and its hidden state FP32 [hidden size]
    after the final norm, where the engine returns it."""

    logits: torch.Tensor
    hidden: torch.Tensor | None


# is sent a Row for each Ask with `sample`, None for one without
Job: TypeAlias = Generator[Ask, Row | None, Any]


class Work(NamedTuple):
    """A job and its name. prompt_tokens: where its sessions' decode regions begin (`SessionOpen`)."""

    key: Hashable
    prompt_tokens: int
    job: Job


@dataclass
class _Running:
    work: Work
    ask: Ask


def drive(engines: Sequence[Engine], works: Iterable[Work]) -> Iterator[tuple[Hashable, Any]]:
    """The key and the result of each job, in the order in which they end. As many run at once as the engines hold
    sessions. Raises EngineError when a step of any of them fails."""
    waiting = iter(works)
    most = min(engine.capacity().max_sessions for engine in engines)
    running: dict[int, _Running] = {}
    opened: list[set[int]] = [set() for _ in engines]
    number = 0
    while True:
        while len(running) < most and (work := next(waiting, None)) is not None:
            number += 1
            try:
                running[number] = _Running(work, next(work.job))
            except StopIteration as end:  # a job that has nothing to ask
                yield work.key, end.value
        if not running:
            return
        for session, row in _step(engines, running, opened):
            entry = running[session]
            try:
                entry.ask = entry.work.job.send(row)
            except StopIteration as end:
                del running[session]
                for engine, sessions in zip(engines, opened, strict=True):
                    engine.free([session])
                    sessions.discard(session)
                yield entry.work.key, end.value


def _step(
    engines: Sequence[Engine], running: dict[int, _Running], opened: Sequence[set[int]]
) -> list[tuple[int, Row | None]]:
    """One step of every engine that is asked for something: what each running job gets."""
    answers: list[tuple[int, Row | None]] = []
    for model, engine in enumerate(engines):
        asked = {s: r for s, r in running.items() if r.ask.model == model}
        if not asked:
            continue
        for session, entry in asked.items():
            if session not in opened[model]:
                engine.open(SessionOpen(session, entry.work.prompt_tokens, engine.capacity().context_tokens))
                opened[model].add(session)
        steps = [SessionStep(s, r.ask.start, list(r.ask.token_ids), r.ask.sample) for s, r in asked.items()]
        output = engine.step(steps)
        if output.errors:
            session, reason = next(iter(output.errors.items()))
            raise EngineError(f"{running[session].work.key}: {reason}")
        if output.logits is None:
            raise EngineError(f"{engine.name}: has no logits")
        hidden = output.hidden_states
        rows = {
            session: Row(output.logits[r], None if hidden is None else hidden[r])
            for r, session in enumerate(output.sessions)
        }
        answers += [(session, rows.get(session)) for session in asked]
    return answers
