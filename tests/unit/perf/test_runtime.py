# SPDX-License-Identifier: Apache-2.0
"""How the runtime benchmark's clients count: by phase and second, and what comes of it."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import grpc
import pytest
import typer

from perf.runtime import cases, clients
from perf.runtime.__main__ import CASES, ON_REQUEST, main
from perf.runtime.cases import Best, Row, _around
from perf.runtime.clients import ClientResult, ClientSpec, PhaseResult, PhaseSpec, drive
from perf.runtime.errors import standard_error
from perf.runtime.findings import against, best_thresholds, follows_p, paired
from perf.runtime.measure import Measured, Pair, measure
from perf.runtime.report import markdown, plots
from python_backends.llm.contract import StepStats
from python_backends.token_router.config import Transport
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
    assert standard_error([10, 14, 10, 14]) == pytest.approx(math.sqrt(16 / 3) / 2)  # in turn: not alike
    assert standard_error([5]) == standard_error([5, 5, 5]) == 0
    r = (2.25 - 2.25 + 2.25) / (4 * 2.25)  # of -1.5, -1.5, 1.5, 1.5
    assert standard_error([0, 0, 3, 3]) == pytest.approx(math.sqrt(9 / 3 / 4 * (1 + r) / (1 - r)))


def test_what_lies_between_phases_is_no_error() -> None:
    assert standard_error([10, 10, 50, 50], phases=2) == 0
    one, other = standard_error([10, 14, 11]), standard_error([50, 44, 59])
    assert standard_error([10, 14, 11, 50, 44, 59], phases=2) == pytest.approx(math.hypot(one, other) / 2)
    got = measured([10, 14, 10, 50, 54, 50], phases=2)
    assert got.error == standard_error(got.by_second, 2) < standard_error(got.by_second)


@pytest.mark.parametrize(("r", "seconds"), [(0.0, 30), (0.25, 30), (0.4, 30), (0.6, 90)])
def test_the_error_is_right_where_successive_seconds_are_alike(r: float, seconds: int) -> None:
    """An AR(1) series: the means of many differ as much as the error of each says, to 12 %."""
    random = Random(1)
    means, squares = [], []
    for _ in range(1000):
        series = [random.gauss(0, 1)]
        while len(series) < seconds:
            series.append(r * series[-1] + random.gauss(0, math.sqrt(1 - r * r)))
        means.append(statistics.fmean(series))
        squares.append(standard_error(series) ** 2)
    assert math.sqrt(statistics.fmean(squares)) == pytest.approx(statistics.pstdev(means, 0.0), rel=0.12)


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


def test_the_cpu_time_of_the_warm_up_does_not_count(server: type[FakeClient]) -> None:
    """A process that is busy until the first phase begins, and then sleeps."""
    code = "import time; end = time.monotonic() + 1.0\nwhile time.monotonic() < end: pass\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        result = drive(spec(PhaseSpec(seconds=1), warmup_s=2.0).model_copy(update={"pids": {"busy": process.pid}}))
        process.kill()
    assert result.watched_s["busy"] < 0.2
    assert result.threads_s["busy"] == [pytest.approx(result.watched_s["busy"], abs=0.03)]


def measured(tokens: list[int], phases: int = 1, **more: Any) -> Measured:
    """Of these tokens by second, in so many phases."""
    each = len(tokens) // phases
    rates = [sum(tokens[i * each : (i + 1) * each]) / each for i in range(phases)]
    given = {"client_cpu": 0.1, "server_cpu": {"llm": 0.5}, "router_threads": [0.3, 0.1], "models": {}} | more
    return Measured(tokens_per_s=sum(tokens) / len(tokens), phases=rates, by_second=tokens, **given)


def test_rounds_are_put_together() -> None:
    costs = [{"llm": {"overhead_ms_p50": x}} for x in (None, 0.5)]
    rounds = [measured([10, 12], models=costs[0]), measured([14, 16], server_cpu={"llm": 0.7}, models=costs[1])]
    whole = Measured.mean(rounds)
    assert (whole.tokens_per_s, whole.phases, whole.by_second) == (13.0, [13.0], [10, 12, 14, 16])
    assert whole.error == standard_error([10, 12, 14, 16])
    assert whole.server_cpu == {"llm": pytest.approx(0.6)}
    assert whole.models == {"llm": {"overhead_ms_p50": 0.5}}


def row(name: str, b: list[int], tokens: list[int], live: int = 8) -> Row:
    return Row(name=name, live=live, against=None if name == "B*" else "B*", threshold=b, measured=measured(tokens))


def test_a_difference_is_of_the_same_seconds() -> None:
    apart = paired([101, 202, 303], [100, 200, 300])
    assert apart.share == pytest.approx(0.01)
    assert apart.error == pytest.approx(1 / math.sqrt(3) / 200)  # of 1, 2, 3, where r = 0
    two = [101, 202, 53, 54], [100, 200, 50, 50]
    assert paired(*two, phases=2).error < paired(*two).error
    assert str(apart) == "+1.0 ± 0.3 %"
    with pytest.raises(ValueError):
        paired([1, 2], [1])
    with pytest.raises(ValueError, match="no token"):
        paired([1], [0])


def test_a_row_is_compared_with_its_own_n() -> None:
    rows = [row("B*", [1, 5], [100, 100]), row("B*", [1, 3], [50, 50], live=4), row("eager", [1, 1], [49, 49], live=4)]
    assert str(against(rows[2], rows)) == "-2.0 ± 0.0 %"
    assert against(rows[0], rows) is None


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([[99, 201], [90, 190]], "1,5 measured best; next comes 1,4 with +0.0 ± 0.7 %. {} as measured, but the errors"),
        ([[99, 198], [90, 190]], "B* = 1,5 measured best; next comes 1,4 with -1.0 ± 0.3 %. {} yes, at two"),
        ([[100, 201], [90, 190]], "1,4 measured best, +0.3 ± 0.3 % from B* = 1,5. {} yes, at two standard errors."),
        ([[100, 206], [90, 190]], "1,4 measured best, +2.0 ± 2.0 % from B* = 1,5. {} not as measured, but"),
        ([[103, 204], [90, 190]], "1,4 measured best, +2.3 ± 0.3 % from B* = 1,5. {} no."),
        ([[90, 211], [90, 190]], "1,4 measured best, +0.3 ± 7.0 % from B* = 1,5. {} as measured, but the errors"),
    ],
)
def test_whether_the_predicted_b_is_the_best(others: list[list[int]], says: str) -> None:
    held = row("B*, hold", [1, 5], [500, 500])  # the same B: not one to choose from
    rows = [row("B* - 1", [1, 4], others[0]), row("B*", [1, 5], [100, 200]), row("B* + 1", [1, 6], others[1]), held]
    (line,) = best_thresholds(rows)
    assert says.format("B* within 1 % of the best:") in line
    assert line.startswith("N = 8: ")
    assert not best_thresholds([row("B*", [1, 1], [60, 61], live=1)])


def test_auto_is_compared_by_phase_and_over_all() -> None:
    low, high = [100, 102, 50, 50, 100, 102], [90, 90, 60, 62, 90, 90]
    rows = [
        Row(name="B = 1,1", live=4, threshold=[1, 1], measured=measured(low, 3)),
        Row(name="B = 1,3", live=4, threshold=[1, 3], measured=measured(high, 3)),
        Row(name="auto", live=4, measured=measured([100, 102, 58, 60, 95, 97], 3)),
    ]
    length, *lines = follows_p(rows)
    assert length.startswith("Phases of 2 s;")
    best, sure = "from the best constant B", "yes, at two standard errors."
    assert lines == [
        f"Phase 1, p = 0.1: auto +0.0 ± 0.0 % {best} (1,1). Within 3 % of the best: {sure}",
        f"Phase 2, p = 0.5: auto -3.3 ± 0.0 % {best} (1,3). Within 3 % of the best: no.",
        f"Phase 3, p = 0.1: auto -5.0 ± 0.0 % {best} (1,1). Within 3 % of the best: no.",
        f"Whole run: auto +1.6 ± 0.4 % from the best of 2 constant B (1,1). None above auto: {sure}",
    ]


@pytest.mark.parametrize(
    ("auto", "phase", "whole"),
    [
        ([98, 100], "-1.0 ± 1.0 % {} yes, at two standard errors.", "not as measured, but the errors"),
        ([96, 100], "-2.0 ± 2.0 % {} as measured, but the errors are too large to say.", "not as measured, but"),
        ([94, 98], "-4.0 ± 2.0 % {} not as measured, but the errors are too large to say.", "no."),
        ([94, 96], "-5.0 ± 1.0 % {} no.", "no."),
        ([100, 104], "+2.0 ± 2.0 % {} yes, at two standard errors.", "as measured, but"),
        ([104, 106], "+5.0 ± 1.0 % {} yes, at two standard errors.", "yes, at two"),
    ],
)
def test_what_the_errors_do_not_allow_is_not_said_of_auto(auto: list[int], phase: str, whole: str) -> None:
    """In each phase the same, so that the whole run's error is smaller by the root of three."""
    rows = [
        Row(name="B = 1,1", live=4, threshold=[1, 1], measured=measured([100] * 6, 3)),
        Row(name="B = 1,3", live=4, threshold=[1, 3], measured=measured([50] * 6, 3)),
        Row(name="auto", live=4, measured=measured(auto * 3, 3)),
    ]
    _, *phases, all_told = follows_p(rows)
    says = phase.format("from the best constant B (1,1). Within 3 % of the best:")
    assert all(f"auto {says}" in line for line in phases)
    assert f"None above auto: {whole}" in all_told


def test_auto_is_compared_with_every_constant_b() -> None:
    """What measured best is known well; another may be better, as far as its errors say."""
    rows = [
        Row(name="B = 1,1", live=4, threshold=[1, 1], measured=measured([100] * 6, 3)),
        Row(name="B = 1,3", live=4, threshold=[1, 3], measured=measured([80, 119] * 3, 3)),
        Row(name="auto", live=4, measured=measured([101] * 6, 3)),
    ]
    _, first, *_, whole = follows_p(rows)
    assert "(1,1). Within 3 % of the best: as measured, but the errors" in first
    assert "(1,1). None above auto: as measured, but the errors" in whole


def test_the_b_around_the_best() -> None:
    tables = _around(Pair(), {n: Best.of(Pair(), n) for n in (1, 2, 4, 8)})
    assert tables["B*"] == {1: [1, 1], 2: [1, 2], 4: [1, 3], 8: [1, 5]}
    assert tables["B* + 1"] == {4: [1, 4], 8: [1, 6]}  # for two, (1, 3) could leave both waiting
    assert tables["another B of the SLM"] == {8: [2, 5]}


class FakeMachine:
    """Servers that are checked and not started; loads that take no time. loads: (N, seconds, seed) by setting."""

    def __init__(self) -> None:
        self.loads: dict[str, list[tuple[int, int, int]]] = {}

    @contextmanager
    def serve(self, pair: Pair, batching: dict[str, Any], transport: Transport) -> Iterator[str]:
        deployment = pair.deployment(batching, transport)
        yield deployment.transport + json.dumps(deployment.batching.model_dump(mode="json"), sort_keys=True)

    def measure(self, server: str, live: int, seconds: int, *, seed: int = 1, p: Any = (), **_: Any) -> Measured:
        self.loads.setdefault(server, []).append((live, seconds, seed))
        overhead = {"overhead_ms_p50": 0.5, "overhead_ms_p95": None}
        models = {name: dict(overhead) for name in ("slm", "llm")}
        phases = len(p) or 1
        return measured([10 * live] * seconds * phases, phases, server_cpu={"token_router": 0.5}, models=models)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    machine = FakeMachine()
    monkeypatch.setattr(cases, "paced_server", machine.serve)
    monkeypatch.setattr(cases, "measure", machine.measure)
    return machine


@pytest.mark.parametrize("name", list(CASES))
def test_every_case_has_settings_that_can_be_served_and_a_page(name: str, machine: FakeMachine, tmp_path: Path) -> None:
    rows = CASES[name][0](2, lambda _: None)
    assert all(row.against is None or against(row, rows) for row in rows)
    page = markdown({name: rows})
    assert page.count("\n| ") == 1 + len(rows)
    assert [path.is_file() for path in plots({name: rows}, tmp_path, "x")] == [True]


def test_an_earlier_run_is_written_again_with_the_errors_of_today(machine: FakeMachine, tmp_path: Path) -> None:
    rows = cases.moving(4, lambda _: None)
    rows[0].measured.by_second[0] += 5
    stored = [row.model_dump() for row in rows]
    stored[0]["measured"]["error"] = 77.0
    old = tmp_path / "runtime-moving.json"
    old.write_text(json.dumps({"took_s": 3.0, "moving": stored}))
    machine.loads = {}
    main(again=old, output=tmp_path / "new")
    assert not machine.loads
    written = json.loads((tmp_path / "new/runtime-moving.json").read_text())
    assert written == {"took_s": 3.0, "moving": [row.model_dump() for row in rows]}
    page = (tmp_path / "new/runtime-moving.md").read_text()
    assert page == markdown({"moving": rows}) and "one run with one seed" in page
    assert (tmp_path / "new/runtime-moving_moving.png").is_file()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"took_s": 1, "other": []}', '{"took_s": 1, "many": [{"name": 1}]}'])
def test_a_file_of_something_else_is_not_written_again(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(typer.BadParameter, match=r"x\.json: not the JSON of a run: "):
        main(again=path, output=tmp_path)


def test_an_earlier_run_is_written_again_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="neither --only nor --longer"):
        main(only=["many"], again=tmp_path / "x.json", output=tmp_path)


def test_rounds_take_turns_with_a_seed_each(machine: FakeMachine) -> None:
    rows = cases.newer(30, lambda _: None)
    assert len(machine.loads) == 4
    for loads in machine.loads.values():
        assert loads == [(n, 10, seed) for n in (4, 16) for seed in (1, 2, 3)]
    assert all(len(row.measured.by_second) == 30 for row in rows)


def test_all_cases_but_the_longest_take_less_than_ten_minutes(machine: FakeMachine) -> None:
    """With 2.8 s for each load beside its own time, and 4.3 for each server."""
    took_s = 0.0
    for name in CASES.keys() - set(ON_REQUEST):
        case, seconds = CASES[name]
        machine.loads = {}
        case(seconds, lambda _: None)
        loads = [load for mine in machine.loads.values() for load in mine]
        took_s += sum(2.8 + s * (3 if name == "moving" else 1) for _, s, _ in loads) + 4.3 * len(machine.loads)
    assert took_s < 590


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
    got = measure(server, 4, 400, p=(0.1, 0.5))  # type: ignore[arg-type]
    assert got.models["llm"]["overhead_ms_p50"] == pytest.approx(2.0, rel=0.011)
    assert got.models["llm"]["overhead_ms_p95"] == pytest.approx(2.0, rel=0.011)
    assert timeouts[0] > 2 * 400 + 30
    server.clock.idle()
    monkeypatch.setattr(server, "calls", lambda *_: None)
    assert measure(server, 4, 4).models["llm"]["overhead_ms_p50"] is None  # type: ignore[arg-type]
