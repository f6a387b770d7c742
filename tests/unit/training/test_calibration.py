# SPDX-License-Identifier: Apache-2.0
"""AUROC, and where to cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.training.calibration import (
    auroc,
    auroc_interval,
    curve,
    cut_for_recall,
    cut_for_share,
    recall_at,
    reliability,
)

LABELS = np.array([0, 0, 1, 0, 1, 0, 1, 0, 0, 1])
SCORES = np.array([0.1, 0.2, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])


def test_auroc_is_the_share_of_pairs_in_the_right_order_ties_half() -> None:
    pairs = [(p > n) + 0.5 * (p == n) for p in SCORES[LABELS == 1] for n in SCORES[LABELS == 0]]
    assert auroc(LABELS, SCORES) == pytest.approx(sum(pairs) / len(pairs))
    assert auroc(LABELS, np.full(10, 0.5)) == 0.5
    assert math.isnan(auroc(np.zeros(3, int), np.arange(3.0)))


def test_the_interval_resamples_whole_prompts() -> None:
    prompts = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    low, high = auroc_interval(LABELS, SCORES, prompts, seed=0)
    assert low <= auroc(LABELS, SCORES) <= high
    assert (low, high) == auroc_interval(LABELS, SCORES, prompts, seed=0)
    one = np.zeros(10, int)
    assert auroc_interval(LABELS, SCORES, one, 0) == (pytest.approx(auroc(LABELS, SCORES)),) * 2


@pytest.mark.parametrize(("recall", "delegated"), [(0.25, 1), (0.5, 4), (0.75, 6), (0.9, 8), (1.0, 8)])
def test_a_recall_is_reached_with_the_fewest_tokens(recall: float, delegated: int) -> None:
    cut = cut_for_recall(LABELS, SCORES, recall)
    reached, share = recall_at(LABELS, SCORES, cut)
    assert reached >= recall
    assert round(share * 10) == delegated


@pytest.mark.parametrize(("share", "delegated"), [(0.0, 0), (0.1, 1), (0.35, 3), (0.5, 5), (1.0, 10)])
def test_a_share_is_not_exceeded(share: float, delegated: int) -> None:
    assert (cut_for_share(SCORES, share) < SCORES).sum() == delegated


def test_recall_needs_a_token_that_needs_it() -> None:
    with pytest.raises(ValueError, match="no token of the held-out prompts"):
        cut_for_recall(np.zeros(10, int), SCORES, 0.9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=2, max_size=40), st.floats(0.01, 1.0))
def test_cuts_lie_between_scores(rows: list[tuple[bool, int]], wanted: float) -> None:
    """So that >= and > delegate the same tokens, and what they promise holds with ties too."""
    labels = np.array([int(needed) for needed, _ in rows])
    scores = np.array([score / 10 + 0.05 for _, score in rows])
    cuts = [cut_for_share(scores, wanted)]
    assert (scores > cuts[0]).mean() <= wanted + 1e-9
    if labels.any():
        cuts.append(cut_for_recall(labels, scores, wanted))
        assert recall_at(labels, scores, cuts[1])[0] >= wanted
    assert all(0 <= cut <= 1 and cut not in scores for cut in cuts)


def test_the_curve_runs_from_nothing_to_everything() -> None:
    points = curve(LABELS, SCORES)
    assert (points.share[0], points.recall[0], points.false_share[0]) == (0, 0, 0)
    assert (points.share[-1], points.recall[-1], points.false_share[-1]) == (1, 1, 1)
    assert np.trapz(points.recall, points.false_share) == pytest.approx(auroc(LABELS, SCORES))


def test_reliability_bins_hold_equally_many_tokens() -> None:
    bins = reliability(LABELS, SCORES, 5)
    assert [n for _, _, n in bins] == [2] * 5
    assert [needed for _, needed, _ in bins] == [0, 0.5, 0.5, 0.5, 0.5]
