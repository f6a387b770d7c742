# SPDX-License-Identifier: Apache-2.0
"""From what the two models said to labels. All are of the same sense: 1 = the large model is needed for this token,
0 = it isn't, -1 = not known, and left out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ids", "Labels", "citer_labels", "co_llm_labels", "mismatches", "r2r_labels"]

Ids = NDArray[np.int64]
Labels = NDArray[np.int8]


def mismatches(text: Ids, slm: Ids) -> list[tuple[int, int]]:
    """The positions at which the small model would have written something else, with what it would have."""
    return [(int(t), int(slm[t])) for t in np.flatnonzero(text != slm)]


def r2r_labels(text: Ids, slm: Ids, verdicts: Mapping[int, int]) -> Labels:
    """R2R (arXiv 2505.21600): the same choice -> 0; another one -> what the judge said of it (-1 without)."""
    labels = np.zeros(len(text), np.int8)
    for position, _ in mismatches(text, slm):
        labels[position] = verdicts.get(position, -1)
    return labels


def citer_labels(gold: Ids, slm: Ids, llm: Ids, rollouts: Mapping[int, bool]) -> Labels:
    """CITER's preference (arXiv 2502.01976) for a gold text: the small model says the gold token -> 0; else the large
    one does -> 1; else 0 if the answer that follows from the small model's token is right (-1 without a roll-out)."""
    labels = np.where(slm == gold, 0, np.where(llm == gold, 1, -1)).astype(np.int8)
    for position, right in rollouts.items():
        if labels[position] == -1:
            labels[position] = int(not right)
    return labels


def co_llm_labels(gold: Ids, slm: Ids, llm: Ids) -> Labels:
    """Co-LLM's weak labels, variant "a" (arXiv 2403.03870): 1 where the large model says the gold token and the small
    one doesn't."""
    labels: Labels = ((llm == gold) & (slm != gold)).astype(np.int8)
    return labels
