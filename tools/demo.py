# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter demo`: two models write one answer before your eyes, and then each of them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tools.client import Answer, GenerationError, TokenRouterClient
from tools.coloring import Painter
from tools.commands.options import DEMO_MAX_TOKENS
from tools.deployment import Deployment
from tools.errors import UserError
from tools.own_server import own_server

__all__ = ["QUESTION", "comparison_table", "demo"]

QUESTION = "Write a Python function that returns the n-th Fibonacci number, with a docstring and two asserts."

# router -> what a request overrides so that the first model, or the second one, makes every token.
# R-Stitch at tau 1 never delegates; at tau 0 it comes back only where the large model is certain beyond
# the precision of its numbers.
_ALONE: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rstitch": ({"tau": 1.0}, {"tau": 0.0}),
    "random": ({"p": 0.0}, {"p": 1.0}),
    "single": ({"model": 0}, {"model": 1}),
}


@dataclass(frozen=True)
class _Run:
    """One way to answer the question. router_params: what its request overrides."""

    title: str
    router_params: dict[str, Any] | None = None


def demo(
    config: Path | str | None = None, question: str = QUESTION, max_tokens: int = DEMO_MAX_TOKENS, compare: bool = True
) -> None:
    """Fetch what is missing, serve `config` (None = the shipped default), ask, stream, compare, shut down.

    Raises UserError for what the user can put right, typer.Exit(130) on Ctrl-C; the server is shut down
    in every case.
    """
    console = Console(highlight=False)
    try:
        with own_server(config, console) as server, TokenRouterClient(server.grpc_url) as client:
            painter = Painter(console, server.deployment.model_names)
            asked = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
            if server.deployment.router.algorithm().needs_sampling:
                asked["temperature"] = 1.0
            _ask_all(client, painter, _runs(server.deployment, compare), asked)
    except KeyboardInterrupt:
        console.print("\nstopped", style="dim")
        raise typer.Exit(130) from None
    except GenerationError as error:
        raise UserError(error.told()) from error


def _ask_all(client: TokenRouterClient, painter: Painter, runs: Sequence[_Run], asked: Mapping[str, Any]) -> None:
    """The request `asked` by every run in turn: the first one's summary at once, and all of them in one table at the
    end."""
    console = painter.console
    painter.legend()
    answers: dict[str, Answer] = {}
    for run in runs:
        question = "the same question" if answers else asked["messages"][0]["content"]
        console.print(f"\n{run.title}: {question}\n", style="bold", markup=False)
        generation = client.generate(**asked, router_params=run.router_params)
        answer = answers[run.title] = Answer(generation.sent_at)
        painter.show(generation, answer)
        console.print()
        if run in (runs[0], runs[-1]):
            console.print(comparison_table(answers, painter.models))


def _runs(deployment: Deployment, compare: bool) -> list[_Run]:
    """The deployment as it is and, where its router has settings for that, each of its two models alone."""
    models = deployment.model_names
    runs = [_Run(" + ".join(models))]
    if compare and len(models) == 2 and deployment.router.name in _ALONE:
        overrides = _ALONE[deployment.router.name]
        runs += [_Run(f"{name} alone", params) for name, params in zip(models, overrides, strict=True)]
    return runs


def comparison_table(answers: Mapping[str, Answer], models: Sequence[str]) -> Table:
    """A row for each titled answer: tokens, tokens by model, handoffs, TTFT, tokens/s."""
    table = Table(caption="TTFT: from sending to the first token. tokens/s: after it.", caption_justify="left")
    table.add_column("")
    for column in ("tokens", *(f"by {name}" for name in models), "handoffs", "TTFT", "tokens/s"):
        table.add_column(column, justify="right")
    for title, answer in answers.items():
        total = len(answer.ids)
        counts = [answer.tokens_by_model[name] for name in models]
        table.add_row(
            title,
            str(total),
            *(f"{n} ({n / total:.0%})" if total else "0" for n in counts),
            str(answer.usage.get("handoffs", "-")),
            "-" if answer.ttft_s is None else f"{answer.ttft_s * 1000:.0f} ms",
            "-" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.1f}",
        )
    return table
