# SPDX-License-Identifier: Apache-2.0
"""Joint KV sizing (TokenRouter paper, arXiv 2610.12242, appendix B, point 1): the largest number of tokens that all
models can hold at once.

A request is on every model, and each comes to hold all of its tokens. KV that one model has and another lacks is of no
use, so all get room for the same number of tokens T. On device d, with memory M_d, of which the share r is kept free,

    sum over the models m on d of (W_m + T k_m)  <=  (1 - r) M_d

where W_m and k_m are the bytes of m's weights and of one token's KV on each of its devices. So

    T = min over d of floor(((1 - r) M_d - sum W_m) / sum k_m)

and each engine gets T, rounded down to its own block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from python_backends.llm.engines.config import (
    EngineConfig,
    LlamaCppConfig,
    PacedConfig,
    TensorRTLLMBackendConfig,
    TensorRTLLMConfig,
)
from python_backends.llm.kv_size import cells
from tools.deployment import Deployment
from tools.errors import UserError
from tools.sizing.config import MemoryConfig
from tools.sizing.footprint import Footprint, footprint
from tools.sizing.placement import placement_problems
from tools.sizing.units import gib

__all__ = ["DeviceUse", "Plan", "joint_plan", "largest_common", "sized"]

_CONTEXT = "engine.context_tokens"


@dataclass(frozen=True)
class DeviceUse:
    """One device, in bytes. budget: of weights and KV. fits: the tokens of every model on it for which there is room;
    None = no model on it has any KV."""

    memory: int
    budget: int
    weights: int
    kv_token: int
    fits: int | None


@dataclass(frozen=True)
class Plan:
    """tokens: T. held: what every engine has room for, T in whole blocks or less where one's own settings say less.
    devices: by name. footprints: of the models, in order. deployment: with every engine's KV set."""

    tokens: int
    held: int
    devices: dict[str, DeviceUse]
    footprints: list[Footprint]
    deployment: Deployment


def joint_plan(deployment: Deployment) -> Plan:
    """Raises UserError when `memory` is missing, when something doesn't fit or when a model's files can't be read."""
    memory = deployment.memory
    if memory is None:
        raise UserError("memory: is missing; say what there is, such as memory: {devices: {gpu0: 80GiB}}")
    if problems := list(placement_problems(deployment)):
        raise UserError(map(str, problems))
    footprints = [footprint(model, model.placed_on(memory)) for model in deployment.models]
    uses = {name: _use(name, memory, footprints) for name in memory.devices}
    tokens = largest_common(uses)
    models = [m.model_copy(update={"engine": _given(m.name, m.engine, tokens)}) for m in deployment.models]
    held = min((_kv_tokens(m.engine) for m in models if not isinstance(m.engine, PacedConfig)), default=tokens)
    return Plan(tokens, held, uses, footprints, deployment.model_copy(update={"models": models}))


def sized(deployment: Deployment) -> Deployment:
    """The deployment with its engines' KV set by `memory`; as it is where that isn't given. Raises UserError."""
    return deployment if deployment.memory is None else joint_plan(deployment).deployment


def largest_common(uses: dict[str, DeviceUse]) -> int:
    """T. Raises UserError when no device bounds it."""
    bounds = [use.fits for use in uses.values() if use.fits is not None]
    if not bounds:
        raise UserError("memory: no model here has KV; there is nothing to size")
    return min(bounds)


def _use(name: str, memory: MemoryConfig, footprints: Sequence[Footprint]) -> DeviceUse:
    here = [f for f in footprints if name in f.devices]
    size = int(memory.devices[name])
    budget = int(size * (1 - Fraction(str(memory.reserve))))
    weights, kv_token = sum(f.weights for f in here), sum(f.kv_token for f in here)
    if weights > budget:
        each = ", ".join(f"'{f.model}' {gib(f.weights)}" for f in here)
        raise UserError(
            f"memory.devices.{name}: {gib(size)} with reserve {memory.reserve:g} leave {gib(budget)}; the weights"
            f" take {gib(weights)}: {each}"
        )
    return DeviceUse(size, budget, weights, kv_token, (budget - weights) // kv_token if kv_token else None)


def _given(name: str, engine: EngineConfig, tokens: int) -> EngineConfig:
    """The engine with KV for `tokens`, whole blocks, and never more than its own settings say."""
    if isinstance(engine, LlamaCppConfig) and engine.deterministic:
        sessions = min(engine.max_sessions, tokens // cells(engine.context_tokens))
        _require(sessions, name, tokens, f"one session of {_CONTEXT} = {engine.context_tokens}")
        return engine.model_copy(update={"max_sessions": sessions, "kv_tokens": None})
    if isinstance(engine, LlamaCppConfig):
        block = cells(1)
        _require(tokens // block, name, tokens, f"one block of {block} tokens")
        return engine.model_copy(update={"kv_tokens": min(engine.all_kv_tokens, tokens // block * block)})
    if isinstance(engine, (TensorRTLLMBackendConfig, TensorRTLLMConfig)):
        block = engine.tokens_per_block
        _require(tokens // block, name, tokens, f"one block of engine.tokens_per_block = {block}")
        most = tokens // block * block
        if isinstance(engine, TensorRTLLMConfig):
            session = f"one session of {_CONTEXT} = {engine.context_tokens}"
            _require(most // engine.context_tokens, name, tokens, session)
        return engine.model_copy(update={"max_tokens": min(engine.max_tokens or most, most)})
    return engine


def _kv_tokens(engine: LlamaCppConfig | TensorRTLLMBackendConfig | TensorRTLLMConfig) -> int:
    """Of a sized engine, all sessions together."""
    return engine.all_kv_tokens if isinstance(engine, LlamaCppConfig) else engine.max_tokens or 0


def _require(count: int, name: str, tokens: int, what: str) -> None:
    if count < 1:
        raise UserError(f"memory: {tokens} tokens fit on every model; too few for {what} of model '{name}'")
