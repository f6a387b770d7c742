# SPDX-License-Identifier: Apache-2.0
"""Checking that the parts of a deployment fit each other, and this machine, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from python_backends.llm.engines.config import (
    CALL_THREADS,
    LlamaCppConfig,
    PacedConfig,
    TensorRTLLMBackendConfig,
    TensorRTLLMConfig,
)
from python_backends.token_router.threshold.network import MAX_MODELS
from routers import Algorithm, BaseRouter
from tools.deployment import Deployment
from tools.errors import UserError
from tools.machine import machine_problems
from tools.problem import Problem
from tools.sizing.joint import sized
from tools.sizing.placement import placement_problems

__all__ = ["check", "config_problems", "require_valid"]

# type of engine -> what its steps can give a router at most
_PROVIDES = {
    "llama_cpp": LlamaCppConfig.provides,
    "paced": PacedConfig.provides,
    "tensorrt_llm": TensorRTLLMConfig.provides,
    "tensorrtllm": TensorRTLLMBackendConfig.provides,
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
    return [*_router(deployment), *_calls(deployment), *_thresholds(deployment), *_live(deployment), *placement]


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
    engine = deployment.models[index].engine
    without_logits = isinstance(engine, TensorRTLLMBackendConfig) and not engine.return_logits
    for what in router.needs():
        if what not in engine.provides:
            able = [name for name, provides in _PROVIDES.items() if what in provides]
            yield Problem(
                f"models[{index}].engine.type",
                repr(engine.type),
                f"router '{algorithm.name}' needs {what}, which this engine doesn't give; allowed: {', '.join(able)}",
            )
        elif without_logits:
            path = f"models[{index}].engine.return_logits"
            yield Problem(path, "false", f"router '{algorithm.name}' needs {what}; allowed: true")


def _calls(deployment: Deployment) -> Iterator[Problem]:
    """A step must leave threads for the request that ends it when it hangs, and for everybody else's calls."""
    engines = [model.engine for model in deployment.models]
    calls = {i: e.calls_at_once for i, e in enumerate(engines) if isinstance(e, TensorRTLLMBackendConfig)}
    room = CALL_THREADS - 2 * len(engines) - 1
    if calls and (together := sum(calls.values())) > room:
        most = max(calls, key=calls.__getitem__)
        yield Problem(
            f"models[{most}].engine.calls_at_once",
            str(calls[most]),
            f"the stock models' are {together} together; allowed: {room} together, since of the server's {CALL_THREADS}"
            " threads each model needs 2 more, and the answers 1",
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
