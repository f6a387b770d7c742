# SPDX-License-Identifier: Apache-2.0
"""B*: the search against full enumeration."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from python_backends.token_router.threshold.controller import Question
from python_backends.token_router.threshold.exact import TooLarge
from python_backends.token_router.threshold.forms import me, r2r, single
from python_backends.token_router.threshold.network import Network
from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.sampled import Walk
from python_backends.token_router.threshold.solve import (
    _count_feasible,
    _grid,
    _with_lower,
    evaluate,
    feasible_thresholds,
    solve,
)
from python_backends.token_router.threshold.worker import answer
from tests.unit.threshold.cases import ME, PAPER, STITCH, profile


def test_feasible_thresholds() -> None:
    assert feasible_thresholds(1, 3) == [(1,), (2,), (3,)]
    assert feasible_thresholds(2, 2) == [(1, 1), (1, 2), (2, 1)]
    for models, live in ((2, 9), (3, 5)):
        found = feasible_thresholds(models, live)
        assert len(set(found)) == len(found)
        assert all(sum(b) - models < live and min(b) >= 1 and max(b) <= live for b in found)
    assert len(feasible_thresholds(3, 16)) == 816  # C(18, 3)


@pytest.mark.parametrize(
    ("case", "live"),
    [
        (PAPER, 6),
        (PAPER, 9),
        (STITCH, 7),
        (profile(r2r(0.5), 2.0, 12.0), 8),
        (profile(r2r(0.1), 6.0, 27.9), 8),
        (ME, 5),
    ],
)
def test_the_search_finds_what_enumeration_does(case: Profile, live: int) -> None:
    every = solve(case, live, method="exact")
    found = solve(case, live, method="sampled")
    assert found.steady.method == "sampled"
    assert set(found.throughput) == set(every.throughput)
    assert every.throughput[found.best].throughput >= 0.995 * every.steady.throughput
    assert every.throughput[found.best].throughput == pytest.approx(found.steady.throughput, abs=4 * found.steady.error)


def test_where_only_the_last_few_can_be_had_exactly_they_are() -> None:
    found = solve(PAPER, 16)
    assert found.steady.method == "exact"
    assert {e.method for e in found.throughput.values()} == {"exact", "sampled"}
    assert len(found.throughput) == len(feasible_thresholds(2, 16))
    assert found.steady.throughput >= 0.998 * evaluate(PAPER, 16, (2, 10)).throughput


def test_a_coarse_grid_is_refined_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("python_backends.token_router.threshold.solve._MOST_CANDIDATES", 20)
    best = solve(PAPER, 10, method="exact", candidates=feasible_thresholds(2, 10)).steady.throughput
    found = solve(PAPER, 10, method="sampled")
    assert len(found.throughput) < len(feasible_thresholds(2, 10))
    assert found.steady.throughput > 0.99 * best


def test_exact_solves_every_b_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("python_backends.token_router.threshold.solve._MOST_CANDIDATES", 20)
    every = feasible_thresholds(2, 10)
    found = solve(PAPER, 10, method="exact")
    assert set(found.throughput) == set(every)


@pytest.mark.parametrize(("models", "live"), [(1, 7), (2, 9), (3, 6), (5, 4)])
def test_the_grid_counts_what_it_would_enumerate(models: int, live: int) -> None:
    assert _count_feasible(live, range(1, live + 1), models) == len(feasible_thresholds(models, live))
    some = [b for b in feasible_thresholds(models, live) if set(b) <= {1, 3}]
    assert _count_feasible(live, [1, 3], models) == len(some)


def test_a_grid_of_very_many_b_is_coarse() -> None:
    """Three models and 1024 requests have 180 million B, too many to write down."""
    grid = _grid(3, 1024)
    assert grid[0] == 1 and grid == sorted(set(grid))
    assert 100 < _count_feasible(1024, grid, 3) <= 4096


@pytest.mark.parametrize(
    ("case", "live", "best", "throughput", "within_s"),
    [(PAPER, 64, (6, 38), 3113.0, 4.0), (STITCH, 64, (8, 1), 3963.0, 6.0), (ME, 16, (1, 2, 3), 1068.2, 10.0)],
)
def test_64_requests_and_three_models_are_soon_solved(
    case: Profile, live: int, best: tuple[int, ...], throughput: float, within_s: float
) -> None:
    """About a second of CPU for two models, under ten for three; with room for a slow machine."""
    began_s = time.process_time()
    found = solve(case, live)
    took_s = time.process_time() - began_s
    assert found.best == best
    assert found.steady.throughput == pytest.approx(throughput, rel=0.002)
    assert took_s < within_s


def test_short_steps_have_a_grid_that_is_fine_enough() -> None:
    short = profile(r2r(0.35), 0.14, 0.9)
    found = solve(short, 4)
    assert (found.best, found.steady.delta_ms) == ((1, 3), 0.02)
    assert found.steady.throughput == pytest.approx(solve(short, 4, delta_ms=0.001).steady.throughput)
    assert evaluate(short, 4, (1, 3)).throughput == pytest.approx(found.steady.throughput)
    assert evaluate(short, 4, (1, 3), method="sampled").rounding < 0.005
    coarse = solve(short, 4, delta_ms=0.1)
    assert (coarse.best, coarse.steady.delta_ms) == ((1, 4), 0.1)
    assert coarse.steady.rounding == pytest.approx(0.04 / 0.14)


def test_the_controllers_answer_has_that_grid_too() -> None:
    found = answer(Question(4, profile(r2r(0.35), 0.14, 0.9), (1, 1)))
    assert (found.best, found.throughput[1, 3]) == ((1, 3), pytest.approx(7204.0, abs=0.1))


def test_of_equal_b_the_smallest_wins() -> None:
    solution = solve(profile(single(), 8.0), 5)
    assert solution.best == (1,)
    assert len({round(e.throughput, 6) for e in solution.throughput.values()}) == 1
    assert solve(profile(single(), 8.0), 5, candidates=[[5], [2], [4]]).best == (2,)


def test_the_best_is_of_the_candidates_given() -> None:
    assert solve(PAPER, 4, candidates=[[1, 1], [2, 2]]).best == (2, 2)
    sampled = solve(PAPER, 4, candidates=[[2, 1], [2, 2]], method="sampled")
    assert (sampled.best, set(sampled.throughput)) == ((2, 2), {(2, 1), (2, 2)})


def test_the_finalists_are_joined_by_the_best_ones_lowered_variants() -> None:
    walk = Walk(Network.of(PAPER, 6, 0.1), [(2, 3), (4, 1)], 64, 0)
    walk.walk(100, rates_only=True)
    assert _with_lower(walk).thresholds == ((2, 3), (4, 1), (1, 1), (1, 3), (2, 1))


def test_the_same_seed_gives_the_same_solution() -> None:
    assert solve(STITCH, 6, method="sampled", seed=5) == solve(STITCH, 6, method="sampled", seed=5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"live": 0}, "live: 0 must be 1 or more"),
        ({"live": 2, "method": "guess"}, "method: 'guess' must be one of auto, exact, sampled"),
        ({"live": 2, "delta_ms": 0.0}, "delta_ms: 0.0 must be more than 0"),
        ({"live": 2, "delta_ms": 1e-15}, "delta_ms: 1e-15 is too fine a grid for a step of 27.9 ms"),
        ({"live": 2, "candidates": []}, "candidates: must be one B or more"),
        ({"live": 2, "candidates": [(2, 2)]}, r"thresholds: \[2, 2\] must be from 1 to N = 2 each"),
    ],
)
def test_an_argument_that_is_no_good_is_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        solve(PAPER, **options)  # type: ignore[arg-type]


def test_too_many_models_are_refused() -> None:
    nine = profile(me([1.0] * 9), *[1.0] * 9)
    with pytest.raises(ValueError, match="models: 9 of them; the Markov model takes at most 8"):
        solve(nine, 2)


def test_exact_where_hopeless_says_so() -> None:
    with pytest.raises(TooLarge):
        solve(PAPER.model_copy(update={"run_lengths": [[0.02] * 50, None]}), 16, method="exact")


def test_a_controller_that_imports_it_gets_no_torch() -> None:
    code = (
        "import sys; import python_backends.token_router.threshold.solve;"
        " heavy = {'torch', 'transformers', 'matplotlib', 'rich', 'tritonclient'};"
        " print({m.split('.')[0] for m in sys.modules} & heavy)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
