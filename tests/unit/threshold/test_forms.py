# SPDX-License-Identifier: Apache-2.0
"""P and C of the algorithms."""

from __future__ import annotations

import math

import pytest

import routers
from python_backends.token_router.threshold.forms import (
    ALGORITHMS,
    citer,
    co_llm,
    form,
    me,
    r2r,
    random,
    rstitch,
    single,
)


def test_the_papers_matrices() -> None:
    assert r2r(0.35) == ([[0.65, 0.35], [1, 0]], [[1, 0], [1, 0]])
    assert rstitch(0.25, 0.5) == ([[0.75, 0.25], [0.5, 0.5]], [[1, 0], [1, 1]])
    assert single() == ([[1]], [[1]])


@pytest.mark.parametrize("like_r2r", [citer, co_llm, random])
def test_those_that_come_back_after_one_token_have_r2rs_form(like_r2r: type) -> None:
    assert like_r2r(0.2) == r2r(0.2)


def test_an_ensemble_redraws_by_its_weights_wherever_a_request_is() -> None:
    p, c = me([5, 3, 2])
    assert p == [[0.5, 0.3, 0.2]] * 3
    assert c == [[1, 1, 1]] * 3
    assert me([1e308, 1e308]).p == [[0.5, 0.5]] * 2


def test_by_name() -> None:
    assert form("r2r", p=0.4, q=None, weights=None) == r2r(0.4)
    assert form("me", weights=[1, 1]) == me([1, 1])
    assert form("bild", p=0.4) == r2r(0.4)
    assert form("glimp", p=0.4, q=0.2) == rstitch(0.4, 0.2)


def test_every_router_has_its_form_under_its_own_name() -> None:
    """But for markov, whose parameters are the matrices."""
    assert set(ALGORITHMS) == set(routers.ALGORITHMS) - {"markov"}


@pytest.mark.parametrize(
    ("algorithm", "rates", "says"),
    [
        ("r3r", {"p": 0.1}, "algorithm: 'r3r' must be one of bild, citer,"),
        ("r2r", {}, "p: not given; r2r needs p"),
        ("rstitch", {"p": 0.1}, "q: not given; rstitch needs p and q"),
        ("r2r", {"p": 0.1, "q": 0.2}, "q: 0.2 given, but r2r takes p"),
        ("single", {"p": 0.1}, "p: 0.1 given, but single takes no rate"),
        ("r2r", {"p": 1.1}, "p: 1.1 must be from 0 to 1"),
        ("r2r", {"p": -0.1}, "p: -0.1 must be from 0 to 1"),
        ("r2r", {"p": math.nan}, "p: nan must be from 0 to 1"),
        ("rstitch", {"p": 0.1, "q": 0.0}, "q: 0.0 must be above 0 to 1"),
        ("me", {"weights": [1.0]}, r"weights: \[1.0\] must be one for each model, of 2 or more"),
        ("me", {"weights": [1.0, -1.0]}, "weights: .* must be 0 or more each"),
        ("me", {"weights": [0.0, 1.0]}, "weights: .* the first, of the entry model, above 0"),
        ("me", {"weights": [1.0, math.inf]}, "weights: "),
    ],
)
def test_a_rate_that_is_no_good_is_named(algorithm: str, rates: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        form(algorithm, **rates)
