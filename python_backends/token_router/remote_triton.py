# SPDX-License-Identifier: Apache-2.0
"""An LLM's model on a Triton of another host, over gRPC: blocking calls, for threads that do nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from python_backends.llm.contract import StepRequest
from python_backends.llm.wire import REQUEST_TENSOR, RESPONSE_TENSOR, Wire, decode_request, encode_request
from routers import RouterConfig

__all__ = ["LLMLost", "RemoteModel", "RemoteTriton"]

_BACKEND = "llm"
_LOAD_S = 600.0  # for a model to be loaded
_FOREVER_MS = (1 << 31) - 1
# what says nothing of the call, only of the way there: whether the model has got it isn't known
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_ENDED = (
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)
_FAILURES = (grpc.RpcError, ValueError)  # the latter from a channel that was closed meanwhile


class LLMLost(RuntimeError):
    """Nobody has answered, or the model doesn't any more: its sessions are lost."""


@dataclass(frozen=True)
class RemoteModel:
    """What the model there has to be. models: the names of all LLMs, in order, this one's at `index`."""

    models: list[str]
    index: int
    router: RouterConfig

    @property
    def name(self) -> str:
        """Of the Triton model."""
        return self.models[self.index]

    def check(self, config: Any) -> None:
        """Raises ValueError when the model with this ModelConfig is another: every host needs the same deployment."""
        if config.backend != _BACKEND:
            raise ValueError(f"'{self.name}' there has backend '{config.backend}'; allowed: {_BACKEND}")
        told = {key: json.loads(value.string_value) for key, value in config.parameters.items()}
        ours = {"models": self.models, "index": self.index, "router": self.router.model_dump(mode="json")}
        theirs, wanted = _facts(told), _facts(ours)
        for key, value in wanted.items():
            if theirs[key] != value:
                raise ValueError(
                    f"'{self.name}' there was told {key} {theirs[key]!r}, and token_router {value!r};"
                    " both need the same deployment"
                )


def _facts(told: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same on both hosts. Files may lie in different folders."""
    router = told.get("router")
    name, params = (router.get("name"), router.get("params")) if isinstance(router, dict) else (None, None)
    if isinstance(params, dict):
        params = {key: PurePath(value).name if isinstance(value, str) else value for key, value in params.items()}
    return {
        "models": told.get("models"),
        "index": told.get("index"),
        "router": name,
        "router.params": params,
    }


class RemoteTriton:
    """The way to one model there. Each life of the LLM has a connection of its own: with it, the sessions end.

    url: host:port. silence_s: how long an answer to what takes no time may take.

    The heartbeats are calls that any Triton answers (`ask`): pings of HTTP/2 at this rate would have to be allowed
    on the other side. That keepalive is on at all bounds how long TCP goes on with what isn't acknowledged, and so
    how late a call that was given up may still arrive.
    """

    def __init__(self, model: RemoteModel, url: str, silence_s: float) -> None:
        self.url = url
        self._model = model
        self._silence_s = silence_s
        self._options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # no connection in common with another life
            ("grpc.client_idle_timeout_ms", _FOREVER_MS),
            ("grpc.keepalive_time_ms", 600_000),
            ("grpc.keepalive_timeout_ms", int(1000 * silence_s)),
            ("grpc.enable_http_proxy", 0),
        ]
        self._connection: _Connection | None = None

    def connect(self) -> None:
        """Begin a new connection; the one before ends. The model is loaded there if it isn't.

        Raises RuntimeError when nobody is there, the model can't be had, or it is another.
        """
        self.abandon()
        self._connection = connection = _Connection(self.url, self._options, self._model.name)
        try:
            connection.ready(self._silence_s)
            self._model.check(connection.config(self._silence_s))
        except _FAILURES as error:
            self.abandon()
            raise RuntimeError(f"{self.url}: {_said(error)}") from error

    def infer(self, wire: Wire, timeout_s: float | None) -> Wire:
        """Make one call of the model; a hello connects first if there is no connection. Raises LLMLost, and
        RuntimeError with Triton's message when the call failed and the model still answers."""
        if self._connection is None and decode_request(wire).hello:
            self.connect()
        connection = self._connection
        if connection is None:
            raise LLMLost(f"{self.url}: the connection was given up")
        try:
            return connection.infer(wire, timeout_s)
        except _FAILURES as error:
            failure = RuntimeError(f"{self.url}: {_said(error)}")
            answered = isinstance(error, grpc.RpcError) and error.code() not in _NO_ANSWER
        if answered and connection.lives(timeout_s):
            raise failure
        raise LLMLost(str(failure)) from failure

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost`, from some thread, when the present connection ends; perhaps more than once."""
        if self._connection is None:
            lost()
        else:
            self._connection.watch(lost)

    def ask(self, answered: Callable[[str | None], None]) -> None:
        """A heartbeat: `answered` is called, from some thread, with what is wrong; None = nothing."""
        if self._connection is None:
            answered("the connection was given up")
        else:
            self._connection.ask(answered, self._silence_s)

    def abandon(self) -> None:
        """End the connection, and with it every call under way."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Connection:
    """One channel, and what goes over it. Everything here raises grpc.RpcError, or ValueError once it is closed."""

    def __init__(self, url: str, options: list[tuple[str, int]], name: str) -> None:
        self._channel = grpc.insecure_channel(url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._name = name

    def ready(self, timeout_s: float) -> None:
        """Load the model unless it is. Its process may be dead all the same."""
        if not self._stub.ModelReady(service_pb2.ModelReadyRequest(name=self._name), timeout=timeout_s).ready:
            load = service_pb2.RepositoryModelLoadRequest(model_name=self._name)
            self._stub.RepositoryModelLoad(load, timeout=_LOAD_S)

    def config(self, timeout_s: float) -> Any:
        """The model's ModelConfig."""
        return self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=self._name), timeout=timeout_s).config

    def infer(self, wire: Wire, timeout_s: float | None) -> Wire:
        """The model's output tensor for its input tensor."""
        request = service_pb2.ModelInferRequest(model_name=self._name, raw_input_contents=[wire.tobytes()])
        request.inputs.add(name=REQUEST_TENSOR, datatype="INT32", shape=wire.shape)
        request.outputs.add(name=RESPONSE_TENSOR)
        response = self._stub.ModelInfer(request, timeout=timeout_s)
        if not response.raw_output_contents:
            raise ValueError("an answer without a tensor")
        return np.frombuffer(response.raw_output_contents[0], dtype=np.int32)

    def lives(self, timeout_s: float | None) -> bool:
        """Whether the model answers to a step of nobody: Triton itself calls one ready whose process has died."""
        try:
            self.infer(encode_request(StepRequest()), timeout_s)
        except _FAILURES:
            return False
        return True

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost`, from some thread, when the connection ends."""

        def changed(state: Any) -> None:
            if state in _ENDED:
                lost()

        self._channel.subscribe(changed)

    def ask(self, answered: Callable[[str | None], None], timeout_s: float) -> None:
        """Whether the model is ready: to `answered`, None if so."""

        def done(future: Any) -> None:
            try:
                answered(None if future.result().ready else "the model was unloaded there")
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                answered(_said(error))

        request = service_pb2.ModelReadyRequest(name=self._name)
        self._stub.ModelReady.future(request, timeout=timeout_s).add_done_callback(done)

    def close(self) -> None:
        """Ends what is under way too."""
        self._channel.close()


def _said(error: Exception) -> str:
    """What happened, as one line."""
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "it is silent"
        return " ".join(f"{error.details() or error.code().name}".split())
    return " ".join(str(error).split())
