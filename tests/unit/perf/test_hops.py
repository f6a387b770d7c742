# SPDX-License-Identifier: Apache-2.0
"""The table of ways between two steps: what led to a call, and where its time went."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from perf.hops import __main__ as command
from perf.hops import traced
from perf.hops.table import LEGS, calls_of, hops_of, markdown, summary
from perf.runtime.measure import Pair
from python_backends.llm.contract import (
    LLMFacts,
    SessionOpen,
    SessionResult,
    SessionStep,
    StepRequest,
    StepResponse,
)
from python_backends.llm.engines.config import PacedConfig
from python_backends.llm.engines.paced import PacedEngine
from python_backends.llm.runner import LLMRunner
from python_backends.llm.step_socket import StepSocket
from python_backends.llm.wire import Wire, decode_request, decode_response, encode_request, encode_response
from python_backends.token_router import llm_client, local_llm
from python_backends.token_router.lifeline import ProcessLifeline
from python_backends.token_router.llm_client import ThreadedLLMClient
from routers import RouterConfig

BEFORE = ("launched", "sent", "entered", "begins")
AFTER = ("ends", "routed", "left", "received", "answered")


def call(model: str, number: int, launched: float, begins: float, **more: Any) -> list[list[Any]]:
    """Notes of a call that takes 5 s: a tenth of a second between what is noted, but to where it begins."""
    moments = [launched + i / 10 for i in range(3)] + [begins]
    notes = [[s, what, model, number, None] for s, what in zip(moments, BEFORE, strict=True)]
    notes[0][4] = {"steps": more.get("steps", [1]), "opens": more.get("opens", 0)}
    notes += [[begins + 5 + i / 10, what, model, number, None] for i, what in enumerate(AFTER)]
    notes[-1][4] = more.get("leaving", [])
    return notes


def found(*calls: list[list[Any]]) -> list[Any]:
    return hops_of(calls_of([note for notes in calls for note in notes], 0.0, 1000.0))


def test_a_request_that_leaves_leads_to_the_other_models_call() -> None:
    (hop,) = found(call("slm", 1, 0.0, 1.0, leaving=[7]), call("llm", 1, 6.402, 7.0, steps=[7]))
    assert hop.kind == "slm to llm"
    assert list(hop.legs) == list(LEGS)
    assert hop.ms == pytest.approx(1000)
    assert hop.legs["act on it, launch"] == pytest.approx(2, abs=0.01)
    assert hop.legs["sample and route"] == pytest.approx(100)


def test_the_models_own_call_leads_to_the_next_one_unless_somebody_came_later() -> None:
    mine = call("llm", 1, 0.0, 1.0)  # is answered at 6.4
    other = call("slm", 1, 0.0, 1.001, leaving=[7])  # at 6.401
    (hop,) = found(mine, call("llm", 2, 6.402, 7.0, steps=[8]))
    assert hop.kind == "llm, again"
    (hop,) = found(mine, other, call("llm", 2, 6.402, 7.0, steps=[7, 8]))
    assert hop.kind == "slm to llm"
    since = call("slm", 2, 5.9, 6.3)  # sent ahead of the end of the one that led to it
    assert "slm to llm" in [h.kind for h in found(mine, other, since, call("llm", 2, 6.402, 7.0, steps=[7, 8]))]


def test_a_call_sent_ahead_waits_for_what_the_llm_does() -> None:
    (hop,) = found(call("slm", 1, 0.0, 1.0), call("slm", 2, 5.9, 6.5))
    assert hop.kind == "slm, sent ahead"
    assert hop.ms == pytest.approx(500)
    assert set(hop.legs) == {"sample and route", "answer encoded", "on its way there", "decoded, to the engine"}


def test_what_a_client_or_a_timer_leads_to_is_left_out() -> None:
    first = call("slm", 1, 0.0, 1.0)
    assert not found(first, call("slm", 2, 6.402, 7.0, opens=1))
    assert not found(first, call("slm", 2, 6.9, 7.5))
    assert not found(first)
    half = [note for note in call("slm", 2, 6.402, 7.0) if note[1] != "answered"]
    assert not found(first, half)


def test_an_answer_that_overtakes_its_way_back_has_not_waited_for_it() -> None:
    early = call("slm", 1, 0.0, 1.0)
    early[-1][0] = 6.25  # before "received"
    (hop,) = found(early, call("slm", 2, 6.252, 7.0))
    assert "on its way back" not in hop.legs
    assert hop.legs["to the event loop"] == pytest.approx(50)
    assert hop.ms == pytest.approx(1000)


def test_the_page_has_a_column_for_each_kind() -> None:
    hops = found(call("slm", 1, 0.0, 1.0, leaving=[7]), call("llm", 1, 6.402, 7.0, steps=[7]))
    told = summary(hops)
    assert told["slm to llm"]["count"] == 1
    assert told["slm to llm"]["ms_p50"] == told["slm to llm"]["ms_p95"] == pytest.approx(1000)
    page = markdown({8: told}, "socket", (2.0, 12.5))
    assert page.startswith("# Between two steps of 2 and 12.5 ms\n")
    assert "## N = 8" in page and "| | slm to llm |" in page and "| on its way back | 100.00 |" in page


@pytest.mark.parametrize(
    ("options", "stem", "title"),
    [
        ("", "hops", "6 and 27.9 ms"),
        ("--transport bls", "hops-bls", "6 and 27.9 ms"),
        ("--steps-ms 2 12", "hops-newer", "2 and 12 ms"),
        ("--steps-ms 2 12 --transport bls", "hops-newer-bls", "2 and 12 ms"),
        ("--steps-ms 1.5 9", "hops-1.5-9ms", "1.5 and 9 ms"),
    ],
)
def test_files_and_title_say_what_the_steps_are(
    options: str, stem: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement is left out, but not the deployment that it would be of."""
    notes = [*call("slm", 1, 0.0, 1.0, leaving=[7]), *call("llm", 1, 6.402, 7.0, steps=[7])]
    deployments = []

    def run(pair: Pair, live: list[int], seconds: int, transport: Any) -> Any:
        deployments.append(command._deployment(pair, live, transport))
        return notes, {n: (0.0, 1000.0, SimpleNamespace(tokens_per_s=60.0)) for n in live}

    monkeypatch.setattr(command, "_run", run)
    assert _command(f"{options} --live 4 --output {tmp_path}").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}.json", f"{stem}.md"}
    page = (tmp_path / f"{stem}.md").read_text()
    assert page.startswith(f"# Between two steps of {title}\n") and "| | slm to llm |" in page
    figures = json.loads((tmp_path / f"{stem}.json").read_text())
    served = [model.engine.step_ms for model in deployments[0].models]  # type: ignore[union-attr]
    assert figures["steps_ms"] == served and f"{served[0]:g} and {served[1]:g} ms" == title
    assert figures["tokens_per_s"] == {"4": 60.0}


@pytest.mark.parametrize("steps_ms", ["0 12", "2 -1", "nan 12", "2 inf"])
def test_steps_that_take_no_time_are_refused(steps_ms: str, tmp_path: Path) -> None:
    refused = _command(f"--output {tmp_path} --steps-ms {steps_ms}")
    assert refused.exit_code == 2
    assert "both must be above 0" in refused.output and not list(tmp_path.iterdir())


def _command(options: str) -> Result:
    app = typer.Typer()
    app.command()(command.main)
    return CliRunner().invoke(app, shlex.split(options))


@pytest.fixture
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stopwatch wraps is as it was after the test."""
    methods = ((ThreadedLLMClient, "step"), (ThreadedLLMClient, "_exchange"), (local_llm._StepStream, "_answered"))
    functions = [(module, name) for module in (llm_client, local_llm) for name in ("encode_request", "decode_response")]
    for owner, name in (*methods, (LLMRunner, "execute"), (PacedEngine, "step"), *functions):
        monkeypatch.setattr(owner, name, vars(owner)[name])


def served(runner: LLMRunner | None = None) -> Any:
    """What Triton's stub drives, of a class of its own."""

    class Model:
        _runner = runner

        def _answer(self, wire: Wire) -> Wire:
            if runner is None:
                raise RuntimeError("this is token_router")
            return encode_response(runner.execute(decode_request(wire)))

        def finalize(self) -> None:
            pass

    return Model()


def written(model: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int, Any]]:
    monkeypatch.setenv(traced.FOLDER_VARIABLE, str(path.parent))
    model.finalize()
    notes = json.loads(path.read_text())
    assert [note[0] for note in notes] == sorted(note[0] for note in notes)
    return [tuple(note[1:]) for note in notes]


@pytest.mark.usefixtures("unwrapped")
def test_the_llms_part_of_a_call_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes what is wrapped finds out here."""
    router = RouterConfig.model_validate({"name": "random", "params": {"p": 0.0}})
    engine = PacedEngine(PacedConfig(type="paced", step_ms=1.0), "slm")
    model = served(LLMRunner("slm", 0, engine, router.router(0, ["slm", "llm"]), router))
    traced.install_llm(type(model))
    request = StepRequest(number=3, steps=[SessionStep(7, 0, [5])], opens=[SessionOpen(7, 1, 9)])
    assert decode_response(model._answer(encode_request(request))).results[0].token_ids
    moments = written(model, tmp_path / "slm.json", monkeypatch)
    assert moments == [(what, "slm", 3, None) for what in ("entered", "begins", "ends", "routed", "left")]


def _answer(wire: Wire) -> Wire:
    request = decode_request(wire)
    facts = LLMFacts("slm", "fake", os.getpid(), 4, 100, 8, 50, (0,), samples=True, kv_tokens=400)
    results = [SessionResult([4], [0.0], s.session - 7) for s in request.steps]
    return encode_response(StepResponse(results, facts=facts if request.hello else None))


@pytest.fixture
def by_socket() -> Iterator[Callable[[Wire], Wire]]:
    """The answer of an LLM that names its socket."""
    steps = StepSocket(_answer)

    def answer(wire: Wire) -> Wire:
        response = decode_response(_answer(wire))
        if response.facts is None:
            raise RuntimeError("a step that goes by BLS")
        return encode_response(replace(response, facts=replace(response.facts, socket=steps.name)))

    yield answer
    steps.close()


@pytest.mark.usefixtures("unwrapped")
@pytest.mark.parametrize("client_class", [ThreadedLLMClient, local_llm.LocalLLMClient])
def test_the_routers_part_of_a_call_is_noted(
    client_class: type[ThreadedLLMClient],
    by_socket: Callable[[Wire], Wire],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = served()
    traced.install_router(type(model))

    async def main() -> None:
        call = by_socket if client_class is local_llm.LocalLLMClient else _answer
        client = client_class("slm", call, lambda: None, 30.0, ProcessLifeline())
        await client.hello()
        await client.step(StepRequest(number=3, steps=[SessionStep(7, 0, [5]), SessionStep(8, 0, [5])]))
        client.close()

    asyncio.run(main())
    notes = [note for note in written(model, tmp_path / "token_router.json", monkeypatch) if note[2] == 3]
    launched, *others = notes
    assert launched == ("launched", "slm", 3, {"steps": [7, 8], "opens": 0})
    assert others == [*((what, "slm", 3, None) for what in ("sent", "received")), ("answered", "slm", 3, [8])]
