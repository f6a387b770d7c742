# SPDX-License-Identifier: Apache-2.0
"""A host that only has LLMs, and the host of their token_router: what each renders, checks, serves and looks after."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tools import supervisor as module
from tools.commands.validate import validate
from tools.deployment import Deployment, load_node
from tools.errors import UserError
from tools.llm_watcher import LLMWatcher
from tools.machine import machine_problems, memory_needed
from tools.repository import configs, render
from tools.supervisor import Supervisor
from tools.triton_server import TritonError
from tools.watcher import ServerDied

YAML = """
models:
  - {name: slm, engine: {type: paced, vocab_size: 1000}}
  - {name: llm, url: "gpu2:8001", engine: {type: llama_cpp, weights: is-only-there.gguf}}
  - {name: xl, url: "[fd00::3]:8001", engine: {type: paced, vocab_size: 1000}}
router: {name: markov, params: {p: [[1, 0, 0], [1, 0, 0], [1, 0, 0]], c: [[1, 1, 1], [1, 1, 1], [1, 1, 1]]}}
server: {http_port: 0, grpc_port: 0, metrics_port: 0}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "d.yaml"
    path.write_text(YAML)
    return path


def test_each_host_renders_what_it_serves(config: Path, tmp_path: Path) -> None:
    router, node = load_node(config, None), load_node(config, "llm, xl")
    assert list(configs(router)) == ["slm", "token_router", "ensemble"]
    assert [(llm.name, llm.url) for llm in router.runtime().models] == [
        ("slm", None), ("llm", "gpu2:8001"), ("xl", "[fd00::3]:8001"),
    ]  # fmt: skip
    assert render(node, tmp_path / "r") == ["llm", "xl"]
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"llm", "xl"}
    everything = {**configs(router), **configs(node)}
    alone = Deployment.model_validate(
        {**router.model_dump(), "models": [{**m.model_dump(), "url": None} for m in router.models]}
    )
    for name in ("slm", "llm", "xl"):  # a model is told the same wherever it is
        assert everything[name] == configs(alone)[name]


def test_weights_are_looked_for_where_they_are_served(config: Path) -> None:
    assert machine_problems(load_node(config, None)) == []
    (problem,) = machine_problems(load_node(config, "llm,xl"))
    assert problem.path == "models[1].engine.weights"
    assert memory_needed(load_node(config, "xl")) == memory_needed(load_node(config, None)) / 2  # one process, and two


def test_validate_names_what_it_has_checked(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(str(config), "xl") and capsys.readouterr().out.startswith("ok: xl, router markov")
    assert validate(str(config)) and capsys.readouterr().out.startswith("ok: slm + llm + xl, router markov")


def test_the_context_is_the_smallest_of_all_hosts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(YAML.replace("vocab_size: 1000}}\nrouter", "vocab_size: 1000, context_tokens: 128}}\nrouter"))
    assert validate(str(config)) and "context 128 tokens" in capsys.readouterr().out
    config.write_text(config.read_text().replace("name: slm,", "name: slm, url: 'gpu1:8001',"))
    assert validate(str(config)) and "context 128 tokens" in capsys.readouterr().out  # none is here


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("llmm", "--only: no model 'llmm' (did you mean 'llm'?); allowed: llm, xl"),
        ("slm", "--only: 'slm' has no url: the host of token_router serves it; allowed: llm, xl"),
        (" , ", "--only: names no model; allowed: llm, xl"),
    ],
)
def test_a_host_of_models_that_there_are_not(config: Path, only: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_node(config, only)
    assert str(error.value) == message


def test_a_deployment_of_one_host_has_no_such_models() -> None:
    with pytest.raises(UserError, match="allowed: none, since no model has a url"):
        load_node("paced", "llm")


class FakeTriton:
    """Two models. executed, pending: what its metrics say."""

    grpc_url = http_url = metrics_url = "unused"
    log_path = Path("unused")
    pid = 0

    def __init__(self, *_: object) -> None:
        self.stubs = {name: subprocess.Popen(["sleep", "60"]) for name in ("llm", "xl")}
        self.executed = {"llm": 1, "xl": 1}
        self.pending = {"llm": 0, "xl": 0}
        self.reloads: list[str] = []
        self.refuses = self.ended = self.silent = self.stopped = False

    def start(self, more: object = None) -> None: ...

    def is_ready(self) -> bool:
        return True

    def load_failure(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True

    def returncode(self) -> int | None:
        return 1 if self.ended else None

    def how_it_ended(self) -> str:
        return "it ended"

    def stub_pids(self) -> dict[str, int]:
        return {name: stub.pid for name, stub in self.stubs.items() if stub.poll() is None}

    def metrics(self) -> str:
        if self.silent:
            raise TritonError("silent")
        return "".join(
            f'# HELP nv_inference_exec_count that\nnv_inference_exec_count{{model="{name}",version="1"}} {count}\n'
            f'nv_inference_pending_request_count{{model="{name}",version="1"}} {self.pending[name]}\n'
            for name, count in self.executed.items()
        )

    def reload(self, model: str) -> None:
        if self.refuses:
            raise TritonError("no")
        self.reloads.append(model)
        self.stubs[model] = subprocess.Popen(["sleep", "60"])


class Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.triton = FakeTriton()
        triton: Any = self.triton
        self.watcher = LLMWatcher(triton, ["llm", "xl"], 10.0, lambda: self.now)

    def look_after(self, *seconds: float) -> list[str]:
        """What is reloaded by looks that come so much later, each."""
        before = len(self.triton.reloads)
        for pause_s in seconds:
            self.now += pause_s
            self.watcher.look()
        return self.triton.reloads[before:]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    started = list(scene.triton.stubs.values())
    yield scene
    for stub in {*started, *scene.triton.stubs.values()}:
        stub.kill()
        stub.wait()


def test_the_end_of_triton_is_told(scene: Scene) -> None:
    scene.triton.ended = True
    with pytest.raises(ServerDied, match="it ended"):
        scene.watcher.look()


def test_a_dead_llm_is_loaded_again_until_that_works(scene: Scene) -> None:
    assert scene.look_after(2, 100) == []
    dead = scene.triton.stubs["llm"]
    dead.kill()
    psutil.wait_procs([psutil.Process(dead.pid)], timeout=5)
    scene.triton.refuses = True
    assert scene.look_after(2) == []
    scene.triton.refuses = False
    assert scene.look_after(2, 2) == ["llm"]


def test_an_llm_hangs_when_calls_wait_and_none_ends(scene: Scene) -> None:
    hangs = scene.triton.stubs["xl"]
    scene.triton.pending = {"llm": 1, "xl": 1}
    for _ in range(4):
        scene.triton.executed["llm"] += 1  # long steps, but they end
        assert scene.look_after(4) == []
    assert hangs.wait(5) != 0 and scene.triton.stubs["llm"].poll() is None
    assert scene.look_after(1) == ["xl"]
    scene.triton.executed["xl"] = 0
    assert scene.look_after(9, 1) == []  # its time begins anew


def test_one_that_dies_just_before_it_is_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(process: psutil.Process) -> None:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "kill", gone)
    scene.triton.pending["xl"] = 1
    assert scene.look_after(4, 4, 4, 4) == []


def test_one_without_work_does_not_hang(scene: Scene) -> None:
    assert scene.look_after(4, 60, 600) == []
    scene.triton.silent = True
    assert scene.look_after(60, 600) == []
    assert all(stub.poll() is None for stub in scene.triton.stubs.values())


def test_the_supervisor_serves_them_without_a_token_router(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    triton = FakeTriton()
    monkeypatch.setattr(module, "find_triton", lambda: None)
    monkeypatch.setattr(module, "TritonServer", lambda *_: triton)
    monkeypatch.setattr(module, "FirstToken", SimpleNamespace)  # which couldn't be made: nobody routes
    supervisor = Supervisor(load_node(config, "xl"))
    try:
        server = supervisor.start()
        assert server is not None and server.stub_pids().keys() == {"llm", "xl"}
        assert "server.host: 127.0.0.1; no other host can reach the models here" in caplog.text
        supervisor.quit.set()
        supervisor.watch()
    finally:
        supervisor.stop(drain=True)
        for stub in triton.stubs.values():
            stub.kill()
            stub.wait()
    assert triton.stopped
