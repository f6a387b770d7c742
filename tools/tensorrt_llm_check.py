# SPDX-License-Identifier: Apache-2.0
"""Checking the models of the engine `tensorrt_llm` against this machine: the package, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from python_backends.llm.engines.config import TensorRTLLMConfig
from python_backends.llm.engines.tensorrt_llm.checkpoint import Checkpoint, is_folder, read_checkpoint
from python_backends.llm.engines.tensorrt_llm.package import package_problem
from tools.deployment import Deployment
from tools.problem import Problem

__all__ = ["checkpoint_vocabulary", "tensorrt_llm_problems"]


def tensorrt_llm_problems(deployment: Deployment) -> Iterator[Problem]:
    """What keeps them from starting here. What the package itself lacks shows when a model starts."""
    for index in deployment.here:
        engine = deployment.models[index].engine
        if not isinstance(engine, TensorRTLLMConfig):
            continue
        if (problem := package_problem()) is not None:
            yield Problem(f"models[{index}].engine.type", repr(engine.type), problem)
        if engine.pending == "kept" and engine.max_tokens is None:
            path = f"models[{index}].engine.max_tokens"
            yield Problem(path, "null", "must be given with pending: kept, whose KV nothing can evict")
        try:
            _local_checkpoint(engine)
        except ValueError as error:
            what = str(error).removeprefix("weights: ")
            yield Problem(f"models[{index}].engine.weights", repr(engine.weights), what)


def checkpoint_vocabulary(engine: TensorRTLLMConfig) -> int | None:
    """Its size; None where no local folder says it."""
    try:
        checkpoint = _local_checkpoint(engine)
    except ValueError:
        return None  # a problem of its own
    return None if checkpoint is None else checkpoint.vocab_size


def _local_checkpoint(engine: TensorRTLLMConfig) -> Checkpoint | None:
    """Of weights in a folder; None of a name, which may have to be downloaded. Raises ValueError as read_checkpoint."""
    return read_checkpoint(engine.weights) if is_folder(engine.weights) else None
