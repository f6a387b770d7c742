# SPDX-License-Identifier: Apache-2.0
"""The stationary distribution of small chains whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_array

from python_backends.token_router.threshold.stationary import stationary_distribution

# Two chains side by side: states 0 to 2, of which 0 is left for ever, and 3 to 5, a cycle.
BOTH = np.array(
    [
        [0.5, 0.25, 0.25, 0, 0, 0],
        [0, 0.9, 0.1, 0, 0, 0],
        [0, 0.3, 0.7, 0, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
        [0, 0, 0, 1, 0, 0],
    ]
)
EXPECTED = [0, 0.75, 0.25, 1 / 3, 1 / 3, 1 / 3]


@pytest.mark.parametrize("sweeps", [400, 1])
def test_each_chain_has_its_own(sweeps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sweeps, and directly where they haven't got there."""
    monkeypatch.setattr("python_backends.token_router.threshold.stationary._SWEEPS", sweeps)
    assert stationary_distribution(csr_array(BOTH), np.array([0, 3])) == pytest.approx(EXPECTED, abs=1e-9)


def test_closed_sets_count_by_the_chance_of_ending_there() -> None:
    matrix = np.array(
        [
            [0, 0.5, 0.3, 0.2],
            [0.5, 0, 0, 0.5],  # back, or to 3
            [0, 0, 1, 0],
            [0, 0, 0, 1],
        ]
    )
    # From 0 into 2 with 0.3 at every visit of it, of which there are 1 / (1 - 0.25).
    assert stationary_distribution(csr_array(matrix), np.array([0])) == pytest.approx([0, 0, 0.4, 0.6])
