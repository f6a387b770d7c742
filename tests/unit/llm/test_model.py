# SPDX-License-Identifier: Apache-2.0
"""The backend `llm` before Triton: calls come by two ways, and its runner makes one at a time."""

from __future__ import annotations

import importlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from python_backends.llm.contract import LLMFacts, SessionResult, SessionStep, StepRequest, StepResponse
from python_backends.llm.step_socket import ANSWER, FRAME, socket_address
from python_backends.llm.wire import REQUEST_TENSOR, decode_response, encode_request

FACTS = LLMFacts("slm", "fake", None, 4, 100, 8, 50, (0,), samples=True, kv_tokens=400)


def step(token: int) -> StepRequest:
    return StepRequest([SessionStep(1, 0, [token])])


class Runner:
    """A step's token is that of the request + 1. Every step waits in it for `goes_on`; entered: has come in."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.goes_on = threading.Semaphore(0)

    def execute(self, request: StepRequest) -> StepResponse:
        if request.hello:
            return StepResponse(facts=FACTS)
        self.entered.release()
        self.goes_on.acquire(timeout=10)
        return StepResponse([SessionResult([s.token_ids[-1] + 1], [0.5]) for s in request.steps])


class Rig:
    """The model over a runner, and both ways to it. A request of Triton is a dict of arrays."""

    def __init__(self, model: Any, runner: Runner) -> None:
        self.runner = runner
        self._model = model

    def by_bls(self, request: StepRequest) -> StepResponse:
        ((answer,),) = self._model.execute([{REQUEST_TENSOR: encode_request(request)}])
        return decode_response(answer)

    def by_socket(self, request: StepRequest) -> StepResponse:
        with self.connect() as end:
            return self.ask(end, request)

    def connect(self) -> socket.socket:
        """To the socket that a hello names."""
        facts = self.by_bls(StepRequest(hello=True)).facts
        assert facts is not None and facts.socket is not None
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(10)
        end.connect(socket_address(facts.socket))
        return end

    @staticmethod
    def ask(end: socket.socket, request: StepRequest) -> StepResponse:
        wire = encode_request(request)
        end.sendall(FRAME.pack(wire.nbytes, 0) + wire.tobytes())
        with end.makefile("rb") as answers:
            size, kind = FRAME.unpack(answers.read(FRAME.size))
            assert kind == ANSWER
            return decode_response(np.frombuffer(answers.read(size), dtype=np.int32))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    triton = ModuleType("triton_python_backend_utils")
    vars(triton).update(
        get_input_tensor_by_name=lambda request, name: SimpleNamespace(as_numpy=lambda: request[name]),
        Tensor=lambda name, values: values,
        InferenceResponse=lambda tensors: tensors,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.setitem(sys.modules, "python_backends.llm.model", ModuleType("unused"))  # so that it is taken out again
    del sys.modules["python_backends.llm.model"]
    module = importlib.import_module("python_backends.llm.model")
    runner = Runner()
    monkeypatch.setattr(module, "exit_with_parent", lambda: None)
    monkeypatch.setattr(module, "_build", lambda name, parameters: (runner, SimpleNamespace(close=lambda: None)))
    model = module.TritonPythonModel()
    model.initialize({"model_config": json.dumps({"name": "slm", "parameters": {}})})
    yield Rig(model, runner)
    model.finalize()


@pytest.mark.parametrize("first", ["bls", "socket"])
def test_the_runner_makes_one_call_at_a_time_whichever_way_it_came(rig: Rig, first: str) -> None:
    ways: list[Callable[[StepRequest], StepResponse]] = [rig.by_bls, rig.by_socket]
    one, other = ways if first == "bls" else reversed(ways)
    runner = rig.runner
    with ThreadPoolExecutor(2) as threads:
        try:
            running = threads.submit(one, step(5))
            assert runner.entered.acquire(timeout=10)
            waiting = threads.submit(other, step(6))
            assert not runner.entered.acquire(timeout=0.3)
            runner.goes_on.release()
            assert running.result(10).results[0].token_ids == [6]
            assert runner.entered.acquire(timeout=10)
        finally:
            runner.goes_on.release(2)
        assert waiting.result(10).results[0].token_ids == [7]


def test_a_hello_hangs_up_on_the_router_before(rig: Rig) -> None:
    rig.runner.goes_on.release()
    with rig.connect() as before:
        rig.ask(before, step(5))
        rig.by_bls(StepRequest(hello=True))
        assert before.recv(1) == b""
