# SPDX-License-Identifier: Apache-2.0
"""Options of commands, with their defaults: the command line shows them without loading what the commands need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DEMO_MAX_TOKENS", "MeasureOptions", "SimulateOptions", "ThresholdOptions"]

DEMO_MAX_TOKENS = 256  # of an answer


@dataclass(frozen=True)
class MeasureOptions:
    """server: a running one to measure instead of starting one (`find_server`). concurrency: the sweep; None = 1, 2, 4,
    ... up to 16 and to what the deployment admits. seconds: of each point. prompts: a file with one to a line."""

    server: str | None = None
    concurrency: Sequence[int] | None = None
    seconds: float = 5.0
    prompts: Path | None = None
    max_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True)
class SimulateOptions:
    """Besides the profile's; tokens: of a request on average, None = endless."""

    policy: str = "all"
    threshold: Sequence[int] = ()
    concurrency: int | None = None
    rate: float | None = None
    max_live: int | None = None
    tokens: float | None = None
    prompt_tokens: int = 0
    resume: bool = True
    max_wait_ms: float | None = None
    duration: float = 600.0
    seed: int = 0


@dataclass(frozen=True)
class ThresholdOptions:
    """Besides the profile's; concurrency: the numbers of live requests to solve for. delta_ms: the grid of step times,
    None = as fine as they need."""

    concurrency: Sequence[int] = (4,)
    delta_ms: float | None = None
    method: str = "auto"
    seed: int = 0
