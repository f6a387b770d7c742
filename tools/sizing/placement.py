# SPDX-License-Identifier: Apache-2.0
"""Which model is on which device of `memory`, and on which GPU."""

from __future__ import annotations

from collections.abc import Iterator

from python_backends.llm.engines.config import EngineConfig, TensorRTLLMBackendConfig, TensorRTLLMConfig
from tools.config_errors import did_you_mean
from tools.deployment import Deployment, ModelConfig
from tools.problem import Problem
from tools.sizing.config import MemoryConfig

__all__ = ["placement_problems"]


def placement_problems(deployment: Deployment) -> Iterator[Problem]:
    """What is wrong with which model is on which device."""
    memory = deployment.memory
    servers: dict[str | None, _Server] = {}
    for index, model in enumerate(deployment.models):
        if memory is None:
            if model.devices:
                path = f"models[{index}].devices"
                yield Problem(path, repr(model.devices), "are names of memory.devices, and there is no memory")
        elif (problem := _names(index, model, memory)) is not None:
            yield problem
        else:
            yield from servers.setdefault(model.url, _Server()).place(index, model, memory)


def _names(index: int, model: ModelConfig, memory: MemoryConfig) -> Problem | None:
    path, value = f"models[{index}].devices", repr(model.devices)
    names, placed = list(memory.devices), model.placed_on(memory)
    if unknown := [name for name in placed if name not in names]:
        hint = did_you_mean(unknown[0], names)
        return Problem(path, value, f"'{unknown[0]}' is not in memory.devices{hint}; allowed: {', '.join(names)}")
    if len(set(placed)) != len(placed):
        return Problem(path, value, "must name each device once")
    if len(placed) != (ranks := _ranks(model.engine)):
        return Problem(path, value, f"must name {ranks} of {', '.join(names)}: one for each rank of the engine")
    return None


def _ranks(engine: EngineConfig) -> int:
    return engine.tensor_parallel if isinstance(engine, (TensorRTLLMBackendConfig, TensorRTLLMConfig)) else 1


class _Server:
    """One Triton, whose models count the same GPUs: a device of `memory` is one of them, and the other way round.

    Models of other engines are not looked at: they have no field that says where they are."""

    def __init__(self) -> None:
        self._gpus: dict[str, tuple[int, str]] = {}  # device -> its GPU, and the model that says so
        self._devices: dict[int, tuple[str, str]] = {}  # the other way round

    def place(self, index: int, model: ModelConfig, memory: MemoryConfig) -> Iterator[Problem]:
        """At most one: what contradicts the models before it."""
        engine = model.engine
        if not isinstance(engine, (TensorRTLLMBackendConfig, TensorRTLLMConfig)):
            return
        for device, gpu in zip(model.placed_on(memory), engine.gpus, strict=True):
            known, by = self._gpus.setdefault(device, (gpu, model.name))
            other, of = self._devices.setdefault(gpu, (device, model.name))
            if known != gpu:
                what = f"is on GPU {gpu} for device '{device}', which is GPU {known} for model '{by}'; allowed: {known}"
            elif other != device:
                what = (
                    f"is on GPU {gpu} for device '{device}', and model '{of}' for device '{other}'; allowed: a GPU of"
                    " its own for each device"
                )
            else:
                continue
            value = "null" if engine.gpu_device_ids is None else repr(engine.gpu_device_ids)
            hint = f"null is {list(engine.gpus)}" if engine.gpu_device_ids is None else ""
            yield Problem(f"models[{index}].engine.gpu_device_ids", value, what, hint)
            return
