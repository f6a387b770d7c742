# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter serve` on a real Triton: it serves, survives deaths, drains, and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import grpc
import psutil
import pytest

from tests.triton.servers import wait_until
from tools.client import Answer, Chunk, Generation, GenerationError, TokenRouterClient
from tools.control import ControlClient
from tools.deployment import load_deployment
from tools.run_directory import RunDirectory
from tools.supervisor import RunningServer, running_server

pytestmark = pytest.mark.triton

COMMAND = Path(sys.executable).with_name("tokenrouter")
SERVER = "server: {http_port: 0, grpc_port: 0, metrics_port: 0, startup_timeout_s: 60, drain_timeout_s: 20}\n"
PACED = (
    "models: [{name: slm, engine: {type: paced, step_ms: 5}}, {name: llm, engine: {type: paced, step_ms: 10}}]\n"
    "router: {name: random}\n"
)
START_S, END_S = 60.0, 40.0


class Serve:
    """A `tokenrouter serve` process. output: the lines of its stdout so far. temporary: its own /tmp.

    terminal: it writes to a terminal instead of pipes; closing `lines` closes that.
    """

    def __init__(self, config: Path, temporary: Path, terminal: bool = False) -> None:
        self.temporary = temporary
        ours, its = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            [COMMAND, "serve", config],
            env=os.environ | {"TMPDIR": str(temporary), "TERM": "dumb"},
            stdout=its,
            stderr=its if terminal else subprocess.PIPE,
            text=True,
        )
        os.close(its)
        self.lines = os.fdopen(ours)
        self.output = ""

    def until_serving(self) -> str:
        """The gRPC url."""
        for line in self.lines:
            self.output += line
            if "Ctrl-C" in line:
                found = re.search(r"gRPC +(\S+)", self.output)
                assert found is not None, self.output
                return found[1]
        raise AssertionError(f"it ended: {self.output}{self.process.communicate()[1]}")

    def run(self) -> RunDirectory:
        found = re.search(r"log +(\S+)/triton\.log", self.output)
        assert found is not None, self.output
        return RunDirectory(Path(found[1]))

    def end(self) -> tuple[int, str]:
        """The exit status and what it wrote to stderr."""
        errors = self.process.communicate(timeout=END_S)[1]
        self.lines.close()
        return self.process.returncode, errors


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """Serves a deployment given as YAML."""
    started: list[Serve] = []

    def start(text: str, terminal: bool = False) -> Serve:
        config = tmp_path / "deployment.yaml"
        config.write_text(text)
        started.append(Serve(config, Path(temporary), terminal))
        return started[-1]

    with tempfile.TemporaryDirectory() as temporary:  # not tmp_path: a socket's path has at most 107 characters
        yield start
        for served in started:
            if served.process.poll() is None:
                served.process.terminate()
            served.end()


def assert_nothing_left(run: RunDirectory) -> None:
    assert run.processes() == []
    assert not list(Path("/dev/shm").glob(f"{run.shm_prefix}*"))
    assert not run.path.exists()


def chunks_of(generation: Generation) -> tuple[list[Chunk], GenerationError | None]:
    chunks: list[Chunk] = []
    try:
        for chunk in generation:
            chunks.append(chunk)
    except GenerationError as error:
        return chunks, error
    return chunks, None


def is_answered(url: str, model: str) -> bool:
    try:
        with TokenRouterClient(url, model) as client:
            return len(Answer.of(client.generate(input_ids=[1], max_tokens=3, timeout_s=5)).ids) == 3
    except GenerationError:
        return False


def drained(run: RunDirectory) -> bool:
    return ControlClient(run.path / "control.sock").status().state == "draining"


def test_sigterm_lets_requests_finish_and_leaves_nothing(serve: Callable[..., Serve]) -> None:
    served = serve(PACED + SERVER)
    url = served.until_serving()
    run = served.run()
    assert len(run.processes()) == 4  # tritonserver, token_router, slm, llm
    with TokenRouterClient(url) as client:
        under_way = client.generate(input_ids=[1, 2], max_tokens=300)
        first = next(under_way)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
        served.process.send_signal(signal.SIGTERM)  # make hands its own on: the second one hurries nothing
        assert "stopping" in served.lines.readline()
        wait_until("draining", lambda: drained(run))
        _, refusal = chunks_of(client.generate(input_ids=[1], max_tokens=1))
        rest, error = chunks_of(under_way)
    assert error is None and rest[-1].finish_reason == "length"
    assert len(first.ids) + sum(len(c.ids) for c in rest) == 300
    assert refusal is not None and refusal.status is grpc.StatusCode.UNAVAILABLE
    assert served.end() == (0, "")
    assert_nothing_left(run)


def test_a_second_ctrl_c_ends_the_drain(serve: Callable[..., Serve]) -> None:
    served = serve(PACED + SERVER)
    url = served.until_serving()
    run = served.run()
    with TokenRouterClient(url) as client:
        under_way = client.generate(input_ids=[1], max_tokens=4000)
        next(under_way)
        served.process.send_signal(signal.SIGINT)
        assert "stopping" in served.lines.readline()
        wait_until("draining", lambda: drained(run))
        served.process.send_signal(signal.SIGINT)
        _, error = chunks_of(under_way)
    assert error is not None and error.status is grpc.StatusCode.UNAVAILABLE
    code, errors = served.end()
    assert code == 0 and "1 requests had not finished" in errors
    assert_nothing_left(run)


def test_sigterm_while_it_starts_leaves_nothing(serve: Callable[..., Serve]) -> None:
    served = serve(PACED + SERVER)
    (path,) = wait_until("the run's folder", lambda: list(served.temporary.glob("tokenrouter-*")), START_S)
    run = RunDirectory(path)
    wait_until("tritonserver", run.processes, START_S)
    served.process.terminate()
    assert served.end() == (0, "")
    assert_nothing_left(run)


def test_a_closed_terminal_leaves_nothing(serve: Callable[..., Serve]) -> None:
    served = serve(PACED + SERVER, terminal=True)
    served.until_serving()
    run = served.run()
    served.lines.close()
    served.process.send_signal(signal.SIGHUP)
    served.process.wait(END_S)
    assert_nothing_left(run)


def test_a_dead_tritonserver_ends_it_with_one_line(serve: Callable[..., Serve]) -> None:
    served = serve(PACED + SERVER)
    served.until_serving()
    run = served.run()
    (triton,) = (p for p in run.processes() if "tritonserver" in p.name())
    triton.kill()
    code, errors = served.end()
    assert code == 1
    assert errors.startswith("tokenrouter: tritonserver ended with SIGKILL") and errors.count("\n") == 1
    assert_nothing_left(run)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    deployment = load_deployment("paced")
    ports = deployment.server.model_copy(update={"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    with running_server(deployment.model_copy(update={"server": ports})) as server:
        yield server


@pytest.mark.parametrize("model", ["token_router", "llm"])
def test_a_dead_model_comes_back(server: RunningServer, model: str) -> None:
    before = server.stub_pids()
    psutil.Process(before[model]).kill()
    wait_until("a new process", lambda: server.stub_pids().get(model, before[model]) != before[model], 30)
    for public in ("token_router", "ensemble"):
        wait_until("an answer", lambda public=public: is_answered(server.grpc_url, public), 30)
    after = server.stub_pids()
    assert {name for name in before if before[name] != after[name]} == {model}


def test_a_port_in_use_is_one_line(serve: Callable[..., Serve]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        served = serve(PACED + f"server: {{http_port: {port}, grpc_port: 0, metrics_port: 0}}\n")
        code, errors = served.end()
    assert code == 1
    assert errors == (
        f"tokenrouter: server.http_port: port {port} of 127.0.0.1 is in use; choose another, or 0 for a free one\n"
    )


def broken_weights(path: Path) -> None:
    """A file with the metadata of a model, and no model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("exists", "message"),
    [
        (False, r"models\[0\]\.engine\.weights: got '.*/w\.gguf'; weights '.*/w\.gguf': no such file"),
        (True, r"model 'slm' failed to load: .*w\.gguf.*"),
    ],
)
def test_bad_weights_are_one_line(serve: Callable[..., Serve], tmp_path: Path, exists: bool, message: str) -> None:
    if exists:
        broken_weights(tmp_path / "w.gguf")
    served = serve(
        "models: [{name: slm, engine: {type: llama_cpp, weights: w.gguf}}]\nrouter: {name: single}\n" + SERVER
    )
    code, errors = served.end()
    assert code == 1
    assert re.fullmatch(rf"tokenrouter: {message}\n", errors)
    assert list(served.temporary.iterdir()) == []
