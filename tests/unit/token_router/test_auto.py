# SPDX-License-Identifier: Apache-2.0
"""`batching: auto` in the runtime and in the simulator, on fake clocks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from python_backends.llm.contract import StepRequest, StepResponse
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.runtime import Runtime
from python_backends.token_router.threshold.auto import AutoBatching
from python_backends.token_router.threshold.controller import Answer, Question, ThresholdController
from python_backends.token_router.threshold.forms import r2r
from python_backends.token_router.threshold.profile import Profile, StepLatency
from python_backends.token_router.threshold.solve import solve
from python_backends.token_router.threshold.solver_process import Solver, SolverFailed
from python_backends.token_router.threshold.worker import answer
from tests.unit.token_router.harness import Deployment, FakeLLM, Stream, run
from tools.simulator.auto import SimulatedAuto
from tools.simulator.config import SimulationConfig
from tools.simulator.engine import Simulation

STEPS_MS = (6.0, 27.9)
PROFILE = Profile(
    models=["slm", "llm"], p=r2r(0.5).p, c=r2r(0.5).c, latency=[StepLatency.constant(ms) for ms in STEPS_MS]
)
BEST = {p: solve(Profile(
    models=["slm", "llm"], p=r2r(p).p, c=r2r(p).c, latency=[StepLatency.constant(ms) for ms in STEPS_MS],
), 4).best for p in (0.1, 0.5)}  # fmt: skip


class TimedLLM(FakeLLM):
    """Says how long its steps took."""

    async def _step(self, request: StepRequest) -> StepResponse:
        response = await super()._step(request)
        steps = max((len(result.token_ids) or 1 for result in response.results), default=0)
        return replace(response, stats=replace(response.stats, steps=steps, compute_ms=self.step_s() * 1000 * steps))


class HereSolver(Solver):
    """Solves at once, or does what `trouble` says."""

    def __init__(self) -> None:
        self.trouble: Exception | None = None
        self.asked: list[Question] = []
        self.closed = False

    async def solve(self, question: Question) -> Answer:
        self.asked.append(question)
        if self.trouble is not None:
            raise self.trouble
        return answer(question)

    async def close(self) -> None:
        self.closed = True


class AutoDeployment(Deployment):
    """Two models; a token of the first goes to the second with probability `p`, which may change."""

    def __init__(self, solver: Solver, p: float, **batching: Any) -> None:
        self.p = p
        self._rng = random.Random(0)
        routes = (lambda *_: int(self._rng.random() < self.p), lambda *_: 1)
        self.llms = [
            TimedLLM(name, route, lambda ms=ms: ms / 1000)  # type: ignore[misc]
            for name, route, ms in zip(("slm", "llm"), routes, STEPS_MS, strict=True)
        ]
        config = RuntimeConfig.model_validate(
            {
                "models": [{"name": "slm"}, {"name": "llm"}],
                "router": {"name": "random"},
                "batching": {"threshold": "auto", **batching},
                "limits": {"max_live": 8},
            }
        )
        self.runtime = Runtime(config, self.llms, tokenizer=None, solver=solver)

    def thresholds(self) -> tuple[int, ...]:
        return tuple(model["threshold"] for model in self.runtime.status()["models"].values())

    def clients(self, count: int) -> list[Stream]:
        """Requests that go on for longer than a test."""
        return [self.submit(input_ids=[n + 1], max_tokens=4000)[1] for n in range(count)]

    def stop(self) -> None:
        self.runtime.abort("enough")


def test_b_follows_p() -> None:
    async def main() -> None:
        assert BEST[0.1] != BEST[0.5]
        async with AutoDeployment(HereSolver(), p=0.1) as served:
            served.clients(4)
            assert served.thresholds() == (1, 1)
            for p in (0.1, 0.5, 0.1):
                served.p = p
                await asyncio.sleep(6)
                assert served.thresholds() == BEST[p]
                believed = served.runtime.status()["controller"]["profile"]["p"][0][1]
                assert believed == pytest.approx(p, abs=0.1)
            served.stop()

    run(main())


def test_an_n_that_is_new_has_b_1() -> None:
    async def main() -> None:
        async with AutoDeployment(HereSolver(), p=0.5) as served:
            served.clients(4)
            await asyncio.sleep(5)
            assert served.thresholds() == BEST[0.5]
            served.clients(2)
            assert served.thresholds() == (1, 1)
            await asyncio.sleep(2)
            assert served.thresholds() != (1, 1)
            served.stop()

    run(main())


def test_an_error_is_over_when_there_is_nothing_to_ask_any_more() -> None:
    async def main() -> None:
        solver, controller = HereSolver(), ThresholdController(2)
        solver.trouble = SolverFailed("it has died")
        controller.at(4)
        traffic = SimpleNamespace(calls=[1], profile=lambda _: PROFILE)
        auto = AutoBatching(traffic, controller, solver, 8, lambda: None)  # type: ignore[arg-type]
        running = asyncio.create_task(auto.run())
        await asyncio.sleep(0.5)
        assert auto.status()["error"] == "it has died"
        traffic.calls, traffic.profile = [2], lambda _: None
        await asyncio.sleep(2)
        assert auto.status()["error"] is None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(main())


@pytest.mark.parametrize("trouble", [SolverFailed("it has died"), RuntimeError("a bug")])
def test_a_solver_that_fails_leaves_b_as_it_is(trouble: Exception) -> None:
    async def main() -> None:
        solver = HereSolver()
        solver.trouble = trouble
        async with AutoDeployment(solver, p=0.5) as served:
            streams = served.clients(4)
            await asyncio.sleep(8)
            assert served.thresholds() == (1, 1)
            assert str(trouble) in served.runtime.status()["controller"]["error"]
            assert 2 <= len(solver.asked) < 8  # asked again, but less and less often
            made = sum(len(stream.token_ids) for stream in streams)
            assert made > 500
            solver.trouble = None
            await asyncio.sleep(12)
            assert served.thresholds() == BEST[0.5]
            assert served.runtime.status()["controller"]["error"] is None
            solver.trouble = trouble
            served.p = 0.1
            await asyncio.sleep(5)
            assert served.thresholds() == BEST[0.5]  # the last good one
            served.stop()

    run(main())


def test_the_solver_ends_with_the_runtime_and_rests_without_traffic() -> None:
    async def main() -> None:
        solver = HereSolver()
        async with AutoDeployment(solver, p=0.5) as served:
            served.clients(4)
            await asyncio.sleep(5)
            served.stop()
            await asyncio.sleep(1)
            asked = len(solver.asked)
            assert asked
            await asyncio.sleep(1000)
            assert len(solver.asked) == asked
            assert not solver.closed
        assert solver.closed

    run(main())


def test_run_ahead_and_lazy_prefill_are_learnt_from_too() -> None:
    async def main() -> None:
        async with AutoDeployment(HereSolver(), p=0.2, run_ahead=8, llm_prefill="lazy") as served:
            streams = served.clients(2)
            await asyncio.sleep(25)
            measured = served.runtime.measured()
            profile = Profile.model_validate(measured["profile"])
            assert profile.p[0][1] == pytest.approx(0.2, abs=0.05)
            assert profile.p[1] == [1.0, 0.0]
            assert profile.c == [[1.0, 0.0], [1.0, 0.0]]
            assert [latency.ms(1) for latency in profile.latency] == pytest.approx(STEPS_MS)
            assert profile.run_lengths is None
            tokens = sum(sum(row) for row in measured["counts"]["tokens"])
            assert tokens == sum(len(stream.token_ids) for stream in streams)
            served.stop()

    run(main())


def _simulated(p: float, live: int, seed: int) -> tuple[SimulatedAuto, tuple[int, ...]]:
    form = r2r(p)
    profile = Profile(models=["slm", "llm"], p=form.p, c=form.c, latency=[StepLatency.constant(ms) for ms in STEPS_MS])
    config = SimulationConfig(concurrency=live, duration_s=60.0, warm_up_s=0.0, seed=seed)
    simulation = Simulation(profile, config)
    auto = SimulatedAuto(simulation, profile.models, live, answer)
    simulation.run()
    return auto, solve(profile, live).best


@pytest.mark.parametrize(("p", "seed"), [(0.12, 0), (0.2, 1), (0.3, 2), (0.35, 3)])
def test_noise_does_not_make_b_flap(p: float, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """p near which two B are as good as each other among them: after it has settled, B stays."""
    with caplog.at_level("INFO"):
        _simulated(p, 4, seed)
    changes: Sequence[str] = [line for line in caplog.messages if line.startswith("N = 4:")]
    assert len(changes) <= 3


def test_in_the_simulator_b_is_the_models_best() -> None:
    auto, best = _simulated(0.5, 4, 0)
    assert auto.controller.at(4) == best
