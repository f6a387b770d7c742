# SPDX-License-Identifier: Apache-2.0
"""The demo, with a server that plays Triton in the place of the one that it would start."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
import typer
import yaml

from routers import RouterConfig
from tests.unit.client.fake_triton import FakeTriton
from tools import own_server as module
from tools.client import TokenRouterClient
from tools.demo import demo
from tools.deployment import Deployment, load_deployment
from tools.errors import UserError


@pytest.fixture
def stage(
    triton: tuple[FakeTriton, TokenRouterClient], monkeypatch: pytest.MonkeyPatch
) -> tuple[FakeTriton, SimpleNamespace]:
    """The fake server and what happened: the models fetched, the deployment started, whether it was stopped."""
    fake, _ = triton
    seen = SimpleNamespace(fetched=[], deployment=None, stopped=False, at_end=lambda: None)

    @contextmanager
    def running(deployment: Deployment) -> Iterator[SimpleNamespace]:
        seen.deployment = deployment
        try:
            yield SimpleNamespace(grpc_url=fake.url, deployment=deployment)
        finally:
            seen.at_end()
            seen.stopped = True

    monkeypatch.setattr(module, "fetch", seen.fetched.append)
    monkeypatch.setattr(module, "running_server", running)
    return fake, seen


def overrides(fake: FakeTriton) -> list[Any]:
    tensors = [{i.name: i.contents for i in request.inputs} for request in fake.requests]
    return [json.loads(t["router_params"].bytes_contents[0]) if "router_params" in t else None for t in tensors]


def test_asks_once_routed_and_once_of_each_model_alone(
    stage: tuple[FakeTriton, SimpleNamespace], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, seen = stage
    demo("smollm2", question="Why?", max_tokens=5)
    assert overrides(fake) == [None, {"tau": 1.0}, {"tau": 0.0}]
    assert seen.fetched == ["smollm2-135m-q4_0", "smollm2-135m-q8_0"]
    assert seen.deployment.server.grpc_port == 0
    assert seen.stopped
    shown = capsys.readouterr().out
    assert shown.count("Hé«llo»\n") == 3
    last_table = shown[shown.rindex("slm + llm") :]
    for row in ("slm alone", "llm alone", "2 (67%)", "1 (33%)"):
        assert row in last_table


def test_no_compare_asks_once(stage: tuple[FakeTriton, SimpleNamespace]) -> None:
    fake, _ = stage
    demo("smollm2", compare=False)
    assert overrides(fake) == [None]


def test_a_router_that_must_sample_gets_no_greedy_question(
    stage: tuple[FakeTriton, SimpleNamespace], tmp_path: Path
) -> None:
    fake, _ = stage
    for router, temperatures in {"me": [1.0], "rstitch": []}.items():
        given = load_deployment("smollm2").model_copy(update={"router": RouterConfig(name=router)})
        (tmp_path / "d.yaml").write_text(yaml.safe_dump(given.model_dump(mode="json")))
        demo(tmp_path / "d.yaml", compare=False)
        sent = {i.name: i.contents for i in fake.requests.pop().inputs}
        assert [v for name, c in sent.items() if name == "temperature" for v in c.fp32_contents] == temperatures


def test_ctrl_c_stops_the_server(stage: tuple[FakeTriton, SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any, chunk: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.coloring.Painter.write", interrupt)
    with pytest.raises(typer.Exit) as caught:
        demo("smollm2")
    assert caught.value.exit_code == 130
    assert stage[1].stopped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_and_leaves_the_handlers_as_they_were(
    stage: tuple[FakeTriton, SimpleNamespace], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def end(self: Any, chunk: Any) -> None:
        signal.raise_signal(number)

    before = signal.getsignal(number)
    monkeypatch.setattr("tools.coloring.Painter.write", end)
    with pytest.raises(SystemExit) as caught:
        demo("smollm2")
    assert caught.value.code == 128 + number
    assert stage[1].stopped
    assert signal.getsignal(number) is before


def test_a_second_sigterm_does_not_disturb_the_end(
    stage: tuple[FakeTriton, SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """make hands on the SIGTERM that it gets, so that two come at once."""

    def end(self: Any, chunk: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("tools.coloring.Painter.write", end)
    stage[1].at_end = lambda: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        demo("smollm2")
    assert caught.value.code == 128 + signal.SIGTERM
    assert stage[1].stopped


def test_a_failing_request_is_one_line(stage: tuple[FakeTriton, SimpleNamespace]) -> None:
    fake, seen = stage

    def fail(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.abort(grpc.StatusCode.UNAVAILABLE, "model 'llm' is down")
        yield

    fake.script = fail
    with pytest.raises(UserError, match="UNAVAILABLE: model 'llm' is down"):
        demo("smollm2")
    assert seen.stopped


def test_a_deployment_without_a_tokenizer_is_refused_before_anything_starts(
    stage: tuple[FakeTriton, SimpleNamespace],
) -> None:
    with pytest.raises(UserError, match="tokenizer"):
        demo("paced")
    assert stage[1].deployment is None
