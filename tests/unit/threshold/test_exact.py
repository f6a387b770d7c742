# SPDX-License-Identifier: Apache-2.0
"""The exact chain: the paper's figures, closed forms, and what holds of any chain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backends.token_router.threshold.exact import Chain, TooLarge, solve_exact
from python_backends.token_router.threshold.forms import Form, me, r2r, rstitch, single
from python_backends.token_router.threshold.network import Network
from python_backends.token_router.threshold.profile import Profile, StepLatency
from python_backends.token_router.threshold.solve import evaluate, feasible_thresholds, solve
from python_backends.token_router.threshold.steady import Steady
from tests.unit.threshold.cases import ME, PAPER, STITCH, profile
from tests.unit.threshold.test_network import geometric

ANY = 10_000_000


def exact(case: Profile, live: int, *thresholds: tuple[int, ...], delta_ms: float = 0.1) -> list[Steady]:
    return solve_exact(Network.of(case, live, delta_ms), thresholds, ANY)


@pytest.mark.parametrize(
    ("live", "theory"),
    [(2, [99.0, 110.3]), (3, [142.3, 158.1, 151.9]), (4, [187.2, 195.4, 207.9, 190.7])],
)
def test_figure_10(live: int, theory: list[float]) -> None:
    steady = exact(PAPER, live, *((1, b) for b in range(1, live + 1)))
    assert [s.throughput for s in steady] == pytest.approx(theory, abs=0.2)
    column = solve(PAPER, live, candidates=[(1, b) for b in range(1, live + 1)])
    assert column.best == (1, {2: 2, 3: 2, 4: 3}[live])


def test_of_all_feasible_b_1_3_is_the_best_for_four_requests() -> None:
    solution = solve(PAPER, 4)
    assert solution.best == (1, 3)
    assert solution.steady.throughput == max(e.throughput for e in solution.throughput.values())
    assert len(solution.throughput) == 10


@pytest.mark.parametrize(
    ("p", "best"),
    [(0.05, (1, 1, 1, 1)), (0.1, (1, 1, 2, 2)), (0.2, (1, 2, 3, 3)), (0.35, (2, 3, 4, 5)), (0.5, (2, 3, 5, 6))],
)
def test_the_best_llm_threshold_by_p_and_n(p: float, best: tuple[int, ...]) -> None:
    """The table of algorithms.md, section 1.1; B of the SLM is 1."""
    case = profile(r2r(p), 6.0, 27.9)
    for live, expected in zip((2, 4, 6, 8), best, strict=True):
        assert solve(case, live, candidates=[(1, b) for b in range(1, live + 1)]).best == (1, expected), live


def test_three_models_of_an_ensemble() -> None:
    solution = solve(ME, 4)
    assert solution.best == (1, 1, 1)
    assert solution.steady.throughput == pytest.approx(282, abs=0.5)


def test_one_request_alternates() -> None:
    """The small model's step always, the large one's with probability p: T = 1 / (L0 + p L1)."""
    (steady,) = exact(PAPER, 1, (1, 1))
    assert steady.throughput == pytest.approx(1000 / (6.0 + 0.35 * 27.9))
    assert steady.batch == pytest.approx((1, 1))
    assert steady.delay_ms == (0, 0)
    assert steady.utilisation == pytest.approx((6 / (6 + 0.35 * 27.9), 0.35 * 27.9 / (6 + 0.35 * 27.9)))


def test_one_model_runs_everybody_together() -> None:
    for b in (1, 3, 5):
        (steady,) = exact(profile(single(), 8.0), 5, (b,))
        assert steady.throughput == pytest.approx(5 / 8e-3)
        assert (steady.batch, steady.utilisation, steady.delay_ms) == ((5,), (1,), (0,))


def test_lock_step_when_everybody_goes_everywhere() -> None:
    """p = 1: all go to and fro together, one token each round trip. A periodic chain."""
    (steady,) = exact(profile(r2r(1.0), 6.0, 28.0), 3, (1, 1))
    assert steady.throughput == pytest.approx(3 / 34e-3)
    assert steady.batch == (3, 3)


def test_a_model_that_nobody_visits_does_nothing() -> None:
    (steady,) = exact(profile(r2r(0.0), 6.0, 28.0), 3, (1, 1))
    assert steady.throughput == pytest.approx(3 / 6e-3)
    assert (steady.batch, steady.utilisation, steady.delay_ms, steady.steps_s) == (
        (3, 0),
        (1, 0),
        (0, 0),
        (1000 / 6, 0),
    )


def test_a_chain_that_can_end_in_two_ways_counts_both() -> None:
    """From model 0 a request ends up at model 1 or 2 for ever, with 1/2 each; alone there it makes a token a step."""
    case = profile(Form([[0, 0.5, 0.5], [0, 1, 0], [0, 0, 1]], [[1.0] * 3] * 3), 5.0, 10.0, 20.0)
    (steady,) = exact(case, 1, (1, 1, 1))
    # Tokens over time, where half of the transitions take 10 ms and half 20.
    assert steady.throughput == pytest.approx(1 / (0.5 * 10e-3 + 0.5 * 20e-3))


forms = st.one_of(
    st.floats(0.05, 0.95).map(r2r),
    st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)).map(lambda x: rstitch(*x)),
    st.tuples(st.floats(0.1, 1), st.floats(0.1, 1), st.floats(0.1, 1)).map(me),
)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    form = draw(forms)
    models = len(form.p)
    latency = [
        StepLatency(
            batch_ms={1: draw(st.integers(1, 9)), 3: draw(st.integers(1, 9))},
            token_ms=draw(st.sampled_from([0.0, 0.5])),
        )
        for _ in range(models)
    ]
    case = profile(form, *latency)
    if draw(st.booleans()):
        case = case.model_copy(update={"run_lengths": [[0.25, 0.25, 0.5], *[None] * (models - 1)]})
    if draw(st.booleans()):
        slowdown = [[1.0 if i == j else 1.0 + 0.25 * (i + j) for j in range(models)] for i in range(models)]
        case = case.model_copy(update={"slowdown": slowdown})
    live = draw(st.integers(1, 3))
    some = draw(st.lists(st.sampled_from(feasible_thresholds(models, live)), min_size=1, max_size=2, unique=True))
    return Chain.search(Network.of(case, live, 0.5), some, ANY)


@settings(max_examples=40, deadline=None)
@given(chains())
def test_what_holds_of_any_chain(chain: Chain) -> None:
    net = chain.network
    thresholds = np.array(chain.thresholds)[chain.of]
    assert np.asarray(chain.matrix.sum(axis=1)) == pytest.approx(1)
    assert ((chain.k + chain.b).sum(axis=0) == net.live).all()
    assert (chain.time_ms > 0).all()
    for i, of in enumerate(net.of_model):
        idle, running, waiting = chain.r[i] == 0, chain.b[of].sum(axis=0), chain.k[of].sum(axis=0)
        assert ((running == 0) == idle).all()
        assert (waiting[idle] < thresholds[idle, i]).all()
        assert (running[~idle] >= thresholds[~idle, i]).all()
    assert chain.pi @ chain.matrix == pytest.approx(chain.pi, abs=1e-9)
    for steady in chain.steady():
        weight = chain.pi[chain.of == chain.thresholds.index(steady.thresholds)]
        assert weight.sum() == pytest.approx(1)
        # No request makes more tokens than by the shortest steps of all; what is left of a slowed one is rounded.
        shortest = net.base_ms[:, 1:].min() - (0.25 if net.slows else 0)
        assert steady.throughput <= net.live * net.tokens.max() * 1e3 / shortest * (1 + 1e-9)
        assert all(0 <= x <= 1 + 1e-9 for x in steady.utilisation)


@settings(max_examples=25, deadline=None)
@given(forms, st.integers(1, 4), st.data())
def test_requests_add_up_when_steps_are_constant(form: Form, live: int, data: st.DataObject) -> None:
    b = data.draw(st.sampled_from(feasible_thresholds(len(form.p), live)))
    case = profile(form, *(3.0, 7.0, 11.0)[: len(form.p)])
    (steady,) = exact(case, live, b, delta_ms=1.0)
    steps, batch, delay = (np.array(x) for x in (steady.steps_s, steady.batch, steady.delay_ms))
    busy = steps * np.array([3.0, 7.0, 11.0][: len(form.p)]) / 1e3
    assert busy == pytest.approx(steady.utilisation)
    assert (steps * batch * delay / 1e3 + busy * batch).sum() == pytest.approx(live)
    visits = np.linalg.matrix_power((np.array(form.p) + np.eye(len(form.p))) / 2, 512)[0]
    assert steps * batch / (steps * batch).sum() == pytest.approx(visits, abs=1e-6)
    tokens = (np.array(form.p) * np.array(form.c)).sum(axis=1)
    assert steady.throughput == pytest.approx((steps * batch) @ tokens)


@pytest.mark.parametrize(
    "same",
    [
        {"run_lengths": [geometric(0.35, 80), None]},
        {"run_lengths": [geometric(0.35, 80), [1.0]]},
        {"slowdown": [[1.0, 1.0], [1.0, 1.0]]},
        {"latency": [StepLatency(batch_ms={4: 6.0}), StepLatency(batch_ms={1: 27.9, 8: 27.9})]},
    ],
)
def test_a_generalisation_given_the_papers_case_is_the_papers_case(same: dict[str, object]) -> None:
    case = PAPER.model_copy(update=same)
    for b in ((1, 1), (1, 3), (2, 2)):
        (paper,), (general,) = exact(PAPER, 4, b), exact(case, 4, b)
        assert general.throughput == pytest.approx(paper.throughput, rel=1e-6)
        assert general.delay_ms == pytest.approx(paper.delay_ms, rel=1e-6)


def test_phases_of_a_geometric_run_give_the_same_although_they_are_many() -> None:
    """With one hazard in two phases the chain is another and its answer the same."""
    net = Network.of(PAPER.model_copy(update={"run_lengths": [[0.35, 0.65], None]}), 4, 0.1)
    routing = net.routing.copy()
    routing[1] = [0, 0.65, 0.35]  # the second phase as the first, for ever
    tokens = np.array([0.65, 0.65, 1.0])
    split = Network(**{**vars(net), "routing": routing, "tokens": tokens})
    (paper,), (phases,) = exact(PAPER, 4, (1, 3)), solve_exact(split, [(1, 3)], ANY)
    assert phases.states > paper.states
    assert phases.throughput == pytest.approx(paper.throughput, rel=1e-9)


def test_a_run_length_that_is_not_geometric_makes_a_difference() -> None:
    mean = PAPER.model_copy(update={"run_lengths": [[0, 0, 1], None]})
    geometric_of_same_mean = profile(r2r(1 / 3), 6.0, 27.9)
    (a,), (b,) = exact(mean, 4, (1, 1)), exact(geometric_of_same_mean, 4, (1, 1))
    assert abs(a.throughput / b.throughput - 1) > 0.01


def test_steps_that_grow_with_the_batch_cost_as_much() -> None:
    """Everybody always runs together at one model: T = N / L(N)."""
    (steady,) = exact(profile(single(), StepLatency(batch_ms={1: 5.0, 4: 8.0}, token_ms=9.0)), 3, (1,))
    assert steady.throughput == pytest.approx(3 / 7e-3)


def test_a_suffix_costs_its_mean() -> None:
    """One request of r2r: the LLM is fed 1/p tokens a visit."""
    case = profile(r2r(0.25), 6.0, StepLatency(batch_ms={1: 20.0}, token_ms=0.5))
    assert evaluate(case, 1, (1, 1)).throughput == pytest.approx(1000 / (6 + 0.25 * (20 + 0.5 * 3)))


def test_slowed_models_take_longer_only_while_both_are_busy() -> None:
    """p = 1, q = 1 and two requests apart: the models are always both busy, so each step takes its factor."""
    form = Form([[0, 1], [1, 0]], [[1, 1], [1, 1]])
    alone = profile(form, 10.0, 10.0)
    both = alone.model_copy(update={"slowdown": [[1, 1.5], [2, 1]]})
    (together,) = exact(both, 1, (1, 1))
    assert together.throughput == pytest.approx(100)
    # Random routing keeps two requests apart half of the time.
    mixed = profile(me([1, 1]), 10.0, 10.0)
    (fast,), (slow,) = (
        exact(mixed, 2, (1, 1)),
        exact(mixed.model_copy(update={"slowdown": [[1, 2], [2, 1]]}), 2, (1, 1)),
    )
    # In step: together with 1/2 (10 ms), apart with 1/2 (20 ms).
    assert fast.throughput == pytest.approx(2 / 10e-3)
    assert slow.throughput == pytest.approx(2 / 15e-3)


def test_a_chain_beyond_what_is_allowed_is_not_built() -> None:
    with pytest.raises(TooLarge, match="more than 1000 transitions"):
        solve_exact(Network.of(PAPER, 8, 0.1), [(1, 1)], 1000)
    with pytest.raises(TooLarge):
        solve_exact(Network.of(ME, 1000, 0.1), [(1, 1, 1)], 1000)
    with pytest.raises(TooLarge, match="66 classes and 64 requests have too many states"):
        evaluate(ME.model_copy(update={"run_lengths": [[0.01] * 100, None, None]}), 64, (1, 1, 1), method="exact")


def test_several_b_at_once_are_as_one_by_one() -> None:
    every = feasible_thresholds(2, 4)
    for together, b in zip(exact(STITCH, 4, *every), every, strict=True):
        (alone,) = exact(STITCH, 4, b)
        assert together.thresholds == b
        assert together.states == alone.states
        assert together.throughput == pytest.approx(alone.throughput, rel=1e-9)
