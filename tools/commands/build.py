# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter build`: the engines of a deployment, from Hugging Face checkpoints."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from python_backends.llm.engines.config import TensorRTLLMConfig
from tools.building.running import run
from tools.building.steps import Step, steps
from tools.deployment import ModelConfig, load_deployment
from tools.errors import UserError

__all__ = ["build"]


def build(config: str | None, dry_run: bool) -> None:
    """Build what isn't built, or print the commands. Raises UserError; what is wrong with any model, before the first
    of them is built."""
    plans = [(model, steps(model)) for model in load_deployment(config).models]
    _require_own_folders(plans)
    for model, todo in plans:
        if not todo:
            typer.echo(f"# {model.name}: {_why_nothing(model)}")
        elif dry_run:
            for step in todo:
                typer.echo(f"# {step.title}\n{shlex.join(step.command)}")
        else:
            run(todo, typer.echo)


def _require_own_folders(plans: list[tuple[ModelConfig, list[Step]]]) -> None:
    """Models may share an engine, but not a folder for two: each build would remove the other's."""
    made: dict[Path, tuple[str, Step]] = {}
    for model, todo in plans:
        for step in todo:
            other, same = made.setdefault(step.output, (model.name, step))
            if same.command != step.command:
                raise UserError(
                    f"model '{model.name}': engine.engine_dir: {step.output} is where model '{other}' has another"
                    " engine; name another folder"
                )


def _why_nothing(model: ModelConfig) -> str:
    if isinstance(model.engine, TensorRTLLMConfig):
        return f"nothing to build; the engine {model.engine.type} loads {model.engine.weights} as it is"
    return f"nothing to build for the engine {model.engine.type}"
