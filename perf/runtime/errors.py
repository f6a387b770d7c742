# SPDX-License-Identifier: Apache-2.0
"""Standard errors of rates that were counted second by second."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["standard_error"]


def standard_error(seconds: Sequence[float], phases: int = 1) -> float:
    """Of the mean of `seconds`, which are phases of one length, one after the other; what lies between the phases' own
    means is no error. Of a single second, 0.

    Successive seconds are alike, since a request goes on for several: of n seconds with the lag-1 autocorrelation r,
    an AR(1) series' mean is as sure as that of n (1 - r) / (1 + r) independent ones. r is each phase's own, not below
    0. Of a few seconds it is too low, and so is the error: with r = 0.4 by 1 % of 30 seconds, by 10 % of ten and by
    25 % of five.
    """
    each = len(seconds) // phases
    errors = [_of_one_phase(seconds[i * each : (i + 1) * each]) for i in range(phases)]
    return math.sqrt(sum(error**2 for error in errors)) / phases


def _of_one_phase(seconds: Sequence[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    mean = statistics.fmean(seconds)
    apart = [x - mean for x in seconds]
    squares = sum(a * a for a in apart)
    if not squares:
        return 0.0
    r = max(0.0, sum(a * b for a, b in pairwise(apart)) / squares)
    return math.sqrt(squares / (len(apart) - 1) / len(apart) * (1 + r) / (1 - r))
