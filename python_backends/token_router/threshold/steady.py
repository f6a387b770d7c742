# SPDX-License-Identifier: Apache-2.0
"""What the chain says of one B: its steady state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Method", "Steady"]

Method = Literal["exact", "sampled"]


@dataclass(frozen=True)
class Steady:
    """The steady state of N live requests under one B; tuples have an entry for each model.

    throughput: tokens/s of all requests together. error: its standard error, tokens/s; 0 when exact.
    batch: mean sessions in a batch. delay_ms: mean wait of a request at the model until its batch starts.
    utilisation: share of the time that the model computes. steps_s: steps/s.
    method: "exact" = the stationary distribution of the whole chain; "sampled" = a random walk of the same chain.
    states: of the chain when exact, else transitions walked. delta_ms: the grid of the step lengths.
    rounding: the largest relative change of a step length by that grid.
    phase_distance: the largest total variation between a run-length distribution given and the phases used for it.
    """

    thresholds: tuple[int, ...]
    live: int
    throughput: float
    error: float
    batch: tuple[float, ...]
    delay_ms: tuple[float, ...]
    utilisation: tuple[float, ...]
    steps_s: tuple[float, ...]
    method: Method
    states: int
    delta_ms: float
    rounding: float
    phase_distance: float
