# SPDX-License-Identifier: Apache-2.0
"""The Triton backend `llm`: one language model and its router, behind the step contract.

The file's parameters, as `tokenrouter prepare` writes them into config.pbtxt: `engine` and `router`, JSON
of EngineConfig and RouterConfig; `models`, JSON list of all models' names in order; `index`, this one's.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import torch
import triton_python_backend_utils as pb
from pydantic import ValidationError

from python_backends.llm.engines import (
    Engine,
    EngineConfig,
    EngineError,
    LlamaCppConfig,
    TensorRTLLMConfig,
    build_engine,
    parse_engine_config,
)
from python_backends.llm.runner import LLMRunner
from python_backends.llm.step_socket import StepSocket
from python_backends.llm.wire import REQUEST_TENSOR, RESPONSE_TENSOR, Wire, decode_request, encode_response
from python_backends.stub import exit_with_parent
from routers import RouterConfig
from routers.registry import describe

__all__ = ["TritonPythonModel"]


class TritonPythonModel:
    """What Triton's Python stub drives: initialize, execute for every call, finalize. Steps come by a socket too."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights. Raises TritonModelException with one line that says what is wrong."""
        exit_with_parent()
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        try:
            self._runner, self._engine = _build(config["name"], parameters)
        except (ValueError, EngineError) as error:
            raise pb.TritonModelException(f"{config['name']}: {error}") from error
        self._one_at_a_time = threading.Lock()
        try:
            self._socket = StepSocket(self._answer)
        except OSError as error:
            self._engine.close()
            raise pb.TritonModelException(f"{config['name']}: no socket for its steps: {error}") from error

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request; what fails is that request only."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            answer = self._answer(_tensor(request))
        except ValueError as error:
            return _refusal(error, pb.TritonError.INVALID_ARG)
        except Exception as error:  # the stub would live, but answer with a traceback
            return _refusal(error, pb.TritonError.INTERNAL)
        return pb.InferenceResponse([pb.Tensor(RESPONSE_TENSOR, answer)])

    def _answer(self, wire: Wire) -> Wire:
        """Of a call, whichever way it came. Raises ValueError when it contradicts itself."""
        request = decode_request(wire)
        if request.hello:
            self._socket.hang_up()  # of the router before this one nothing more may come
        with self._one_at_a_time:
            response = self._runner.execute(request)
        if response.facts is not None:
            response = replace(response, facts=replace(response.facts, socket=self._socket.name))
        return encode_response(response)

    def finalize(self) -> None:
        """Give the weights' memory back."""
        self._socket.close()
        self._engine.close()


def _build(name: str, parameters: dict[str, str]) -> tuple[LLMRunner, Engine]:
    """The model's runner and its engine, weights loaded. Raises ValueError and EngineError as they do."""
    config = parse_engine_config(json.loads(parameters["engine"]))
    try:
        router_config = RouterConfig.model_validate_json(parameters["router"])
    except ValidationError as error:
        raise ValueError(f"router: {describe(error)}") from error
    index = int(parameters["index"])
    router = router_config.router(index, json.loads(parameters["models"]))
    if not isinstance(config, TensorRTLLMConfig) or config.tensor_parallel > 1:
        torch.set_num_threads(_torch_threads(config))  # else they only load the weights: all else is on the GPU
    engine = build_engine(config, name, router.needs_hidden_states)
    try:
        return LLMRunner(name, index, engine, router, router_config), engine
    except (ValueError, EngineError):
        engine.close()
        raise


def _torch_threads(config: EngineConfig) -> int:
    """For sampling and routing on the CPU. With more than one, torch adds up a lone row in parts and many rows whole,
    so a routing signal would depend, in its last bit, on who else is in the batch."""
    return config.threads if isinstance(config, LlamaCppConfig) and not config.deterministic else 1


def _tensor(request: Any) -> Wire:
    wire: Wire = pb.get_input_tensor_by_name(request, REQUEST_TENSOR).as_numpy()
    return wire


def _refusal(error: Exception, code: int) -> Any:
    return pb.InferenceResponse(error=pb.TritonError(f"{type(error).__name__}: {error}", code))
