# SPDX-License-Identifier: Apache-2.0
"""Checking that the parts of a deployment fit each other, and this machine, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from python_backends.token_router.threshold.network import MAX_MODELS
from routers import Algorithm, BaseRouter
from tools.deployment import Deployment
from tools.errors import UserError
from tools.machine import machine_problems
from tools.problem import Problem
from tools.sizing.joint import placement_problems, sized

__all__ = ["check", "config_problems", "require_valid"]

# type of engine -> what its steps can give a router
_PROVIDES = {
    "llama_cpp": frozenset({"logits", "hidden_states", "embeddings", "sampling"}),
    "paced": frozenset[str](),
    "tensorrt_llm": frozenset({"logits", "sampling"}),
    "tensorrtllm": frozenset({"logits", "sampling"}),  # with return_logits
}


def check(deployment: Deployment) -> list[Problem]:
    """Everything that would keep the deployment from serving on this machine."""
    problems = config_problems(deployment)
    try:
        return [*problems, *machine_problems(deployment if problems else sized(deployment))]
    except UserError as error:
        return [Problem("memory", "what the models take", line) for line in error.lines]


def require_valid(deployment: Deployment) -> None:
    """Raises UserError with a line for each problem that `check` finds."""
    if problems := check(deployment):
        raise UserError(map(str, problems))


def config_problems(deployment: Deployment) -> list[Problem]:
    """What is wrong on any machine."""
    placement = placement_problems(deployment)
    return [*_router(deployment), *_thresholds(deployment), *_live(deployment), *placement]


def _router(deployment: Deployment) -> Iterator[Problem]:
    config, names = deployment.router, deployment.model_names
    try:
        algorithm = config.algorithm()
    except ValueError as error:
        yield Problem("router.name", repr(config.name), str(error))
        return
    try:
        algorithm.check_models(names)
    except ValueError as error:
        yield Problem("models", repr(names), str(error))
        return
    try:
        for index in range(len(names)):
            config.router(index, names)
    except ValueError as error:
        yield Problem("router.params", repr(config.params), str(error))
        return
    for index in range(len(names)):
        yield from _needs(deployment, index, algorithm)


def _needs(deployment: Deployment, index: int, algorithm: Algorithm) -> Iterator[Problem]:
    router: type[BaseRouter[Any]] = algorithm.entry if index == 0 else algorithm.peer
    needed = {
        "logits": router.needs_logits,
        "hidden_states": router.needs_hidden_states,
        "embeddings": router.needs_embeddings,
        "sampling": router.needs_sampling,
    }
    engine = deployment.models[index].engine
    if isinstance(engine, TensorRTLLMBackendConfig) and not engine.return_logits:
        for what in (name for name in sorted(_PROVIDES[engine.type]) if needed[name]):
            path = f"models[{index}].engine.return_logits"
            yield Problem(path, "false", f"router '{algorithm.name}' needs {what}; allowed: true")
    for what in (name for name, need in needed.items() if need and name not in _PROVIDES[engine.type]):
        able = [name for name, provides in _PROVIDES.items() if what in provides]
        yield Problem(
            f"models[{index}].engine.type",
            repr(engine.type),
            f"router '{algorithm.name}' needs {what}, which this engine doesn't give; allowed: {', '.join(able)}",
        )


def _thresholds(deployment: Deployment) -> Iterator[Problem]:
    threshold, count = deployment.batching.threshold, len(deployment.models)
    rows: dict[str, list[int]] = {}
    if threshold == "auto" and count > MAX_MODELS:
        yield Problem("batching.threshold", "'auto'", f"solves for at most {MAX_MODELS} models; there are {count}")
    if isinstance(threshold, list):
        rows = {"batching.threshold": threshold}
    elif isinstance(threshold, dict):
        rows = {f"batching.threshold.{live}": row for live, row in threshold.items()}
    for path, row in rows.items():
        if len(row) != count:
            yield Problem(path, str(row), f"must have one number for each of the {count} models")


def _live(deployment: Deployment) -> Iterator[Problem]:
    limit = deployment.limits.max_live
    for index, model in enumerate(deployment.models):
        if model.engine.max_sessions < limit:
            yield Problem(
                "limits.max_live",
                str(limit),
                f"model '{model.name}' holds {model.engine.max_sessions} sessions at once",
                f"lower it, or raise models[{index}].engine.max_sessions",
            )
