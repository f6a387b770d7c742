# SPDX-License-Identifier: Apache-2.0
"""Small trained routers with random numbers, and the steps that they are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from routers import BaseRouter, LogitsOutput, RouterConfig, ServedModel, StepResult
from routers.networks import CiterNetwork, CoLLMHead, R2RNetwork
from routers.weights import RouterHeader, save_router

HIDDEN, EMBEDDING, VOCAB, TOP = 8, 6, 40, 10
MODELS = ["small-q4_0", "large-q4_0"]
NETWORKS: dict[str, tuple[type[torch.nn.Module], dict[str, Any]]] = {
    "r2r": (
        R2RNetwork,
        {"hidden_size": HIDDEN, "embedding_size": EMBEDDING, "width": 16, "blocks": 2, "top_logits": TOP},
    ),
    "citer": (CiterNetwork, {"hidden_size": HIDDEN, "width": 4}),
    "co_llm": (CoLLMHead, {"hidden_size": HIDDEN}),
}
THRESHOLDS = {"r2r": "threshold", "citer": "tau", "co_llm": "eta"}


def network(algorithm: str, seed: int = 0) -> torch.nn.Module:
    """In eval mode, batch norm with statistics that aren't those of any batch."""
    torch.manual_seed(seed)
    kind, arguments = NETWORKS[algorithm]
    module = kind(**arguments)
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm1d):
            torch.nn.init.normal_(part.running_mean)
            torch.nn.init.uniform_(part.running_var, 0.5, 2.0)
    return module.eval()


def write(path: Path, algorithm: str, module: torch.nn.Module, **header: Any) -> Path:
    """The file of a router for MODELS, with what `header` changes."""
    values = {
        "algorithm": algorithm,
        "models": MODELS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "threshold": 0.5,
        "network": NETWORKS[algorithm][1],
    }
    save_router(path, RouterHeader.model_validate({**values, **header}), module.state_dict())
    return path


TABLE = torch.randn(VOCAB, EMBEDDING, generator=torch.Generator().manual_seed(5))


def served(index: int = 0, **changes: Any) -> ServedModel:
    """The model that the router was trained for, with `changes`."""
    values = {
        "name": ["slm", "llm"][index],
        "weights": MODELS[index],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "embed": TABLE.__getitem__,
    }
    return ServedModel(**{**values, **changes})


def bound(path: Path, algorithm: str, **params: Any) -> BaseRouter[Any]:
    """The router beside the small model, ready."""
    config = RouterConfig(name=algorithm, params={"weights": str(path), **params})
    router = config.router(0, ["slm", "llm"])
    router.check(served())
    router.bind(served())
    return router


def step(router: BaseRouter[Any], rows: int, seed: int = 0, params: Sequence[Any] | None = None) -> StepResult:
    """A step of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return StepResult(
        logits_output=LogitsOutput(
            3 * torch.randn(rows, VOCAB, generator=generator), torch.randn(rows, HIDDEN, generator=generator)
        ),
        token_ids=torch.randint(0, VOCAB, (rows,), generator=generator).tolist(),
        places=range(4, 4 + rows),
        sequences=[list(range(4 + r)) for r in range(rows)],
        prompt_tokens=[2] * rows,
        rids=list(range(rows)),
        params=list(params or [router.params] * rows),
        draw=lambda _: 0.0,
        fields=[{} for _ in range(rows)],
    )
