# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter build`: the engines of a deployment, from Hugging Face checkpoints."""

from __future__ import annotations

import shlex

import typer

from python_backends.llm.engines.config import TensorRTLLMConfig
from tools.building.running import run
from tools.building.steps import steps
from tools.deployment import ModelConfig, load_deployment

__all__ = ["build"]


def build(config: str | None, dry_run: bool) -> None:
    """Build what isn't built, or print the commands. Raises UserError."""
    for model in load_deployment(config).models:
        todo = steps(model)
        if not todo:
            typer.echo(f"# {model.name}: {_why_nothing(model)}")
        elif dry_run:
            for step in todo:
                typer.echo(f"# {step.title}\n{shlex.join(step.command)}")
        else:
            run(todo, typer.echo)


def _why_nothing(model: ModelConfig) -> str:
    if isinstance(model.engine, TensorRTLLMConfig):
        return f"nothing to build; the engine {model.engine.type} loads {model.engine.weights} as it is"
    return f"nothing to build for the engine {model.engine.type}"
