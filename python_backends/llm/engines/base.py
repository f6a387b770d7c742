# SPDX-License-Identifier: Apache-2.0
"""What an engine is: the owner of one model's weights and of the KV of many sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from python_backends.llm.contract import SessionOpen, SessionStep

if TYPE_CHECKING:
    import torch

__all__ = ["Capacity", "Decide", "Engine", "EngineError", "EngineOutput"]


class EngineError(Exception):
    """The engine can't do what it was asked: the sessions of that call fail, the model goes on."""


@dataclass(frozen=True)
class Capacity:
    """The engine's limits and what it can return. The fields that `LLMFacts` also has mean the same.

    provides: of {"logits", "hidden_states", "embeddings", "token_bytes", "sampling"}: "embeddings" = `embed` works,
        "token_bytes" = `token_bytes` works, "sampling" = its logits can be sampled from.
    hidden_size: columns of the hidden states; None without them.
    kv_tokens: None = every session has a buffer of its own, with room for context_tokens.
    """

    max_sessions: int
    context_tokens: int
    prefill_chunk: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    provides: frozenset[str]
    hidden_size: int | None = None
    kv_tokens: int | None = None
    kv_block: int = 1

    @property
    def all_kv_tokens(self) -> int:
        """Of all sessions together."""
        return self.max_sessions * self.context_tokens if self.kv_tokens is None else self.kv_tokens


@dataclass(frozen=True)
class EngineOutput:
    """What a forward step gave the sessions with sample=True that succeeded: row r is sessions[r].

    logits: FP32 [n, vocabulary], raw, the engine's own copy (valid after the next step). None = the engine
        has none, and next_token_ids are given.
    hidden_states: FP32 [n, hidden size], after the final norm, when they were asked for.
    next_token_ids: the engine's own choice, only from an engine without logits.
    errors: session -> why it failed in this step.
    """

    sessions: Sequence[int]
    logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    next_token_ids: Sequence[int] | None = None
    errors: dict[int, str] = field(default_factory=dict)


class Decide(Protocol):
    """What `Engine.run` asks after each step of a session."""

    def __call__(self, session: int, made: int, logits: torch.Tensor) -> int | None:
        """The token that the session goes on with; None = it stops here.

        made: tokens of this run that the session has gone on with so far; asked again with the same number (the
        engine has only now seen all of the prompt), what was answered before is forgotten.
        logits: FP32 [1, vocabulary], as in EngineOutput.
        """


class Engine(ABC):
    """One model's weights and the KV of its sessions. One call at a time; not always from the same thread.

    name: what `LLMFacts.engine` says; of the built-in engines, the `type` of their configuration.
    weights: the name of its weights (`catalog.weights_name`); None = it has none, or none that is known.
    runs: whether it can make the steps of a call by itself (`run`).
    """

    name: ClassVar[str] = "custom"
    weights: str | None = None
    runs: bool = False

    @abstractmethod
    def capacity(self) -> Capacity:
        """The engine's limits; they never change while it lives."""

    @abstractmethod
    def open(self, session: SessionOpen) -> None:
        """Make room for a session. Raises EngineError when max_sessions are held, ValueError if known."""

    @abstractmethod
    def step(self, batch: Sequence[SessionStep]) -> EngineOutput:
        """One forward step: for each session, drop the KV from `start` on, append the tokens, and for
        those with `sample` return what the model says about the next one.

        The batch may be any subset of the open sessions, with suffixes of any lengths; the KV of the
        others stays. What concerns one session only (a `start` past its KV, a full context) goes into
        EngineOutput.errors. Raises EngineError when the whole step failed; then the KV of the batch's
        sessions is undefined and they must be freed.
        """

    def run(self, batch: Sequence[SessionStep], steps: Sequence[int], decide: Decide) -> dict[int, str]:
        """Several steps of these sessions (all with `sample`): a session makes its step, then steps with the token that
        `decide` gives it, for as long as it gives one; batch[i] at most steps[i] (>= 1) steps, perhaps fewer. None
        waits for another. A token is in the KV once `decide` was asked what follows it.

        `decide` is called by one thread at a time, not always the caller's, and not any more when this has returned.
        Returns session -> why it failed. Raises EngineError as `step` does.
        """
        raise EngineError(f"the engine {self.name} makes one step at a time")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the input embedding: INT64 [n] -> FP32 [n, embedding size]. Raises EngineError without one."""
        raise EngineError(f"the engine {self.name} gives no rows of its input embedding")

    def token_bytes(self, token: int) -> bytes:
        """The text of a token, in UTF-8 bytes; empty of a special one. Raises EngineError without a vocabulary."""
        raise EngineError(f"the engine {self.name} doesn't know the texts of its tokens")

    @abstractmethod
    def free(self, sessions: Sequence[int]) -> None:
        """Forget these sessions and their KV. Unknown ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Give the weights' memory back. The engine is not used afterwards."""
