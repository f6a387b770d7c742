# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter validate`: a table of what is wrong, or "ok"."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.deployment import load_deployment
from tools.machine import machine_warnings, memory_needed
from tools.validate import check

__all__ = ["validate"]


def validate(config: str | None) -> bool:
    """Whether the deployment is sound; prints what isn't. Raises UserError when the file can't be read."""
    console = Console(highlight=False)
    deployment = load_deployment(config)
    problems = check(deployment)
    if not problems:
        context = min(m.engine.context_tokens for m in deployment.models)
        console.print(
            f"ok: {' + '.join(deployment.model_names)}, router {deployment.router.name}, context {context} tokens,"
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
