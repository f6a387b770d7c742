# SPDX-License-Identifier: Apache-2.0
"""Which models are on one GPU."""

from __future__ import annotations

from collections import Counter

from python_backends.llm.engines.config import LlamaCppConfig, PacedConfig
from tools.deployment import Deployment

__all__ = ["shares_a_gpu"]


def shares_a_gpu(deployment: Deployment) -> bool:
    """Whether two models of this host are on one GPU: by `memory.devices` where they are given; without them, all
    that use a GPU are taken to be on the same."""
    models = [deployment.models[index] for index in deployment.here]
    on_gpu = [m for m in models if not isinstance(m.engine, PacedConfig) and _uses_gpu(m.engine)]
    if deployment.memory is None:
        return len(on_gpu) > 1
    placed = Counter(device for model in on_gpu for device in set(model.placed_on(deployment.memory)))
    return any(count > 1 for count in placed.values())


def _uses_gpu(engine: object) -> bool:
    return not isinstance(engine, LlamaCppConfig) or engine.gpu_layers != 0
