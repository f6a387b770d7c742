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
from tools.validate import check

__all__ = ["validate"]


def validate(config: str | None, only: str | None = None) -> bool:
    """Whether the deployment is sound; prints what isn't. Raises UserError when the file can't be read."""
    console = Console(highlight=False)
    deployment = load_node(config, only)
    problems = check(deployment)
    if not problems:
        deployment = sized(deployment)
        served = deployment.model_names if deployment.routes else [deployment.model_names[i] for i in deployment.here]
        context = min(_context_tokens(deployment.models[index].engine) for index in deployment.here)
        console.print(
            f"ok: {' + '.join(served)}, router {deployment.router.name}, context {context} tokens,"
            f" about {memory_needed(deployment) / (1 << 30):.1f} GiB of memory"
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
