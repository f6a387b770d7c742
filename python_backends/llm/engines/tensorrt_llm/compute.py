# SPDX-License-Identifier: Apache-2.0
"""One forward step of TensorRT-LLM over some sessions, whichever way it keeps their KV."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from python_backends.llm.engines.base import Decide, EngineError

if TYPE_CHECKING:
    import torch

__all__ = ["Compute", "Piece", "Ran", "Rows"]


class Piece(NamedTuple):
    """A session's part of a step. token_ids: its whole sequence, the step's tokens included. start: where those begin.
    held: how many tokens of the sequence before it stand at the front of this one too. output: whether its logits
    are wanted."""

    session: int
    token_ids: Sequence[int]
    start: int
    held: int
    output: bool


class Rows(NamedTuple):
    """sessions: those with output that succeeded. logits: FP32 [n, vocabulary], row r is sessions[r]'s, where the
    engine computes (a GPU). errors: session -> why it failed."""

    sessions: list[int]
    logits: torch.Tensor
    errors: dict[int, str]


class Ran(NamedTuple):
    """went_on: session -> the tokens that it went on with and whose KV it holds now. errors: session -> why it
    failed."""

    went_on: dict[int, list[int]]
    errors: dict[int, str]


class Compute(ABC):
    """One call at a time; not always from the same thread. runs: whether it has a `run`."""

    runs: bool = False

    @abstractmethod
    def forward(self, pieces: Sequence[Piece]) -> Rows:
        """Raises EngineError when the whole step failed."""

    def run(self, pieces: Sequence[Piece], steps: Sequence[int], decide: Decide) -> Ran:
        """As `Engine.run`. Raises EngineError when the whole run failed."""
        raise EngineError("one step at a time")

    @abstractmethod
    def free(self, session: int) -> None:
        """Let go of a session's KV. Unknown ones are ignored."""
