# SPDX-License-Identifier: Apache-2.0
"""Options of `tokenrouter train`, with their defaults: the command line shows them without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.training.training import Target

__all__ = ["RECALL", "DataOptions", "TrainOptions"]

RECALL = 0.95  # of the tokens that need the large model, where neither a recall nor a share is asked for


@dataclass(frozen=True)
class DataOptions:
    """prompts: functions to write. reasoning: reasoning tasks. max_tokens: of an answer. seed: of all randomness."""

    prompts: int = 240
    reasoning: int = 30
    max_tokens: int = 320
    seed: int = 0


@dataclass(frozen=True)
class TrainOptions:
    """work: the folder that everything is kept in. output: the router's file; None = in the work folder.

    judge, judge_model: of R2R (`judges`). rounds, rollouts: of CITER. marginal: of Co-LLM (`recipes`).
    width: of R2R's and CITER's network; None = the recipe's. processes: run the models, with a thread and so many
    sessions each.
    """

    work: Path
    data: DataOptions
    target: Target
    output: Path | None = None
    judge: str = "tests"
    judge_model: str | None = None
    width: int | None = None
    rounds: int = 2
    rollouts: int = 4
    marginal: bool = False
    epochs: int = 50
    processes: int = 2
    sessions: int = 16
