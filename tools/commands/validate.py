# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter validate`: a table of what is wrong, or "ok"."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from python_backends.llm.engines.config import EngineConfig, TensorRTLLMBackendConfig
from python_backends.llm.engines.stock_facts import stock_facts
from tools.deployment import load_node
from tools.machine import machine_warnings, memory_needed
from tools.sizing.joint import sized
from tools.sizing.units import gib
from tools.validate import check

__all__ = ["validate"]


def validate(config: str | None, only: str | None = None) -> bool:
    """Whether the deployment is sound; prints what isn't. Raises UserError when the file can't be read."""
    console = Console(highlight=False)
    deployment = load_node(config, only)
    problems = check(deployment)
    if not problems:
        deployment = sized(deployment)
        models = deployment.models if deployment.routes else [deployment.models[index] for index in deployment.here]
        context = min(_context_tokens(model.engine) for model in models)
        console.print(
            f"ok: {' + '.join(model.name for model in models)}, router {deployment.router.name},"
            f" context {context} tokens, about {gib(memory_needed(deployment))} of memory"
        )
        for warning in machine_warnings(deployment):
            console.print(f"warning: {warning}", markup=False, soft_wrap=True)
        return True
    table = Table("key", "value", "allowed", "hint", title=f"{len(problems)} to put right", title_justify="left")
    for problem in problems:
        cells = (problem.path, problem.value, problem.allowed, problem.hint)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    console.print(table)
    return False


def _context_tokens(engine: EngineConfig) -> int:
    return stock_facts(engine).context_tokens if isinstance(engine, TensorRTLLMBackendConfig) else engine.context_tokens
