# SPDX-License-Identifier: Apache-2.0
"""The simulation, where a run can be told by hand; where chance comes in, see test_against_model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.delayed_batching import Thresholds
from python_backends.token_router.threshold.profile import Profile, StepLatency
from tests.unit.simulator.profiles import ALWAYS, r2r, run, simulation
from tools.simulator.observer import Observer
from tools.simulator.requests import SimRequest, SimSession
from tools.simulator.results import Meter
from tools.simulator.routing import Routing, stream


class Log(Observer):
    """launches: (ms, model, sessions); waited: the longest wait of each, ms.
    steps: (ms at the end, model, sessions, more tokens, ms)."""

    def __init__(self) -> None:
        self.launches: list[tuple[float, int, int]] = []
        self.waited: list[float] = []
        self.steps: list[tuple[float, int, int, int, float]] = []
        self.routes: dict[int, list[int]] = {}
        self.ends: list[tuple[float, int]] = []
        self.live: list[int] = []

    def live_changed(self, now: int, live: int) -> None:
        self.live.append(live)

    def launched(self, now: int, model: int, batch: Sequence[SimSession]) -> None:
        self.launches.append((now / 1e6, model, len(batch)))
        self.waited.append((now - batch[0].waiting_since) / 1e6)

    def stepped(self, now: int, model: int, sessions: int, more_tokens: int, took: int) -> None:
        self.steps.append((now / 1e6, model, sessions, more_tokens, took / 1e6))

    def routed(self, now: int, session: SimSession, destination: int, tokens: int) -> None:
        self.routes.setdefault(session.request.rid, []).append(destination)

    def ended(self, now: int, request: SimRequest) -> None:
        self.ends.append((now / 1e6, request.rid))


def log(profile: Profile, batching: dict[str, Any] | None = None, **config: Any) -> Log:
    seen = Log()
    sim = simulation(profile, batching, **{"warm_up_s": 0.0} | config)
    sim.observe(seen)
    sim.run()
    return seen


def one_model(**profile: Any) -> Profile:
    return Profile.model_validate(
        {"models": ["a"], "p": [[1]], "c": [[1]], "latency": [{"batch_ms": {1: 10}}]} | profile
    )


def test_one_model_alone_makes_a_token_each_step() -> None:
    result = run(one_model(), concurrency=4, duration_s=20.0)
    assert result.throughput == pytest.approx(400)
    assert result.half_width == pytest.approx(0)
    assert result.request_speed == pytest.approx(100)
    (model,) = result.models
    assert (model.mean_batch, model.admission_delay_ms, model.utilisation, model.steps) == (4, 0, 1, 1000)
    assert result.session_steps == 4 * 2000


def test_a_request_that_is_always_delegated_alternates() -> None:
    result = run(r2r(ALWAYS), concurrency=1, duration_s=100.0)
    assert result.throughput == pytest.approx(1000 / 33.9, rel=1e-3)
    assert [m.utilisation for m in result.models] == pytest.approx([6 / 33.9, 27.9 / 33.9], rel=1e-3)


def test_eager_and_delayed_batches() -> None:
    """Two requests, always delegated: at first together, so only B = 2 at the SLM can't part them either way."""
    profile = r2r(ALWAYS, slm_ms=1, llm_ms=2)
    assert log(profile, {"threshold": [1, 2]}, concurrency=2, duration_s=0.007).launches == [
        (0, 0, 2),
        (1, 1, 2),
        (3, 0, 2),
        (4, 1, 2),
        (6, 0, 2),
    ]


def test_completions_of_one_instant_come_before_its_launches() -> None:
    """L_1 = 2 L_0: while one request is at the LLM, the other's second SLM step ends with its step. Launched
    apart, they'd never be together; the model has them meet (appendix D)."""
    profile = Profile.model_validate(
        {
            "models": ["slm", "llm"],
            "p": [[0.5, 0.5], [1, 0]],
            "c": [[1, 0], [1, 0]],
            "latency": [{"batch_ms": {1: 1.1}}, {"batch_ms": {1: 2.2}}],
        }
    )
    launches = log(profile, concurrency=2, duration_s=20.0, seed=1).launches
    at = [time for time, *_ in launches]
    assert all(time == pytest.approx(round(time / 1.1) * 1.1) for time in at)
    slm = [time for time, model, _ in launches if model == 0]
    assert len(slm) == len(set(slm))
    assert any(sessions == 2 for _, model, sessions in launches if model == 0)


def test_a_wait_ends_at_the_cap() -> None:
    """B = 2 at the LLM: a batch of one is launched when its wait has reached the cap, or later, when the LLM was
    busy at that time."""
    profile = r2r(0.3, slm_ms=1, llm_ms=20)
    never = log(profile, {"threshold": [1, 2]}, concurrency=2, duration_s=60.0)
    assert {n for _, model, n in never.launches if model == 1} == {2}
    capped = log(profile, {"threshold": [1, 2]}, concurrency=2, duration_s=60.0, max_wait_ms=3)
    alone = [
        (time, wait)
        for (time, model, n), wait in zip(capped.launches, capped.waited, strict=True)
        if (model, n) == (1, 1)
    ]
    ends = {time for time, model, *_ in capped.steps if model == 1}
    assert any(wait == 3 for _, wait in alone)
    assert all(wait == 3 or (wait > 3 and time in ends) for time, wait in alone)


def test_no_request_waits_for_ever_where_a_cap_is_missing() -> None:
    """An infeasible B is lowered by the runtime's own table."""
    result = run(r2r(0.3), {"threshold": [4, 4]}, concurrency=4, duration_s=60.0)
    assert result.throughput > 0


def test_step_sync_waits_for_the_slowest() -> None:
    launches = log(r2r(0.5), {"policy": "step_sync"}, concurrency=4, duration_s=30.0).launches
    rounds: dict[float, list[int]] = {}
    for time, model, _ in launches:
        rounds.setdefault(time, []).append(model)
    times = sorted(rounds)
    for time, after in itertools.pairwise(times):
        assert after - time == pytest.approx(27.9 if 1 in rounds[time] else 6.0)
    assert any(len(models) == 2 for models in rounds.values())


def test_model_sync_runs_one_model_at_a_time_until_it_is_empty() -> None:
    seen = log(r2r(0.5), {"policy": "model_sync"}, concurrency=4, duration_s=30.0)
    starts = [(time, model, sessions) for time, model, sessions in seen.launches]
    for (time, model, _), (after, _, _) in itertools.pairwise(starts):
        assert after - time == pytest.approx((6.0, 27.9)[model])
    assert all(n == 4 for _, model, n in starts if model == 1)  # all have come by the time that it runs


def test_a_suffix_costs_by_the_tokens_that_the_model_has_not_seen() -> None:
    """Five tokens by the SLM (its sixth is dropped), then one by the LLM: the LLM has its own token and those five
    to process, the SLM on return the LLM's one."""
    latency = [StepLatency(batch_ms={1: 1}, token_ms=0.5), StepLatency(batch_ms={1: 10}, token_ms=2)]
    profile = r2r(0.5, latency=latency, run_lengths=[[0, 0, 0, 0, 0, 1], None])
    steps = log(profile, concurrency=1, duration_s=0.2).steps
    llm = [(more, took) for _, model, _, more, took in steps if model == 1]
    assert llm[0] == (4, 18)  # no token of its own yet
    assert set(llm[1:]) == {(5, 20)}
    assert {(more, took) for _, model, _, more, took in steps if model == 0} == {(0, 1)}


def test_a_prompt_is_prefilled_on_both_models_in_chunks() -> None:
    """SLM: 4 tokens, then the other 3 and its first token, which is dropped. LLM, eager: 4 at the same time; the
    request has come by its second step, which so takes the last prompt token too. Lazy: the same, but later."""
    latency = [StepLatency(batch_ms={1: 1}, token_ms=0.5), StepLatency(batch_ms={1: 10}, token_ms=2)]
    config: dict[str, Any] = {"concurrency": 1, "prompt_tokens": 7, "prefill_chunk": 4, "duration_s": 0.036}
    eager = log(r2r(ALWAYS, latency=latency), **config).steps
    assert eager == [(2.5, 0, 1, 3, 2.5), (4.5, 0, 1, 2, 2), (16, 1, 1, 3, 16), (30, 1, 1, 2, 14), (31, 0, 1, 0, 1)]
    lazy = log(r2r(ALWAYS, latency=latency), {"llm_prefill": "lazy"}, **config).steps
    assert lazy == [
        (2.5, 0, 1, 3, 2.5),
        (4.5, 0, 1, 2, 2),
        (20.5, 1, 1, 3, 16),
        (34.5, 1, 1, 2, 14),
        (35.5, 0, 1, 0, 1),
    ]


def test_what_is_prefilled_for_a_peer_only_leaves_out_the_last_prompt_token() -> None:
    """The SLM keeps its requests: the LLM prefills 6 of 7 tokens, and nothing after."""
    latency = [StepLatency(batch_ms={1: 1}, token_ms=0.5), StepLatency(batch_ms={1: 10}, token_ms=2)]
    steps = log(r2r(0.0, latency=latency), concurrency=1, prompt_tokens=7, duration_s=1.0).steps
    assert [step for step in steps if step[1] == 1] == [(20, 1, 1, 5, 20)]


def test_a_peers_prefill_ends_with_its_request() -> None:
    """The request makes one token in its first step, and the LLM is still at its prompt: the next ones' prompts
    wait for it, but those of requests that have ended are not prefilled at all."""
    latency = [StepLatency(batch_ms={1: 1}, token_ms=0.5), StepLatency(batch_ms={1: 10}, token_ms=20)]
    steps = log(
        r2r(0.0, latency=latency),
        concurrency=1,
        prompt_tokens=3,
        lengths={"kind": "constant", "mean": 1},
        duration_s=1.0,
    ).steps
    assert {(n, took) for _, model, n, _, took in steps if model == 1} == {(1, 30)}


def test_a_prompt_is_free_where_tokens_cost_nothing() -> None:
    assert log(r2r(ALWAYS), concurrency=1, prompt_tokens=100, duration_s=0.1).launches[0] == (0, 0, 1)
    assert run(r2r(ALWAYS), concurrency=1, prompt_tokens=100, duration_s=100.0).throughput == pytest.approx(
        1000 / 33.9, rel=1e-3
    )


def test_without_resume_a_returning_request_pays_for_its_whole_context() -> None:
    latency = [StepLatency(batch_ms={1: 1}, token_ms=0.5), StepLatency(batch_ms={1: 10}, token_ms=2)]
    steps = log(r2r(ALWAYS, latency=latency), {"resume": False}, concurrency=1, prompt_tokens=6, duration_s=0.2).steps
    # The prompt; then the LLM's token more each time. The LLM is told nothing new but has forgotten all.
    assert [more for _, model, _, more, _ in steps if model == 0][:3] == [5, 6, 7]
    assert [more for _, model, _, more, _ in steps if model == 1][-3:] == [8, 9, 10]


def test_measured_run_lengths_are_kept() -> None:
    lengths = [0.0, 0.5, 0.0, 0.5]
    routes = log(r2r(0.4, run_lengths=[lengths, None]), concurrency=1, duration_s=200.0).routes[0]
    runs, n = [], 0
    for destination in routes:
        n += 1
        if destination == 1:
            runs.append(n)
            n = -1  # the LLM's step comes next
    assert set(runs) == {2, 4}
    assert runs.count(2) / len(runs) == pytest.approx(0.5, abs=0.05)


def test_requests_end_and_the_next_begin() -> None:
    seen = log(one_model(), concurrency=2, lengths={"kind": "constant", "mean": 3}, duration_s=0.1)
    assert seen.ends[:4] == [(30, 0), (30, 1), (60, 2), (60, 3)]
    assert max(seen.live) == 2
    result = run(one_model(), concurrency=2, lengths={"kind": "constant", "mean": 3}, duration_s=60.0)
    assert result.latency_s == pytest.approx(0.03)
    assert result.finished == pytest.approx(2 * 50 / 0.03, abs=4)


def test_tokens_beyond_a_requests_length_do_not_count() -> None:
    """Steps of two tokens and requests of three: the second step's other token is not wanted."""
    result = run(one_model(c=[[2]]), concurrency=1, lengths={"kind": "constant", "mean": 3}, duration_s=60.0)
    assert result.counted == pytest.approx(3 / 0.02, rel=1e-3)


def test_the_warm_up_is_not_measured() -> None:
    meter = Meter(["a"], None, start=1000, end=2000)
    meter.launched(0, 0, 4, waits=4000.0)
    cuts = meter.cuts()
    meter.cut(cuts[0])
    meter.completed(1500, 0)
    meter.launched(1500, 0, 2, waits=14.0)
    for cut in cuts[1:]:
        meter.cut(cut)
    (model,) = meter.result(waiting=0, events=0).models
    assert (model.mean_batch, model.steps, model.utilisation) == (2, 1, 1)
    assert model.admission_delay_ms == pytest.approx(7e-6)


def test_geometric_lengths_have_their_mean() -> None:
    result = run(one_model(), concurrency=8, lengths={"kind": "geometric", "mean": 20}, duration_s=500.0)
    assert result.finished == pytest.approx(800 * 490 / 20, rel=0.03)


def test_max_live_keeps_requests_outside() -> None:
    seen = log(one_model(), rate_per_s=100, max_live=3, lengths={"kind": "constant", "mean": 10}, duration_s=5.0)
    assert max(seen.live) == 3
    assert [rid for _, rid in seen.ends] == list(range(len(seen.ends)))


def test_poisson_arrivals_have_their_rate() -> None:
    result = run(one_model(), rate_per_s=20, lengths={"kind": "constant", "mean": 10}, duration_s=500.0)
    assert result.throughput == pytest.approx(200, rel=0.03)
    assert result.waiting == 0


def test_phases_change_the_routing() -> None:
    phases = [{"duration_s": 10.0, "p": [[1, 0], [1, 0]]}, {"duration_s": 10.0, "p": [[0, 1], [1, 0]]}]
    seen = log(r2r(0.5), concurrency=1, phases=phases, duration_s=20.0)
    assert {model for time, model, _ in seen.launches if time < 10_000} == {0}
    later = [model for time, model, _ in seen.launches if time > 10_010]
    assert later.count(1) == pytest.approx(later.count(0), abs=1)


def test_thresholds_can_be_replaced_in_flight() -> None:
    sim, seen = simulation(r2r(ALWAYS), concurrency=4, warm_up_s=0.0, duration_s=20.0), Log()
    sim.observe(seen)
    sim.at(10.0, lambda: sim.use_thresholds(Thresholds(BatchingConfig(threshold=[1, 3]), 2)))
    sim.run()
    assert sim.thresholds == (1, 3)
    assert min(n for time, model, n in seen.launches if model == 1 and time > 10_100) >= 3


def test_a_policy_without_thresholds_takes_none() -> None:
    sim = simulation(r2r(ALWAYS), {"policy": "step_sync"}, concurrency=4)
    with pytest.raises(ValueError, match="step_sync has no thresholds"):
        sim.use_thresholds(Thresholds(BatchingConfig(), 2))


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    first, again, other = (run(r2r(0.3), concurrency=4, duration_s=30.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.throughput != other.throughput


def test_a_request_meets_the_same_routing_whatever_policy_and_arrivals() -> None:
    config: dict[str, Any] = {"duration_s": 30.0, "lengths": {"kind": "geometric", "mean": 50}}
    eager = log(r2r(0.3), concurrency=4, **config).routes
    sync = log(r2r(0.3), {"policy": "model_sync"}, concurrency=2, **config).routes
    poisson = log(r2r(0.3), rate_per_s=3, **config).routes
    for rid in range(5):
        assert eager[rid] == sync[rid] == poisson[rid]
    assert eager[0] != eager[1]


def test_streams_are_apart() -> None:
    names = [("lengths", None), ("arrivals", None), ("routing", 0), ("routing", 1), ("tokens", 0)]
    firsts = {stream(0, purpose, rid).random() for purpose, rid in names}
    assert len(firsts) == len(names)


def test_runs_draw_two_numbers_whatever_they_are() -> None:
    rng, plain = stream(0, "routing", 0), stream(0, "routing", 0)
    routing = Routing([[1.0, 0.0], [1.0, 0.0]], [[1, 0], [1, 0]], [None, None])
    assert routing.run(0, rng) == (math.inf, 0)
    assert routing.run(1, rng) == (1, 0)
    assert [plain.random() for _ in range(5)][4] == rng.random()


def test_mean_tokens_are_drawn() -> None:
    profile = one_model(c=[[1.25]])
    assert run(profile, concurrency=4, duration_s=100.0).throughput == pytest.approx(500, rel=0.01)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "concurrency, rate_per_s: exactly one"),
        ({"concurrency": 1, "rate_per_s": 1}, "concurrency, rate_per_s: exactly one"),
        ({"rate_per_s": 1}, "endless requests can't arrive at a rate; allowed: constant, geometric"),
        ({"concurrency": 1, "duration_s": 5}, "warm_up_s: got 10.0; must be less than duration_s, 5"),
        ({"concurrency": 1, "duration_s": 1e-9, "warm_up_s": 0}, "duration_s: got 1e-09; must be at least 0.001 more"),
        (
            {"concurrency": 1, "lengths": {"kind": "constant", "mean": 0.5}},
            "lengths.mean\\n.*greater than or equal to 1",
        ),
        ({"concurrency": 1, "batching": {"threshold": "auto"}}, "batching.threshold: got auto; a simulation takes"),
        ({"concurrency": 1, "phases": [{"duration_s": 1, "p": [[1]]}]}, "p: must be 2 x 2"),
        ({"concurrency": 1, "batching": {"threshold": [1, 1, 1]}}, "3 numbers.*one for each of 2 models"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulation(r2r(0.5), **config)
