# SPDX-License-Identifier: Apache-2.0
"""The sampled chain against the exact one."""

from __future__ import annotations

import numpy as np
import pytest

from python_backends.token_router.threshold.exact import solve_exact
from python_backends.token_router.threshold.forms import r2r
from python_backends.token_router.threshold.network import Network
from python_backends.token_router.threshold.profile import Profile, StepLatency
from python_backends.token_router.threshold.sampled import Walk
from python_backends.token_router.threshold.solve import evaluate
from tests.unit.threshold.cases import ME, PAPER, STITCH, profile

GROWING = profile(
    r2r(0.5), StepLatency(batch_ms={1: 2.0, 4: 3.0}), StepLatency(batch_ms={1: 12.0, 4: 14.0}, token_ms=0.3)
)
PHASES = PAPER.model_copy(update={"run_lengths": [[0.3, 0.1, 0.6], None]})
SLOWED = PAPER.model_copy(update={"slowdown": [[1.0, 1.4], [1.2, 1.0]]})


def walked(case: Profile, live: int, thresholds: list[tuple[int, ...]], seed: int = 0) -> Walk:
    walk = Walk(Network.of(case, live, 0.1), thresholds, 512, seed)
    walk.warm_up(100)
    walk.stagger(128)
    walk.walk(300)
    return walk


@pytest.mark.parametrize(
    ("case", "live", "thresholds"),
    [
        (PAPER, 4, [(1, 1), (1, 3), (2, 2)]),
        (PAPER, 8, [(1, 1), (1, 5), (4, 4)]),
        (STITCH, 6, [(1, 1), (2, 3)]),
        (ME, 4, [(1, 1, 1), (2, 1, 2)]),
        (GROWING, 6, [(1, 1), (1, 4)]),
        (PHASES, 4, [(1, 1), (1, 3)]),
        (SLOWED, 4, [(1, 1), (2, 3)]),
    ],
)
def test_it_finds_what_the_exact_chain_says_within_its_error(
    case: Profile, live: int, thresholds: list[tuple[int, ...]]
) -> None:
    walk = walked(case, live, thresholds)
    exact = solve_exact(walk._net, thresholds, 10_000_000)
    for i, expected in enumerate(exact):
        found = walk.steady(i)
        assert found.method == "sampled"
        assert 0 < found.error < 0.003 * found.throughput
        assert abs(found.throughput - expected.throughput) < 4 * found.error
        assert found.batch == pytest.approx(expected.batch, rel=0.02)
        assert found.utilisation == pytest.approx(expected.utilisation, abs=0.01)
        assert found.delay_ms == pytest.approx(expected.delay_ms, rel=0.05, abs=0.1)
        assert found.steps_s == pytest.approx(expected.steps_s, rel=0.02)


def test_the_error_is_that_of_repeated_walks() -> None:
    found = [walked(PAPER, 4, [(1, 2)], seed).steady(0) for seed in range(12)]
    spread = np.std([s.throughput for s in found], ddof=1)
    assert 0.5 < spread / np.mean([s.error for s in found]) < 2


def test_lanes_in_step_are_set_apart() -> None:
    """With many requests two models go through the same phases again and again, and lanes begun alike would
    agree with each other on a wrong mean."""
    walk = Walk(Network.of(STITCH, 48, 0.1), [(1, 4)], 512, 0)
    walk.warm_up(40)
    walk.stagger(128)
    walk.walk(60)
    (rate,), (error,) = walk.throughput()
    long = Walk(walk._net, [(1, 4)], 256, 1)
    long.stagger(1024)
    long.walk(2000)
    assert abs(rate - long.throughput()[0][0]) < 5 * error


def test_the_same_seed_walks_the_same_way() -> None:
    a, b, other = (walked(STITCH, 4, [(1, 2)], seed).steady(0) for seed in (3, 3, 4))
    assert a == b
    assert a.throughput != other.throughput


def test_without_room_for_tables_numpy_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("python_backends.token_router.threshold.sampled._TABLE_BYTES", 0)
    walk = walked(ME, 4, [(1, 1, 1)])
    (exact,) = solve_exact(walk._net, [(1, 1, 1)], 10_000_000)
    found = walk.steady(0)
    assert abs(found.throughput - exact.throughput) < 4 * found.error


def test_a_chain_too_large_is_sampled() -> None:
    steady = evaluate(ME, 24, (1, 2, 3))
    assert steady.method == "sampled"
    assert 0 < steady.error < 0.002 * steady.throughput
