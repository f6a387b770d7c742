# SPDX-License-Identifier: Apache-2.0
"""Profiles as classes: phases of run lengths, suffixes, the grid."""

from __future__ import annotations

import math

import numpy as np
import pytest

from python_backends.token_router.threshold.forms import r2r
from python_backends.token_router.threshold.network import Network, check_thresholds, fit_phases
from python_backends.token_router.threshold.profile import StepLatency
from tests.unit.threshold.cases import ME, PAPER, STITCH, profile


def geometric(leave: float, longest: int) -> list[float]:
    pmf = leave * (1 - leave) ** np.arange(longest)
    return list(pmf / pmf.sum())


def length_distribution(hazards: tuple[float, ...], longest: int) -> list[float]:
    """Of a run whose n-th step is the last with probability hazards[n - 1], and then always as the last one."""
    pmf, reaches = [], 1.0
    for n in range(longest):
        hazard = hazards[min(n, len(hazards) - 1)]
        pmf.append(reaches * hazard)
        reaches *= 1 - hazard
    return pmf


def test_a_geometric_run_length_is_one_phase() -> None:
    phases = fit_phases(geometric(0.35, 60))
    assert phases.hazards == pytest.approx((0.35,), abs=1e-9)
    assert phases.distance < 1e-9


@pytest.mark.parametrize("lengths", [[0, 0, 1], [0.1, 0.5, 0.1, 0.3], [0.2, 0, 0, 0, 0.8], [1]])
def test_a_short_run_length_is_exact(lengths: list[float]) -> None:
    phases = fit_phases(lengths)
    assert length_distribution(phases.hazards, len(lengths)) == pytest.approx(lengths)
    assert phases.distance == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_however_few_the_phases_the_mean_is_kept_and_the_distance_told(most: int) -> None:
    lengths = [0.4, 0.05, 0.2, 0, 0.1, 0.05, 0, 0.1, 0.05, 0.05]
    phases = fit_phases(lengths, tolerance=0, most=most)
    fitted = np.array(length_distribution(phases.hazards, 2000))
    assert len(phases.hazards) == most
    assert fitted @ np.arange(1, 2001) == pytest.approx(np.array(lengths) @ np.arange(1, 11))
    assert phases.distance == pytest.approx(np.abs(fitted - np.pad(lengths, (0, 1990))).sum() / 2, abs=1e-9)


def test_phases_leave_as_the_model_does_and_commit_the_same_tokens() -> None:
    lengths = [0.2, 0.5, 0.3]
    net = Network.of(PAPER.model_copy(update={"run_lengths": [lengths, None]}), 4, 0.1)
    mean = 0.2 + 1.0 + 0.9
    same_mean = Network.of(profile(r2r(1 / mean), 6.0, 27.9), 4, 0.1)
    assert list(net.model_of) == [0, 0, 0, 1]
    assert net.routing.sum(axis=1) == pytest.approx(1)
    assert visits(net) == pytest.approx(visits(same_mean))
    assert tokens(net) == pytest.approx(tokens(same_mean))


def visits(net: Network) -> list[float]:
    power = np.linalg.matrix_power((net.routing + np.eye(net.classes)) / 2, 4096)[0]
    return [float(power[of].sum()) for of in net.of_model]


def tokens(net: Network) -> float:
    return float(np.linalg.matrix_power((net.routing + np.eye(net.classes)) / 2, 4096)[0] @ net.tokens)


def test_the_mean_suffix() -> None:
    """The LLM of r2r is fed 1/p tokens a step, its SLM one; each model of an ensemble 1/lambda."""
    step = StepLatency(batch_ms={1: 5.0}, token_ms=1.0)
    r2r_extra = Network.of(profile(r2r(0.2), step, step), 2, 0.1).extra_ms
    assert r2r_extra == pytest.approx([0, 4], abs=1e-9)
    me_extra = Network.of(ME.model_copy(update={"latency": [step] * 3}), 2, 0.1).extra_ms
    assert me_extra == pytest.approx([1 / 0.5 - 1, 1 / 0.3 - 1, 1 / 0.2 - 1])


def test_with_phases_only_those_who_come_from_elsewhere_bring_more_than_a_token() -> None:
    step = StepLatency(batch_ms={1: 5.0}, token_ms=1.0)
    two_steps = STITCH.model_copy(update={"latency": [step, step], "run_lengths": [None, [0, 1]]})
    extra = Network.of(two_steps, 2, 0.1).extra_ms
    # Since its last step there, the SLM's run (its last token dropped) and the LLM's own last token.
    run_of_slm = 1 / 0.3 - 1
    assert extra[1:] == pytest.approx([run_of_slm, 0])


def test_steps_are_rounded_to_the_grid_and_never_take_no_time() -> None:
    net = Network.of(profile(r2r(0.5), StepLatency(batch_ms={1: 1.04, 3: 2.0}), 0.01), 4, 0.1)
    batch = np.array([1, 2, 3, 4])
    assert list(net.duration(0, batch, batch[None])) == [10, 15, 20, 20]
    assert list(net.duration(1, batch, batch[None])) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("steps", "delta_ms"),
    [
        ((6.0, 27.9), 0.1),  # the paper's
        ((2.0, 12.0), 0.1),
        ((2.5, 12.44), 0.1),  # 12.4: 0.3 %
        ((6.04, 27.9), 0.05),
        ((2.03, 11.97), 0.02),
        ((0.14, 0.9), 0.02),
        ((0.2, 90.0), 0.1),
        ((0.213, 90.04), 0.002),
        ((StepLatency(batch_ms={1: 6.0, 2: 6.06}), 27.9), 0.05),
    ],
)
def test_the_grid_is_as_fine_as_the_step_times_need(steps: tuple[StepLatency | float, ...], delta_ms: float) -> None:
    net = Network.of(profile(r2r(0.35), *steps), 4)
    assert net.delta_ms == delta_ms
    assert net.rounding <= 0.005


def test_the_grid_follows_what_suffixes_add() -> None:
    step = StepLatency(batch_ms={1: 2.0}, token_ms=0.15)
    assert Network.of(profile(r2r(0.35), 2.0, 12.0), 1).delta_ms == 0.1
    one = Network.of(STITCH.model_copy(update={"latency": [step, StepLatency.constant(12.0)]}), 1)
    assert one.extra_ms[0] == pytest.approx(0.03)
    assert one.delta_ms == 0.02
    assert one.rounding == pytest.approx(0.01 / 2.03)
    # Two phases bring suffixes of different lengths: any step time may be off by half of the grid.
    two = PAPER.model_copy(update={"latency": [StepLatency.constant(6.0), step], "run_lengths": [None, [0, 1]]})
    assert Network.of(two, 4).delta_ms == 0.02
    assert Network.of(two, 4).rounding == pytest.approx(0.005)


def test_a_grid_that_is_given_stays_and_what_it_rounds_is_known() -> None:
    net = Network.of(profile(r2r(0.35), 2.5, 12.44), 4, 2.0)
    assert net.delta_ms == 2.0
    assert net.rounding == pytest.approx(0.2)


def test_a_long_step_bounds_how_fine_the_grid_is() -> None:
    net = Network.of(profile(r2r(0.35), 1.5e-6, 1e6), 4)
    assert net.delta_ms == 1e-6
    assert net.rounding == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("thresholds", "live", "says"),
    [
        ((1,), 4, r"thresholds: \[1\] has 1 numbers; must be one for each of 2 models"),
        ((3, 3), 4, r"thresholds: \[3, 3\] must be from 1 to N = 4 each, and the sum of \(B - 1\) less than N"),
        ((0, 1), 4, "must be from 1 to N"),
        ((1, 5), 4, "must be from 1 to N"),
        ((1, 1), 0, "live: 0 must be 1 or more"),
    ],
)
def test_thresholds_that_could_wait_for_ever_are_refused(thresholds: tuple[int, ...], live: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_thresholds(thresholds, 2, live)


@pytest.mark.parametrize("delta_ms", [0, -1, math.inf, math.nan])
def test_a_grid_that_is_none_is_refused(delta_ms: float) -> None:
    with pytest.raises(ValueError, match=r"delta_ms: .* must be more than 0"):
        Network.of(PAPER, 4, delta_ms)
