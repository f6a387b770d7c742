# SPDX-License-Identifier: Apache-2.0
"""How the runtime benchmark's clients count: by phase and second, and what comes of it."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import grpc
import pytest

from perf.runtime import clients
from perf.runtime.clients import ClientResult, ClientSpec, PhaseResult, PhaseSpec, drive
from perf.runtime.measure import measure
from python_backends.llm.contract import StepStats
from python_backends.token_router.step_clock import StepClock
from tools.client import GenerationError

EVERY_S = 0.05


class FakeClient:
    """A server that sends three tokens every 50 ms. asked: what every request was."""

    asked: ClassVar[list[dict[str, Any]]] = []
    error: ClassVar[GenerationError | None] = None

    def __init__(self, url: str) -> None:
        pass

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, **inputs: Any) -> FakeGeneration:
        self.asked.append(inputs)
        if self.error is not None:
            raise self.error
        return FakeGeneration(inputs["max_tokens"] // 3)


class FakeGeneration:
    def __init__(self, responses: int) -> None:
        self._responses = responses
        self._cancelled = False

    def __iter__(self) -> Iterator[SimpleNamespace]:
        for _ in range(self._responses):
            time.sleep(EVERY_S)
            if self._cancelled:
                return
            yield SimpleNamespace(received_at=time.monotonic(), ids=[1, 2, 3])

    def cancel(self) -> None:
        self._cancelled = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    monkeypatch.setattr(clients, "TokenRouterClient", FakeClient)
    monkeypatch.setattr(FakeClient, "asked", [])
    monkeypatch.setattr(FakeClient, "error", None)
    return FakeClient


def spec(*phases: PhaseSpec, warmup_s: float = 0.2) -> ClientSpec:
    return ClientSpec(url="", clients=2, max_tokens=30, warmup_s=warmup_s, phases=list(phases))


def test_tokens_count_in_their_second_and_not_in_the_warm_up(server: type[FakeClient]) -> None:
    (phase,) = drive(spec(PhaseSpec(seconds=1), warmup_s=1.0)).phases
    assert len(phase.tokens) == 1
    # Warm-up and phase are as long: all of both would be twice as many as one can bring.
    assert 0 < phase.tokens[0] <= 2 * 3 * 1.0 / EVERY_S
    assert phase.tokens[0] % 3 == 0


def test_a_phase_asks_with_its_own_parameters(server: type[FakeClient]) -> None:
    result = drive(spec(PhaseSpec(seconds=1, router_params={"p": 0.1}), PhaseSpec(seconds=1, router_params={"p": 0.5})))
    assert [len(phase.tokens) for phase in result.phases] == [1, 1]
    assert all(phase.tokens[0] > 0 for phase in result.phases)
    rates = [asked["router_params"]["p"] for asked in server.asked]
    assert rates == sorted(rates) and set(rates) == {0.1, 0.5}
    seeds = [asked["seed"] for asked in server.asked]
    assert len(set(seeds)) == len(seeds) == result.requests


def test_a_request_that_fails_fails_the_run(server: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "error", GenerationError(grpc.StatusCode.UNAVAILABLE, "refused"))
    with pytest.raises(GenerationError, match="refused"):
        drive(spec(PhaseSpec(seconds=1)))


def test_the_error_is_of_the_mean_of_the_seconds() -> None:
    phase = PhaseResult(seconds=4, tokens=[10, 14, 10, 14])
    assert phase.tokens_per_s == 12
    assert phase.error == pytest.approx(math.sqrt(16 / 3) / 2)
    assert PhaseResult(seconds=1, tokens=[5]).error == 0


class FakeServer:
    """A server with one model, of which every call takes so long beside its engine; a status costs nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = StepClock(lambda: self.now)
        self.pid, self.grpc_url, self.control = os.getpid(), "", self

    def calls(self, count: int, overhead_ms: float) -> None:
        for _ in range(count):
            self.now += (5.0 + overhead_ms) / 1000
            self.clock.called(StepStats(engine_ms=5.0, compute_ms=5.0, sessions=1, kv_tokens=0, steps=1))

    def stub_pids(self) -> dict[str, int]:
        return {}

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(models={"llm": self.clock.summary()})


def test_a_rows_step_cost_is_of_its_own_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls after many, on one server: the cost is that of the few. The clients may take as long as they are to."""
    server, timeouts = FakeServer(), []

    def load(*_: object, input: str, timeout: float, **__: object) -> SimpleNamespace:
        timeouts.append(timeout)
        server.calls(100, 2.0)
        result = ClientResult(
            phases=[PhaseResult(seconds=s.seconds, tokens=[1]) for s in spec_of(input)], cpu_s=0.0, requests=1
        )
        return SimpleNamespace(returncode=0, stdout=result.model_dump_json())

    def spec_of(text: str) -> list[PhaseSpec]:
        return ClientSpec.model_validate_json(text).phases

    monkeypatch.setattr(subprocess, "run", load)
    server.calls(1500, 0.5)
    measured = measure(server, 4, 400, p=(0.1, 0.5))  # type: ignore[arg-type]
    assert measured.models["llm"]["overhead_ms_p50"] == pytest.approx(2.0, rel=0.011)
    assert measured.models["llm"]["overhead_ms_p95"] == pytest.approx(2.0, rel=0.011)
    assert timeouts[0] > 2 * 400 + 30
    server.clock.idle()
    monkeypatch.setattr(server, "calls", lambda *_: None)
    assert measure(server, 4, 4).models["llm"]["overhead_ms_p50"] is None  # type: ignore[arg-type]
