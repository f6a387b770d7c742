# SPDX-License-Identifier: Apache-2.0
"""Which models are on one GPU."""

from __future__ import annotations

from itertools import combinations

from python_backends.llm.engines.config import EngineConfig, LlamaCppConfig, PacedConfig
from tools.deployment import Deployment

__all__ = ["shares_a_gpu"]


def shares_a_gpu(deployment: Deployment) -> bool:
    """Whether two models of this host are on one GPU. One of llama.cpp with layers on GPUs may be on any."""
    engines = [deployment.models[index].engine for index in deployment.here]
    on_gpus = [engine for engine in engines if _uses_gpus(engine)]
    return any(_meet(a, b) for a, b in combinations(on_gpus, 2))


def _uses_gpus(engine: EngineConfig) -> bool:
    if isinstance(engine, LlamaCppConfig):
        return engine.gpu_layers != 0
    return not isinstance(engine, PacedConfig)


def _meet(a: EngineConfig, b: EngineConfig) -> bool:
    if isinstance(a, (LlamaCppConfig, PacedConfig)) or isinstance(b, (LlamaCppConfig, PacedConfig)):
        return True
    return not set(a.gpus).isdisjoint(b.gpus)
