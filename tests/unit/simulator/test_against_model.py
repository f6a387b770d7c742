# SPDX-License-Identifier: Apache-2.0
"""The simulator and the Markov model say the same, on a few points of `perf/validate_threshold.py`'s grid.

The seed is fixed; the bar of 1 % is more than four standard errors of each simulation.
"""

from __future__ import annotations

from typing import Any

import pytest

from python_backends.token_router.threshold.forms import me, r2r, rstitch
from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.solve import evaluate
from tests.unit.simulator.profiles import run
from tools.simulator.results import SimulationResult

BAR = 0.01
SESSION_STEPS = 100_000


def profile(form: Any, *latency_ms: float, **more: Any) -> Profile:
    names = [f"m{i}" for i in range(len(form.p))]
    latency = [{"batch_ms": {1: ms}} for ms in latency_ms]
    return Profile.model_validate({"models": names, "p": form.p, "c": form.c, "latency": latency} | more)


PAPER = profile(r2r(0.35), 6.0, 27.9)


def simulated(case: Profile, live: int, threshold: list[int], session_steps_s: float) -> SimulationResult:
    duration = SESSION_STEPS / session_steps_s
    return run(case, {"threshold": threshold}, concurrency=live, warm_up_s=0.02 * duration, duration_s=duration, seed=3)


@pytest.mark.parametrize(
    ("case", "live", "threshold"),
    [
        (PAPER, 1, [1, 1]),
        (PAPER, 2, [1, 2]),
        (PAPER, 4, [1, 1]),
        (PAPER, 4, [1, 3]),
        (PAPER, 8, [2, 5]),
        (profile(r2r(0.1), 2.0, 12.0), 8, [1, 2]),
        (profile(r2r(0.6), 10.0, 10.0), 3, [1, 2]),
        (profile(rstitch(0.2, 0.3), 6.0, 27.9), 4, [1, 2]),
        (profile(rstitch(0.5, 0.1), 2.0, 12.0), 6, [2, 3]),
        (profile(me([0.5, 0.3, 0.2]), 6.0, 12.0, 27.9), 4, [1, 1, 2]),
        (profile(me([1, 1, 1]), 5.0, 10.0, 10.0), 3, [1, 2, 2]),
        (profile(r2r(0.35), 6.0, 27.9, run_lengths=[[0.5, 0, 0, 0, 0.5], None]), 4, [1, 2]),
        (profile(r2r(0.35), 6.0, 27.9, latency=[{"batch_ms": {1: 6, 4: 9}}, {"batch_ms": {1: 20, 4: 40}}]), 4, [1, 3]),
    ],
)
def test_throughput_batch_and_utilisation(case: Profile, live: int, threshold: list[int]) -> None:
    model = evaluate(case, live, threshold)
    result = simulated(case, live, threshold, sum(b * s for b, s in zip(model.batch, model.steps_s, strict=True)))
    assert result.half_width / 2 < BAR / 4 * result.throughput
    assert result.throughput == pytest.approx(model.throughput, rel=BAR)
    # Of these the luck of the draws is not taken off.
    assert [m.mean_batch for m in result.models] == pytest.approx(model.batch, rel=3 * BAR)
    assert [m.admission_delay_ms for m in result.models] == pytest.approx(model.delay_ms, rel=5 * BAR, abs=0.1)
    assert [m.utilisation for m in result.models] == pytest.approx(model.utilisation, abs=2 * BAR)


@pytest.mark.parametrize(
    ("live", "best", "theory"),
    [(2, 2, [99.0, 110.3]), (3, 2, [142.3, 158.1, 151.9]), (4, 3, [187.2, 195.4, 207.9, 190.7])],
)
def test_figure_10(live: int, best: int, theory: list[float]) -> None:
    """The paper's nine theoretical values, simulated, and its B*."""
    found = [simulated(PAPER, live, [1, b], 1.5 * t).throughput for b, t in enumerate(theory, 1)]
    assert found == pytest.approx(theory, rel=BAR / 2)
    assert found.index(max(found)) + 1 == best
