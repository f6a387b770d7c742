# SPDX-License-Identifier: Apache-2.0
"""What the estimator makes of traffic that is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backends.token_router.threshold.controller import Answer, Question, ThresholdController
from python_backends.token_router.threshold.network import fit_phases
from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.routing_rates import RoutingRow, RunLengths, length_distribution
from python_backends.token_router.threshold.step_times import StepTimes
from python_backends.token_router.threshold.traffic import Traffic


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def mean_of(lengths: Sequence[float]) -> float:
    return sum(n * x for n, x in enumerate(lengths, 1))


class World:
    """Requests that walk between two models by P = [[1 - p, p], [1, 0]], one step after the other."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.traffic = Traffic(["slm", "llm"], self.clock)

    def call(self, model: int, ms: float, sessions: int = 1, more_tokens: int = 0, prefilled: bool = False) -> None:
        self.traffic.launched(model)
        self.clock.now += ms / 1000
        self.traffic.called(model, sessions, more_tokens, ms, 1, prefilled)

    def walk(self, p: float, outcomes: int) -> None:
        for _ in range(outcomes):
            self.call(0, 6.0)
            if self.rng.random() < p:
                self.traffic.left(0, 7, 1, 0)
                self.call(1, 27.9)
                self.traffic.left(1, 7, 0, 1)
            else:
                self.traffic.stayed(0, 7)

    def profile(self) -> Profile:
        profile = self.traffic.profile(8)
        assert profile is not None
        return profile


def test_the_matrices_and_the_latencies_are_found() -> None:
    world = World()
    world.walk(0.35, 4000)
    profile = world.profile()
    assert profile.p[0] == pytest.approx([0.65, 0.35], abs=0.04)
    assert profile.p[1] == [1.0, 0.0]
    assert profile.c == [[1.0, 0.0], [1.0, 0.0]]
    assert [latency.ms(1) for latency in profile.latency] == pytest.approx([6.0, 27.9])
    assert profile.run_lengths is None  # geometric, which the paper's case needs no distribution for
    assert profile.slowdown is None


def test_a_change_is_seen_within_a_few_hundred_outcomes() -> None:
    world = World()
    world.walk(0.1, 3000)
    assert world.profile().p[0][1] == pytest.approx(0.1, abs=0.03)
    world.walk(0.5, 300)
    assert world.profile().p[0][1] == pytest.approx(0.5, abs=0.08)


def test_reading_changes_nothing_in_what_is_decided() -> None:
    """Two that see the same traffic, with a change in it, and decide at the same moments; one is read 1000 times."""
    asked: list[list[Question | None]] = []
    for read in (False, True):
        world, controller = World(), ThresholdController(2)
        controller.at(4)
        asked.append([])
        for n in range(1000):
            world.walk(0.1 if n < 500 else 0.5, 3)
            if read:
                world.traffic.profile(8)
            if n % 100 == 99:
                profile = world.traffic.profile(8)
                question = None if profile is None else controller.question(profile)
                asked[-1].append(question)
                if question is not None:
                    controller.answered(question, Answer((1, 1), {(1, 1): 1.0}))
    assert asked[0] == asked[1]
    assert sum(question is not None for question in asked[0]) > 1  # the change was noticed


def test_chance_is_not_taken_for_a_change() -> None:
    rng, row = random.Random(1), RoutingRow(2)
    assert sum(row.observe(int(rng.random() < 0.2), 1) for _ in range(30_000)) <= 1
    assert sum(row.observe(int(rng.random() < 0.5), 1) for _ in range(300)) >= 1


def bursts(seed: int, outcomes: int) -> list[int]:
    """Outcomes at the small model, as uneven as those recorded of `r2r` on HumanEval: in stretches of 60 and of 300
    outcomes the number of those that leave has about six times the variance of independent ones (there 5.4 and 6.2)."""
    rng, made = random.Random(seed), []
    while len(made) < outcomes:
        p = min(0.9, rng.gammavariate(0.8, 0.065 / 0.8))
        made += [int(rng.random() < p) for _ in range(rng.randrange(40, 110))]
    return made[:outcomes]


def test_bursts_are_not_taken_for_changes() -> None:
    """A memory that begins anew with each of them believes in too many."""
    changes, believed = 0, []
    for seed in range(8):
        row, made = RoutingRow(2), bursts(seed, 10_000)
        readings = []
        for to in made:
            changes += row.observe(to, 1)
            readings.append(row.p()[1])
        believed.append(sum(readings[100:]) / len(readings[100:]) / (sum(made) / len(made)))
    assert changes <= 8  # of 80,000 outcomes
    assert sum(believed) / len(believed) == pytest.approx(1.0, abs=0.05)


def test_a_change_is_followed_after_bursts() -> None:
    rng = random.Random(1)
    for seed in range(8):
        row = RoutingRow(2)
        for to in bursts(seed, 3000):
            row.observe(to, 1)
        for _ in range(400):
            row.observe(int(rng.random() < 0.5), 1)
        assert row.p()[1] == pytest.approx(0.5, abs=0.1)


def test_nothing_is_said_before_every_model_has_been_seen() -> None:
    world = World()
    world.walk(0.0, 500)
    assert world.traffic.profile(8) is None
    world.walk(1.0, 10)
    assert world.traffic.profile(8) is None
    world.walk(0.5, 200)
    assert world.traffic.profile(8) is not None


def test_tokens_are_counted_by_the_way_they_took() -> None:
    world = World()
    for n in range(600):
        world.call(0, 6.0)
        world.traffic.left(0, 7, 1, 2 if n % 2 else 0)
        world.call(1, 27.9)
        world.traffic.left(1, 7, 0, 3)
    profile = world.profile()
    assert profile.c[0][1] == pytest.approx(1.0, abs=0.01)
    assert profile.c[1][0] == 3.0
    assert world.traffic.counts()["tokens"] == [[0, 600], [1800, 0]]


def test_a_run_ahead_counts_as_its_steps() -> None:
    world = World()
    for _ in range(300):
        world.traffic.launched(0)
        world.clock.now += 0.024
        world.traffic.called(0, 4, 8, 24.0, 4, False)  # one session, four steps
        world.traffic.stayed(0, 7, 3)
        world.traffic.left(0, 7, 1, 0)
        world.call(1, 27.9)
        world.traffic.left(1, 7, 0, 1)
    profile = world.profile()
    assert profile.p[0][1] == pytest.approx(0.25, abs=0.01)
    assert profile.latency[0].ms(1) == pytest.approx(6.0)
    assert profile.run_lengths is not None
    assert profile.run_lengths[0] is not None
    assert profile.run_lengths[0][3] > 0.9  # every run has four steps
    assert world.traffic.counts()["steps"][0] == 1200


def test_a_prefill_says_nothing_of_step_times() -> None:
    world = World()
    world.walk(0.5, 300)
    for _ in range(100):
        world.call(0, 900.0, more_tokens=500, prefilled=True)
    latency = world.profile().latency[0]
    assert latency.ms(1) == pytest.approx(6.0)
    assert latency.token_ms == 0


def test_a_call_of_which_nothing_is_learnt_was_busy_until_it_was_over() -> None:
    """Half a second in which the other model is idle, but for a call that failed or was empty, at its begin."""
    world = World()
    slow = random.Random(0)
    for n in range(400):
        world.traffic.launched(0)
        world.clock.now += 0.001
        world.traffic.over(0)
        beside = n % 2
        if beside:
            world.traffic.launched(0)
        world.call(1, (40.0 if beside else 20.0) + slow.random())
        if beside:
            world.traffic.called(0, 1, 0, 6.0, 1, False)
        world.traffic.left(0, 7, 1, 0)
        world.traffic.left(1, 7, 0, 1)
    slowdown = world.profile().slowdown
    assert slowdown is not None and slowdown[1][0] == pytest.approx(2.0, abs=0.05)
    assert world.profile().latency[1].ms(1) == pytest.approx(20.5, abs=0.3)


def test_a_request_that_ends_takes_its_run_with_it() -> None:
    world = World()
    for _ in range(300):
        for _ in range(2):
            world.call(0, 6.0)
            world.traffic.stayed(0, 7)
            world.traffic.finished(7)
        world.traffic.stayed(0, 7)  # as if the number were given again
        world.traffic.left(0, 7, 1, 0)
        world.call(1, 27.9)
        world.traffic.left(1, 7, 0, 1)
    lengths = world.profile().run_lengths
    assert lengths is not None
    assert lengths[0] is not None
    assert lengths[0][0] < 0.02  # nobody leaves at the first step,
    assert lengths[0][1] > 0.3  # many do at the second
    assert mean_of(lengths[0]) == pytest.approx(4, abs=0.02)  # and there are four steps for each who does


def test_runs_cut_off_by_a_requests_end_do_not_look_short() -> None:
    rng, runs = random.Random(0), RunLengths()
    steps = left = 0
    for _ in range(3000):
        ends_at = rng.randrange(1, 15)  # the request's end
        for step in range(1, ends_at + 1):
            runs.observe(step, left=step == 10)
            steps, left = steps + 1, left + (step == 10)
            if step == 10:
                break
    uncut, as_cut = runs.distribution(10), runs.distribution(steps / left)
    assert uncut is not None and as_cut is not None
    assert sum(uncut[:9]) < 0.1 and sum(as_cut[:9]) < 0.1
    assert uncut[9] > 0.85
    assert mean_of(as_cut) == pytest.approx(steps / left)


def runs_with(rate: Callable[[int], float], runs: int = 1500) -> RunLengths:
    """What is learnt of so many runs that end at their n-th step with probability rate(n)."""
    rng, seen = random.Random(1), RunLengths()
    for _ in range(runs):
        step = 1
        while rng.random() >= rate(step):
            seen.observe(step, left=False)
            step += 1
        seen.observe(step, left=True)
    return seen


def test_long_runs_keep_their_mean_and_take_few_phases() -> None:
    """6 % leave at each of the first two steps, then 1.5 %: runs of 60.8 steps, some of hundreds."""
    lengths = runs_with(lambda n: 0.06 if n <= 2 else 0.015).distribution(60.8)
    assert lengths is not None
    assert mean_of(lengths) == pytest.approx(60.8, rel=1e-6)
    assert lengths[:2] == pytest.approx([0.06, 0.056], abs=0.02)
    phases = fit_phases(lengths)
    assert len(phases.hazards) <= 3
    assert phases.hazards[-1] == pytest.approx(0.015, rel=0.03)


@pytest.mark.parametrize("mean", [1.0, 1.2, 1.5, 3.4, 3.5, 3.7, 8.0])
def test_whatever_the_rates_the_mean_is_the_one_given(mean: float) -> None:
    """Rates of runs of 1 to 6 steps, each as often: a mean of 3.5."""
    lengths = length_distribution([1 / (7 - n) for n in range(1, 6)], mean)
    assert lengths is not None
    assert mean_of(lengths) == pytest.approx(mean, rel=1e-6)
    assert sum(lengths) == pytest.approx(1) and min(lengths) >= 0
    if mean > 3:
        assert lengths[:4] == pytest.approx([1 / 6] * 4)


def test_runs_of_thousands_of_steps_are_left_to_the_paper() -> None:
    runs = runs_with(lambda n: 0.5 if n == 1 else 0.02)
    assert runs.distribution(25) is not None
    assert runs.distribution(1e6) is None


def test_the_profiles_run_lengths_have_the_mean_of_its_matrix() -> None:
    world = World()
    for n in range(600):
        for _ in range(1 if n % 2 else 80):
            world.call(0, 6.0)
            world.traffic.stayed(0, 7)
        world.traffic.left(0, 7, 1, 0)
        world.call(1, 27.9)
        world.traffic.left(1, 7, 0, 1)
    profile = world.profile()
    assert profile.run_lengths is not None and profile.run_lengths[0] is not None
    assert mean_of(profile.run_lengths[0]) == pytest.approx(1 / profile.p[0][1], rel=1e-6)


def test_geometric_runs_are_left_to_the_paper() -> None:
    rng, runs = random.Random(3), RunLengths()
    for _ in range(3000):
        step = 1
        while rng.random() > 0.3:
            runs.observe(step, left=False)
            step += 1
        runs.observe(step, left=True)
    assert runs.distribution(1 / 0.3) is None


def test_step_times_are_told_apart() -> None:
    """By the batch, the suffix and who else is busy: 5 + b ms alone, 0.2 ms a token, 1.5 times beside the other."""
    rng, times = random.Random(0), StepTimes(1)
    for _ in range(2000):
        sessions, more, busy = rng.choice([1, 2, 4, 8]), rng.randrange(12), rng.random()
        ms = (5 + sessions) * (1 + 0.5 * busy) + 0.2 * more + rng.gauss(0, 0.1)
        times.observe(sessions, more, ms, [busy])
    fit = times.fit(8)
    assert fit is not None
    assert [fit.latency.batch_ms[b] for b in (1, 2, 4, 8)] == pytest.approx([6, 7, 9, 13], rel=0.02)
    assert fit.latency.token_ms == pytest.approx(0.2, rel=0.1)
    assert fit.slowdown[0] == pytest.approx(1.5, abs=0.03)


def test_noise_makes_no_slope_and_no_slowdown() -> None:
    rng, times = random.Random(0), StepTimes(2)
    for _ in range(1000):
        times.observe(rng.randrange(1, 5), rng.randrange(5), 6 + rng.gauss(0, 0.3), [rng.random(), rng.random()])
    fit = times.fit(16)
    assert fit is not None
    assert fit.latency.token_ms == 0
    assert fit.slowdown == (1, 1)
    assert fit.latency.ms(16) == pytest.approx(6.0, rel=0.05)


def test_a_size_seen_once_is_drawn_to_its_neighbours() -> None:
    times = StepTimes(0)
    for _ in range(200):
        times.observe(1, 0, 10.0, [])
        times.observe(2, 0, 11.0, [])
    times.observe(3, 0, 40.0, [])  # a hiccup
    fit = times.fit(3)
    assert fit is not None
    assert fit.latency.ms(3) < 25


def test_the_table_goes_on_beyond_what_was_seen_but_not_far() -> None:
    times = StepTimes(0)
    for _ in range(50):
        for sessions in (1, 2, 3, 4):
            times.observe(sessions, 0, 10.0 + 2 * sessions, [])
    fit = times.fit(64)
    assert fit is not None
    assert fit.latency.ms(8) == pytest.approx(26.0, rel=0.02)
    assert fit.latency.ms(64) == fit.latency.ms(8)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 4), st.integers(0, 40), st.integers(1, 5)),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_passes_the_profile_is_sound_or_none(events: list[tuple[int, int, int, int, int]]) -> None:
    clock = Clock()
    traffic = Traffic(["a", "b", "c"], clock)
    for _ in range(20):
        for model, to, rid, more, steps in events:
            traffic.launched(model)
            clock.now += more / 1000
            traffic.called(model, (rid + 1) * steps, more, float(more), steps, prefilled=False)
            if to == model:
                traffic.stayed(model, rid, steps)
            else:
                traffic.left(model, rid, to, more)
            if more % 7 == 0:
                traffic.finished(rid)
        profile = traffic.profile(8)  # its own checks raise
        assert profile is None or all(latency.ms(8) > 0 for latency in profile.latency)
