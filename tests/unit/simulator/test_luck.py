# SPDX-License-Identifier: Apache-2.0
"""Batch means, with what the draws explain taken off."""

from __future__ import annotations

import random
import statistics

import pytest

from python_backends.token_router.threshold.profile import Profile, StepLatency
from tests.unit.simulator.profiles import r2r, run
from tools.simulator.luck import Luck, estimate
from tools.simulator.routing import Routing


def test_without_luck_it_is_the_mean_and_students_interval() -> None:
    values = [float(x % 7) for x in range(50)]
    mean, half = estimate(values, [[]] * 50)
    assert mean == pytest.approx(statistics.mean(values))
    assert half == pytest.approx(2.0096 * statistics.stdev(values) / 50**0.5, rel=1e-3)


def test_a_constant_luck_explains_nothing() -> None:
    values = [float(x % 7) for x in range(50)]
    assert estimate(values, [[3.0, 0.0]] * 50) == pytest.approx(estimate(values, [[]] * 50))


def test_what_luck_explains_is_taken_off() -> None:
    rng = random.Random(1)
    luck = [[rng.gauss(0, 5), rng.gauss(0, 1)] for _ in range(50)]
    values = [100 + 2 * a - 3 * b for a, b in luck]
    mean, half = estimate(values, luck)
    assert mean == pytest.approx(100)
    assert half == pytest.approx(0, abs=1e-6)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(2)
    covered = 0
    for _ in range(400):
        luck = [[rng.gauss(0, 1)] for _ in range(50)]
        mean, half = estimate([10 + a + rng.gauss(0, 0.5) for (a,) in luck], luck)
        covered += abs(mean - 10) <= half
    assert covered / 400 == pytest.approx(0.95, abs=0.03)


def test_more_kinds_of_luck_than_parts_leave_an_interval_that_covers_the_truth() -> None:
    """With 8 models there are 56 of them and 50 parts; two matter much, the others little."""
    rng = random.Random(3)
    covered, halves = 0, []
    for _ in range(200):
        luck = [[rng.gauss(0, 10 if k < 2 else 1) for k in range(56)] for _ in range(50)]
        mean, half = estimate([100 + x[0] - x[1] + 0.1 * x[7] + rng.gauss(0, 1) for x in luck], luck)
        covered += abs(mean - 100) <= half
        halves.append(half)
    assert covered / 200 == pytest.approx(0.95, abs=0.04)
    assert statistics.mean(halves) < 14 * 2 / 50**0.5 / 3  # of what it is without control variates


def test_eight_models_can_be_simulated() -> None:
    latency = [StepLatency.constant(5.0 + 1.3 * i) for i in range(8)]
    profile = Profile(models=list("abcdefgh"), p=[[1 / 8] * 8] * 8, c=[[1.0] * 8] * 8, latency=latency)
    result = run(profile, concurrency=4, warm_up_s=1.0, duration_s=21.0)
    assert result.throughput == pytest.approx(result.counted, rel=0.02)
    assert 0 < result.half_width < 0.05 * result.throughput


def test_surplus_of_steps_and_of_runs() -> None:
    luck = Luck(Routing([[0.5, 0.3, 0.2], [1, 0, 0], [1, 0, 0]], [[1.0] * 3] * 3, [None] * 3))
    luck.drew(0, 5, 1)
    luck.drew(0, 1, 2)
    luck.drew(1, 1, 0)
    steps, runs = luck.cut()[:3], luck.cut()[3:]
    assert steps == pytest.approx([2 * -2 + 6, 0, 0])
    assert set(runs) == {0}  # cut once already


def test_it_brings_a_run_nearer_to_the_truth() -> None:
    """T(1, 3) = 207.95 (the Markov model); twenty short runs, as counted and as estimated."""
    results = [
        run(r2r(0.35), {"threshold": [1, 3]}, concurrency=4, warm_up_s=1.0, duration_s=21.0, seed=s) for s in range(20)
    ]
    counted = statistics.pstdev(r.counted for r in results)
    estimated = statistics.pstdev(r.throughput for r in results)
    assert estimated < counted / 2
    assert statistics.mean(r.throughput for r in results) == pytest.approx(207.95, rel=0.005)
    assert sum(abs(r.throughput - 207.95) <= r.half_width for r in results) >= 16
