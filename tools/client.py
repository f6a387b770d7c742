# SPDX-License-Identifier: Apache-2.0
"""A streaming client of the public model, for the demo, the chat, the benchmarks and the tests.

It speaks the KServe gRPC protocol through tritonclient's generated messages, one stream for each
generation, and not through `InferenceServerClient`: that one allows a single stream at a time, hides the
status of an error, and leaves a thread behind for every stream it cancels.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc  # type: ignore[import-untyped]
from pydantic import ValidationError
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.public import INPUTS, REFUSED_INPUTS

__all__ = ["Answer", "Chunk", "Generation", "GenerationError", "TokenRouterClient"]

# Triton data type in config.pbtxt -> (data type on the wire, field of InferTensorContents)
_WIRE = {
    "TYPE_STRING": ("BYTES", "bytes_contents"),
    "TYPE_INT32": ("INT32", "int_contents"),
    "TYPE_UINT64": ("UINT64", "uint64_contents"),
    "TYPE_FP32": ("FP32", "fp32_contents"),
    "TYPE_BOOL": ("BOOL", "bool_contents"),
}
_OUTPUTS = ("text_output", "output_ids", "output_models", "finish_reason", "usage")  # each one costs the server time
_JSON_INPUTS = frozenset({"messages", "router_params"})
# Without this header Triton reports an error inside the stream, as a text without a status.
_METADATA = (("triton_grpc_error", "true"),)
_RUNTIME_TIMEOUT_S = 20.0  # for a question that takes Triton no time
_CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class GenerationError(Exception):
    """A request was refused, failed or was cancelled. status: the gRPC status; message: the server's."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
        self.message = message

    @property
    def refused(self) -> bool:
        """Whether the request can't be served as it is: asked again, it would be refused again."""
        return self.status is grpc.StatusCode.INVALID_ARGUMENT

    def told(self) -> str:
        """What a user of a command is told."""
        return f"the server refused a question: {self.message}" if self.refused else f"the server didn't answer: {self}"


@dataclass(frozen=True)
class Chunk:
    """One response.

    text: the new text. ids: the new token ids. models: the model that made each of them.
    log_probs: of each, when asked for; else empty.
    finish_reason: in the last chunk "stop" or "length"; before it "".
    usage: in the last chunk the counts of the whole answer (see `public.OUTPUTS`); before it empty.
    received_at: time.monotonic(), in seconds.
    """

    text: str
    ids: tuple[int, ...]
    models: tuple[str, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    usage: Mapping[str, Any]
    received_at: float


class Generation(Iterator[Chunk]):
    """One answer under way: iterate over its chunks. sent_at: time.monotonic() when it was sent.

    Iterating raises GenerationError when the request is refused, fails or is cancelled.
    """

    def __init__(self, call: Any, sent_at: float) -> None:
        self.sent_at = sent_at
        self._call = call
        self._finished = False

    def __next__(self) -> Chunk:
        # The call is read to its own end, past the final chunk: one that is dropped before it counts as
        # cancelled, which the server would see while it is still sending.
        for response in self._responses():
            if response.error_message:
                raise GenerationError(grpc.StatusCode.UNKNOWN, response.error_message)
            if response.infer_response.outputs:  # a response of flags only has none
                chunk = _chunk(InferResult(response.infer_response))
                self._finished = bool(chunk.finish_reason)
                return chunk
        if not self._finished:
            raise GenerationError(grpc.StatusCode.UNKNOWN, "the stream ended without a final response")
        raise StopIteration

    def _responses(self) -> Iterator[Any]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise GenerationError(error.code(), error.details() or "no details") from None

    def cancel(self) -> None:
        """Ends the answer on the server too. Safe from any thread, and after the end."""
        if not self._finished:
            self._call.cancel()


@dataclass
class Answer:
    """A whole answer with its times: what `for chunk in generation` adds up to.

    ids, models: the tokens and the model that made each. usage, finish_reason: of the last chunk.
    Times are time.monotonic(), in seconds; first_at and last_at are those of chunks that hold tokens.
    """

    sent_at: float
    text: str = ""
    ids: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_at: float | None = None
    last_at: float | None = None
    _first_tokens: int = 0

    @classmethod
    def of(cls, generation: Generation) -> Answer:
        """Waits for the end. Raises GenerationError as iterating does."""
        answer = cls(generation.sent_at)
        for chunk in generation:
            answer.add(chunk)
        return answer

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk in."""
        if chunk.ids:
            if self.first_at is None:
                self.first_at, self._first_tokens = chunk.received_at, len(chunk.ids)
            self.last_at = chunk.received_at
        self.text += chunk.text
        self.ids += chunk.ids
        self.models += chunk.models
        self.finish_reason = chunk.finish_reason
        self.usage = chunk.usage

    @property
    def tokens_by_model(self) -> Counter[str]:
        """How many of the tokens each model made."""
        return Counter(self.models)

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first chunk with a token; None before it."""
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first chunk, so that the prompt doesn't count; None with one chunk only."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return None
        return (len(self.ids) - self._first_tokens) / (self.last_at - self.first_at)


class TokenRouterClient:
    """A connection to a server. Threads may share it; each `generate` is a stream of its own.

    url: host:port of the gRPC endpoint. model: the public model's name.
    """

    def __init__(self, url: str, model: str = "token_router") -> None:
        self._model = model
        self._channel = grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._latest: Generation | None = None

    def __enter__(self) -> TokenRouterClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def generate(
        self,
        *,
        text: str | bytes | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        stream: bool = True,
        timeout_s: float | None = None,
        **params: Any,
    ) -> Generation:
        """Sends a request and gives its chunks as they come.

        text, messages, input_ids: the prompt; the server wants exactly one of them.
        params: any other input of `public.INPUTS`; `router_params` and `messages` as Python values.
        timeout_s: after it the request is cancelled and iterating raises DEADLINE_EXCEEDED.
        Raises ValueError for an input that the public model doesn't have or a value not of its type.
        """
        values = {"text_input": text, "messages": messages, "input_ids": input_ids, "max_tokens": max_tokens}
        request = service_pb2.ModelInferRequest(model_name=self._model)
        for name, value in {**values, "stream": stream, **params}.items():
            if value is not None:
                request.inputs.append(_input(name, value))
        wanted = [*_OUTPUTS, "output_log_probs"] if params.get("return_log_probs") else _OUTPUTS
        request.outputs.extend(service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=n) for n in wanted)
        sent_at = time.monotonic()
        call = self._stub.ModelStreamInfer(iter([request]), metadata=_METADATA, timeout=timeout_s)
        self._latest = Generation(call, sent_at)
        return self._latest

    def runtime(self, timeout_s: float = _RUNTIME_TIMEOUT_S) -> RuntimeConfig:
        """What the server's public model was told: its models' names, its router, its limits.

        Raises GenerationError when the server can't be reached, doesn't answer in time, has no such model, or one that
        this version of tokenrouter doesn't know.
        """
        request = service_pb2.ModelConfigRequest(name=self._model)
        try:
            config = self._stub.ModelConfig(request, timeout=timeout_s).config
        except grpc.RpcError as error:
            raise GenerationError(error.code(), error.details() or "no details") from None
        try:
            return RuntimeConfig.model_validate_json(config.parameters["runtime"].string_value)
        except ValidationError as error:
            raise GenerationError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"model '{self._model}' is of another version of tokenrouter: {error.errors()[0]['msg']}",
            ) from error

    def cancel(self) -> None:
        """Cancels the generation begun last; with several at once, use their own `cancel`."""
        if self._latest is not None:
            self._latest.cancel()

    def close(self) -> None:
        """Closes the connection and cancels what runs on it."""
        self._channel.close()


def _input(name: str, value: Any) -> Any:
    """A Python value as the ModelInferRequest.InferInputTensor called `name`, of shape [1, n]."""
    tensor = INPUTS.get(name) or REFUSED_INPUTS.get(name)
    if tensor is None:
        raise ValueError(f"{name}: the public model has no such input; it has {', '.join(INPUTS)}")
    if name in _JSON_INPUTS and not isinstance(value, (str, bytes)):
        value = json.dumps(value)
    data_type, contents = _WIRE[tensor.data_type]
    items = [value] if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) else list(value)
    if data_type == "BYTES":
        items = [item.encode() if isinstance(item, str) else item for item in items]
    try:
        return service_pb2.ModelInferRequest.InferInputTensor(
            name=name, datatype=data_type, shape=[1, len(items)], contents={contents: items}
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {value!r} can't be sent as {data_type}: {error}") from None


def _chunk(result: Any) -> Chunk:
    """A tritonclient InferResult as a Chunk."""

    def values(name: str) -> list[Any]:
        tensor = result.as_numpy(name)
        return [] if tensor is None else tensor.reshape(-1).tolist()

    def text(name: str) -> str:
        return "".join(item.decode() for item in values(name))

    usage = text("usage")
    return Chunk(
        text=text("text_output"),
        ids=tuple(values("output_ids")),
        models=tuple(item.decode() for item in values("output_models")),
        log_probs=tuple(values("output_log_probs")),
        finish_reason=text("finish_reason"),
        usage=json.loads(usage) if usage else {},
        received_at=time.monotonic(),
    )
