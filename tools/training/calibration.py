# SPDX-License-Identifier: Apache-2.0
"""How well scores tell the tokens that need the large model from the others, and where to cut.

A score is the probability that it is needed; a token is delegated where its score is above the cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

__all__ = ["Curve", "auroc", "auroc_interval", "curve", "cut_for_recall", "cut_for_share", "recall_at", "reliability"]

Scores = NDArray[np.floating[Any]]
Labels = NDArray[np.integer[Any]]
_RESAMPLES = 300


@dataclass(frozen=True)
class Curve:
    """For each number k of tokens delegated, the k with the highest scores: share = k / all, recall = of those that
    need it, false_share = of those that don't."""

    share: NDArray[np.float64]
    recall: NDArray[np.float64]
    false_share: NDArray[np.float64]


def auroc(labels: Labels, scores: Scores) -> float:
    """The probability that a token that needs it has a higher score than one that doesn't, ties half; nan without
    both kinds."""
    positive = labels == 1
    n1, n0 = int(positive.sum()), int((~positive).sum())
    if n0 == 0 or n1 == 0:
        return float("nan")
    return float((rankdata(scores)[positive].sum() - n1 * (n1 + 1) / 2) / (n0 * n1))


def auroc_interval(labels: Labels, scores: Scores, groups: Labels, seed: int) -> tuple[float, float]:
    """Its 95 % interval, by drawing whole groups (prompts: the tokens of one aren't independent) with replacement."""
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    values = []
    for _ in range(_RESAMPLES):
        drawn = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        values.append(auroc(labels[drawn], scores[drawn]))
    if np.isnan(values).all():
        return float("nan"), float("nan")
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)


def curve(labels: Labels, scores: Scores) -> Curve:
    """See `Curve`; k runs from 0 to all. Tokens of equal score stand in their order."""
    hits = labels[np.argsort(-scores, kind="stable")] == 1
    found, delegated = np.append(0, hits.cumsum()), np.arange(len(hits) + 1)
    needed, others = max(1, int(hits.sum())), max(1, int((~hits).sum()))
    return Curve(delegated / max(1, len(hits)), found / needed, (delegated - found) / others)


def cut_for_recall(labels: Labels, scores: Scores, recall: float) -> float:
    """The highest cut that delegates at least that share of the tokens that need it: R2R's choice, the fewest
    delegated subject to the recall. Raises ValueError when there is no such token."""
    needed = np.sort(scores[labels == 1])[::-1]
    if len(needed) == 0:
        raise ValueError("no token of the held-out prompts needs the large model")
    wanted = int(np.ceil(recall * len(needed) - 1e-9))
    return _below(scores, float(needed[max(0, wanted - 1)]))


def cut_for_share(scores: Scores, share: float) -> float:
    """The lowest cut that delegates at most that share of all tokens."""
    falling = np.sort(scores)[::-1]
    most = int(share * len(falling) + 1e-9)
    if most >= len(falling):
        return 0.0
    return _above(scores, float(falling[most]))


def recall_at(labels: Labels, scores: Scores, cut: float) -> tuple[float, float]:
    """Recall and share of a cut."""
    delegated = scores > cut
    return float(delegated[labels == 1].mean()) if (labels == 1).any() else float("nan"), float(delegated.mean())


def reliability(labels: Labels, scores: Scores, bins: int = 10) -> list[tuple[float, float, int]]:
    """For bins of equally many tokens: mean score, share that need it, tokens."""
    parts = np.array_split(np.argsort(scores, kind="stable"), bins)
    return [(float(scores[p].mean()), float((labels[p] == 1).mean()), len(p)) for p in parts if len(p)]


def _below(scores: Scores, value: float) -> float:
    """Halfway between a score and the next lower one: the routers' comparisons differ in what they do with equality."""
    lower = scores[scores < value]
    return (value + float(lower.max())) / 2 if len(lower) else value / 2


def _above(scores: Scores, value: float) -> float:
    higher = scores[scores > value]
    return (value + float(higher.min())) / 2 if len(higher) else (value + 1) / 2
