# SPDX-License-Identifier: Apache-2.0
"""A gRPC server that plays Triton with a public model that says what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from python_backends.token_router.config import LLMConfig, RuntimeConfig

__all__ = ["FakeTriton", "response", "two_chunks"]

Script = Callable[[Any, grpc.ServicerContext], Iterator[Any]]


def response(text: str, ids: list[int], model: str, finish_reason: str = "", usage: str = "") -> Any:
    """A ModelStreamInferResponse as the public model sends it: every tensor [1, n], raw contents."""
    reply = service_pb2.ModelStreamInferResponse()
    for name, values in {
        "text_output": [text],
        "output_models": [model] * len(ids),
        "finish_reason": [finish_reason],
        "usage": [usage],
    }.items():
        reply.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1, len(values)])
        raw = serialize_byte_tensor(np.array([v.encode() for v in values], dtype=np.object_))
        reply.infer_response.raw_output_contents.append(raw.item() if raw.size else b"")
    reply.infer_response.outputs.add(name="output_ids", datatype="INT32", shape=[1, len(ids)])
    reply.infer_response.raw_output_contents.append(np.array(ids, dtype=np.int32).tobytes())
    return reply


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers each stream with `script(request, context)` and keeps what it was sent."""

    url: str

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.script: Script = two_chunks
        self.runtime = RuntimeConfig(
            models=[LLMConfig(name="slm"), LLMConfig(name="llm")], tokenizer="smollm2"
        ).model_dump_json()

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        self.metadata.append(dict(context.invocation_metadata()))
        for request in request_iterator:
            self.requests.append(request)
            yield from self.script(request, context)

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        reply = service_pb2.ModelConfigResponse()
        reply.config.parameters["runtime"].string_value = self.runtime
        return reply


def two_chunks(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
    yield response("Hé", [5, 6], "slm")
    yield response("llo", [7], "llm", "stop", '{"prompt_tokens": 3, "handoffs": 1}')
