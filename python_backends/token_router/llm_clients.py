# SPDX-License-Identifier: Apache-2.0
"""Triton's side of the LLMs: the client of each, made from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backends.llm.wire import REQUEST_TENSOR, RESPONSE_TENSOR, Wire
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.lifeline import ProcessLifeline
from python_backends.token_router.llm_client import LLMClient, ThreadedLLMClient
from python_backends.token_router.local_llm import LocalLLMClient
from python_backends.token_router.model_loading import reloader
from python_backends.token_router.remote_llm import remote_llm_client
from python_backends.token_router.stock_client import StockLLMClient
from python_backends.token_router.stock_engine import Infer, Tensors

__all__ = ["llm_client"]


def llm_client(index: int, config: RuntimeConfig) -> LLMClient:
    """The way to LLM number `index`. To be called in the event loop's thread; nothing is sent yet."""
    llm, limits = config.models[index], config.limits
    name = llm.name
    if llm.url is not None:
        return remote_llm_client(index, config)
    if llm.engine is not None:
        return StockLLMClient(index, config, llm.engine, _bls_infer(name), reloader(name))
    client = LocalLLMClient if config.transport == "socket" else ThreadedLLMClient
    return client(name, _bls_call(name), reloader(name), limits.step_timeout_s, ProcessLifeline())


def _bls_call(name: str) -> Callable[[Wire], Wire]:
    """The blocking call of LLM `name`: its input tensor to its output tensor."""

    def call(wire: Wire) -> Wire:
        request = pb_utils.InferenceRequest(
            model_name=name,
            inputs=[pb_utils.Tensor(REQUEST_TENSOR, wire)],
            requested_output_names=[RESPONSE_TENSOR],
        )
        response = request.exec()
        if response.has_error():
            raise RuntimeError(response.error().message())
        # a copy: the tensor's memory is Triton's, and goes back with the response
        return np.array(response.output_tensors()[0].as_numpy())

    return call


def _bls_infer(name: str) -> Infer:
    """The blocking call of stock model `name`."""

    def infer(request_id: str, inputs: Tensors, outputs: Sequence[str]) -> Tensors:
        request = pb_utils.InferenceRequest(
            model_name=name,
            request_id=request_id,
            inputs=[pb_utils.Tensor(tensor, array) for tensor, array in inputs.items()],
            requested_output_names=list(outputs),
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
        )
        response = request.exec()
        if response.has_error():
            raise RuntimeError(response.error().message())
        return {tensor.name(): np.array(tensor.as_numpy()) for tensor in response.output_tensors()}

    return infer
