# SPDX-License-Identifier: Apache-2.0
"""A gRPC server that plays the Triton of another host, with one LLM that says what a test wants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from python_backends.llm.contract import LLMFacts, StepRequest, StepResponse
from python_backends.llm.wire import REQUEST_TENSOR, RESPONSE_TENSOR, decode_request, encode_response

__all__ = ["FarTriton", "far_triton"]


class FarTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """fails: what a step is answered with, as INTERNAL; "" = it isn't. dead: so is every call. hangs: calls end when it
    is cleared. told: the parameters in the model's config. calls: those of the model that it got."""

    def __init__(self, port: int = 0) -> None:
        self.calls: list[StepRequest] = []
        self.loads = 0
        self.ready = True
        self.fails = ""
        self.dead = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.answers_late_s = 0.0
        self.has_model = True
        self.backend = "llm"
        self.told: dict[str, Any] = {"models": ["slm", "llm"], "index": 1, "router": {"name": "random", "params": {}}}
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.url = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self) -> None:
        """At once: calls under way fail."""
        stopped = self._server.stop(grace=None)
        self.goes_on.set()
        stopped.wait()

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        time.sleep(self.answers_late_s)
        return service_pb2.ModelReadyResponse(ready=self.ready and self.has_model)

    def RepositoryModelLoad(self, request: Any, context: grpc.ServicerContext) -> Any:
        if not self.has_model:
            context.abort(grpc.StatusCode.INTERNAL, f"failed to load '{request.model_name}', no version is available")
        self.loads += 1
        self.ready = True
        return service_pb2.RepositoryModelLoadResponse()

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        time.sleep(self.answers_late_s)
        reply = service_pb2.ModelConfigResponse()
        reply.config.backend = self.backend
        for key, value in self.told.items():
            reply.config.parameters[key].string_value = json.dumps(value)
        return reply

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:
        step = decode_request(np.frombuffer(request.raw_input_contents[0], dtype=np.int32))
        assert [(i.name, i.datatype, list(i.shape)) for i in request.inputs] == [
            (REQUEST_TENSOR, "INT32", [len(request.raw_input_contents[0]) // 4])
        ]
        self.calls.append(step)
        self.goes_on.wait(30)
        if self.dead or (self.fails and step.steps):
            context.abort(grpc.StatusCode.INTERNAL, self.fails or "Stub process is not healthy")
        facts = LLMFacts("llm", "fake", 1, 4, 100, 8, 50, (0,), samples=True, kv_tokens=400)
        reply = service_pb2.ModelInferResponse(model_name="llm")
        reply.outputs.add(name=RESPONSE_TENSOR, datatype="INT32")
        wire = encode_response(StepResponse(facts=facts if step.hello else None))
        reply.raw_output_contents.append(wire.tobytes())
        return reply


@contextmanager
def far_triton(port: int = 0) -> Iterator[FarTriton]:
    triton = FarTriton(port)
    try:
        yield triton
    finally:
        triton.stop()
