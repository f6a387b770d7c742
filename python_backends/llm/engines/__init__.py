# SPDX-License-Identifier: Apache-2.0
"""Engines: what computes the next token. `EngineConfig.type` chooses one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from python_backends.llm.engines.base import Capacity, Engine, EngineError, EngineOutput
from python_backends.llm.engines.config import (
    EngineConfig,
    LlamaCppConfig,
    PacedConfig,
    TensorRTLLMBackendConfig,
    TensorRTLLMConfig,
)
from routers.registry import describe

__all__ = [
    "Capacity",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineOutput",
    "LlamaCppConfig",
    "PacedConfig",
    "TensorRTLLMBackendConfig",
    "TensorRTLLMConfig",
    "build_engine",
    "parse_engine_config",
]


def parse_engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """The `engine` section of a model, checked. Raises ValueError naming field, value and what is allowed."""
    adapter: TypeAdapter[EngineConfig] = TypeAdapter(EngineConfig)
    try:
        return adapter.validate_python(dict(values))
    except ValidationError as error:
        raise ValueError(f"engine: {describe(error)}") from error


def build_engine(config: EngineConfig, name: str, hidden_states: bool) -> Engine:
    """The engine of the model `name`, its weights loaded. hidden_states: whether its steps return them.

    Raises ValueError when the weights aren't there or the engine can't return what is asked for, and
    EngineError when it can't start.
    """
    # each engine is imported where it is chosen: a process with a paced one needn't have llama.cpp
    if isinstance(config, LlamaCppConfig):
        from python_backends.llm.engines.llama_cpp import LlamaCppEngine

        return LlamaCppEngine(config, hidden_states)
    if isinstance(config, TensorRTLLMConfig):
        from python_backends.llm.engines.tensorrt_llm.engine import TensorRTLLMEngine

        return TensorRTLLMEngine(config, hidden_states)
    if isinstance(config, TensorRTLLMBackendConfig):
        raise ValueError("engine: tensorrtllm is a Triton backend of its own; a model of the backend llm can't have it")
    if hidden_states:
        raise ValueError(f"engine: {config.type} has no hidden states; use llama_cpp for a router that needs them")
    from python_backends.llm.engines.paced import PacedEngine

    return PacedEngine(config, name)
