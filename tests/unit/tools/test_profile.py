# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter profile` and `threshold --server` before a server is there, and what comes of what it measured."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from rich.console import Console
from rich.progress import Progress, TaskID

from python_backends.token_router.delayed_batching import Thresholds, feasible
from python_backends.token_router.threshold.profile import Profile, StepLatency
from routers import RouterConfig
from tools.client import GenerationError
from tools.commands import measured
from tools.commands.measured import server_profile
from tools.commands.options import MeasureOptions
from tools.commands.profile import _measure, for_measuring, profile, sweep, whole
from tools.commands.profile_load import PROMPTS, Requests
from tools.commands.profile_options import ProfileOptions
from tools.control import ControlError
from tools.deployment import load_deployment
from tools.errors import UserError
from tools.run_directory import RunDirectory
from tools.running import FoundServer, find_server

PROFILE = Profile(
    models=["slm", "llm"],
    p=[[0.6, 0.4], [1.0, 0.0]],
    c=[[1.0, 0.0], [1.0, 0.0]],
    latency=[StepLatency.constant(6.0), StepLatency.constant(27.9)],
)


@pytest.mark.parametrize(
    ("concurrency", "max_live", "gathering", "eager"),
    [
        (None, 16, [1, 2, 4, 8, 16], [3, 6, 12]),
        (None, 64, [1, 2, 4, 8, 16], [3, 6, 12, 17]),
        (None, 6, [1, 2, 4, 6], [3, 5]),
        (None, 1, [1], []),
        ([4], 16, [4], [5]),
        ([8, 2], 16, [2, 8], [5, 9]),
    ],
)
def test_the_sweep(concurrency: list[int] | None, max_live: int, gathering: list[int], eager: list[int]) -> None:
    points = sweep(concurrency, max_live)
    assert [p.live for p in points if p.gathers] == gathering
    assert [p.live for p in points if not p.gathers] == eager


@pytest.mark.parametrize("concurrency", [[0], [1, 17]])
def test_a_sweep_beyond_what_is_admitted(concurrency: list[int]) -> None:
    with pytest.raises(UserError, match=r"limits\.max_live = 16"):
        sweep(concurrency, 16)


def test_every_point_has_its_b() -> None:
    points = sweep(None, 16)
    batching = for_measuring(load_deployment("paced"), points).batching
    table = Thresholds(batching, 2)
    for point in points:
        wanted = (1, point.live) if point.gathers else (1, 1)
        assert table.at(point.live) == feasible(wanted, point.live) == wanted
    assert table.at(5) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (MeasureOptions(seconds=0.0), "--seconds: got 0"),
        (MeasureOptions(max_tokens=0), "--max-tokens: got 0"),
        (MeasureOptions(prompts=Path("prompts.txt")), "--prompts: the deployment has no tokenizer"),
        (MeasureOptions(server="123456789"), "--server: got 123456789; no such server runs"),
        (MeasureOptions(concurrency=[99]), "--concurrency: got"),
    ],
)
def test_bad_options(options: MeasureOptions, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        profile("paced", tmp_path / "profile.json", options)
    assert not (tmp_path / "profile.json").exists()


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    with pytest.raises(UserError, match="isn't overwritten"):
        profile("paced", thesis, MeasureOptions())
    with pytest.raises(UserError, match="nowhere is not a folder"):
        profile("paced", tmp_path / "nowhere" / "profile.json", MeasureOptions())
    assert thesis.read_text() == "years of work"


def counts(**changed: Any) -> dict[str, Any]:
    return {
        "outcomes": [[650, 350], [350, 0]],
        "tokens": [[650, 0], [350, 0]],
        "steps": [500, 175],
        "sessions": [1000, 350],
        **changed,
    }


def test_rates_come_from_every_outcome_of_the_load() -> None:
    points = sweep([1, 2], 16)
    seen = {"profile": PROFILE.model_dump(mode="json"), "counts": counts()}
    found = whole(seen, load_deployment("paced"), MeasureOptions(), points)
    assert found.p == [[0.65, 0.35], [1.0, 0.0]]
    assert found.c == [[1.0, 0.0], [1.0, 0.0]]
    assert found.latency == PROFILE.latency
    assert found.source["mean_batch"] == [2.0, 2.0]
    assert Profile.model_validate_json(found.model_dump_json(exclude_none=True)) == found


def test_run_lengths_have_the_mean_of_every_outcome_of_the_load() -> None:
    last = [0.6, 0.2, 0.1, 0.06, 0.04]  # of the last runs, with a mean of 1.74; all outcomes give 1 / 0.35
    seen = PROFILE.model_copy(update={"run_lengths": [last, None]}).model_dump(mode="json")
    found = whole({"profile": seen, "counts": counts()}, load_deployment("paced"), MeasureOptions(), sweep([1], 16))
    assert found.run_lengths is not None
    runs, of_the_llm = found.run_lengths
    assert runs is not None and of_the_llm is None
    assert sum(runs) == pytest.approx(1)
    assert sum(n * share for n, share in enumerate(runs, 1)) == pytest.approx(1 / 0.35)
    assert runs[0] == pytest.approx(0.6)


class Control:
    """What a server has counted, before the load and after it."""

    def __init__(self, *counted: dict[str, Any]) -> None:
        self._counted = iter(counted)

    def traffic(self) -> dict[str, Any]:
        return {"profile": None, "counts": next(self._counted)}


def test_what_a_server_counted_before_the_load_is_left_out() -> None:
    control = Control(counts(), counts(outcomes=[[700, 355], [352, 1]], steps=[600, 176]))
    requests = Requests(None, 8, False, 0)
    found = _measure(control, "", [], requests, 1.0, Console(file=io.StringIO()))["counts"]  # type: ignore[arg-type]
    assert found == {
        "outcomes": [[50, 5], [2, 1]],
        "tokens": [[0, 0], [0, 0]],
        "steps": [100, 1],
        "sessions": [0, 0],
    }


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (None, ["1 request, in turns", "2 requests, side by side"]),
        ("auto", ["1 request, with the server's own B", "2 requests, with the server's own B"]),
    ],
)
def test_the_progress_says_whose_b_it_is(
    server: str | None, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[str] = []

    class Told(Progress):
        def update(self, task_id: TaskID, *args: Any, description: str | None = None, **more: Any) -> None:
            described.append((description or "").strip())

    module = "tools.commands.profile"
    clock = iter(range(1000))
    monkeypatch.setattr(f"{module}.Progress", Told)
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    monkeypatch.setattr(f"{module}._serving", lambda *_: nullcontext((Control(counts(), counts()), "")))
    monkeypatch.setattr(f"{module}.ClosedLoop", lambda *_: nullcontext(SimpleNamespace(check=lambda: None)))
    with pytest.raises(UserError, match="too little traffic"):  # what it says then is another test's
        profile("paced", tmp_path / "p.json", MeasureOptions(server=server, concurrency=[1], seconds=1))
    assert described == said


@pytest.mark.parametrize(
    "seen",
    [
        {"profile": None, "counts": counts()},
        {"profile": PROFILE.model_dump(), "counts": counts(outcomes=[[650, 350], [0, 0]])},
    ],
)
def test_too_little_traffic_is_said(seen: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="too little traffic"):
        whole(seen, load_deployment("paced"), MeasureOptions(), sweep([1], 16))


def test_requests_are_the_same_for_the_same_seed_and_greedy_where_they_may_be() -> None:
    words = Requests.of(RouterConfig(name="rstitch"), PROMPTS, 64, seed=1)
    first, second = (words.draw(random.Random(3)) for _ in range(2))
    assert first == second
    assert first["messages"][0]["content"] in PROMPTS
    assert "temperature" not in first
    ids = Requests.of(RouterConfig(name="random"), None, 64, seed=1).draw(random.Random(3))
    assert ids["ignore_eos"]
    assert 8 <= len(ids["input_ids"]) <= 64


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "the server refused a question: no"),
        (grpc.StatusCode.UNAVAILABLE, "the server didn't answer: UNAVAILABLE: no"),
    ],
)
def test_a_failed_question_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: grpc.StatusCode, message: str
) -> None:
    def fail(*_: object) -> None:
        raise GenerationError(status, "no")

    monkeypatch.setattr("tools.commands.profile._serving", fail)
    with pytest.raises(UserError) as error:
        profile("paced", tmp_path / "profile.json", MeasureOptions())
    assert error.value.lines == [message]


class FakeServer:
    pid = 7

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.control = self

    def traffic(self) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"profile": None, "counts": {"outcomes": [[3, 1], [1, 0]]}}, "has seen too little traffic yet"),
        ({"profile": {"models": []}, "counts": {}}, "another version"),
        ({}, "another version"),
        (ControlError("nobody there"), "nobody there"),
    ],
)
def test_a_server_that_has_no_profile(answer: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "find_server", lambda which: FakeServer(answer))
    with pytest.raises(UserError, match=message):
        server_profile("auto", ProfileOptions())


def test_a_servers_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"profile": PROFILE.model_dump(mode="json"), "counts": {}}
    monkeypatch.setattr(measured, "find_server", lambda which: FakeServer(answer))
    assert server_profile("auto", ProfileOptions()) == PROFILE
    with pytest.raises(UserError, match="--server: given beside another profile"):
        server_profile("auto", ProfileOptions(algorithm="r2r"))
    with pytest.raises(UserError, match="--server: given beside another profile"):
        server_profile("auto", ProfileOptions(matrix_p="[[1]]"))


@pytest.mark.parametrize(("address", "host"), [("0.0.0.0", "127.0.0.1"), ("10.0.0.0", "10.0.0.0")])
def test_a_server_is_found_by_pid_and_by_run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, host: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = RunDirectory.create()
    arguments = (f"--model-repository={run.path}/model_repository", f"--grpc-address={address}", "--grpc-port=8123")
    triton = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *arguments])
    try:
        while not run.processes():  # until it has its own command line, and not this process's
            assert triton.poll() is None
        found = FoundServer(run.path, triton.pid, os.getpid(), f"{host}:8123")
        for which in ("auto", str(triton.pid), str(os.getpid()), str(run.path), f"{run.path}/"):
            assert find_server(which) == found
        with pytest.raises(UserError, match=rf"no such server runs \(there are: {triton.pid} "):
            find_server("1")
    finally:
        run.remove()
        triton.wait(5)
    with pytest.raises(UserError, match="no such server runs"):
        find_server("auto")


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"--server: got /nowhere; no such server runs \(there are: "):
        find_server("/nowhere")
