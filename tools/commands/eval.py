# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter eval run` and `tokenrouter eval sweep`: quality against cost on benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tools.evaluation.spec import SweepSpec

__all__ = ["app", "told"]

app = typer.Typer(help="Solve benchmarks with a served deployment: quality against cost.", no_args_is_help=True)

Output = Annotated[Path, typer.Option(help="The folder of answers and results. A run that is there goes on.")]


@app.command()
def run(
    config: Annotated[
        str | None,
        typer.Argument(help="A deployment's YAML file, or the name of a shipped one.", show_default="default"),
    ] = None,
    task: Annotated[str, typer.Option(help="humaneval, or reasoning (of reasoning-gym).")] = "humaneval",
    problems: Annotated[str | None, typer.Option(help="N, FROM:TO or FROM:TO:STEP.", show_default="all")] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Ask a running server of this deployment: auto, a pid or a run directory."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="The same by gRPC host:port, also elsewhere.")] = None,
    router_params: Annotated[str | None, typer.Option(help="JSON: what each request overrides.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 400,
    temperature: Annotated[
        float | None,
        typer.Option(help="Only of routers that must sample; the others answer greedily.", show_default="1.0"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the requests.")] = 0,
    output: Output = Path("evaluation"),
) -> None:
    """One setting: the deployment as it is."""
    from rich.console import Console

    from tools.deployment import load_deployment
    from tools.evaluation.single import evaluate

    deployment = load_deployment(config)
    given = {
        "task": {"type": task}, "problems": problems, "concurrency": concurrency, "max_tokens": max_tokens,
        "seed": seed, **({} if temperature is None else {"temperature": temperature}),
    }  # fmt: skip
    console = Console(highlight=False)
    with told():
        evaluate(_spec(given), deployment, _object(router_params), server, url, output, console)
    console.print((output / "results.md").read_text(encoding="utf-8"), markup=False, soft_wrap=True)


@app.command()
def sweep(
    spec: Annotated[Path, typer.Argument(help="A YAML file: docs/evaluate.md.")],
    output: Output = Path("evaluation"),
) -> None:
    """Several routers, several thresholds each, beside the models alone, random routing and query-level routing."""
    from rich.console import Console

    from tools.evaluation.spec import load_spec
    from tools.evaluation.sweep import sweep

    console = Console(highlight=False)
    loaded, deployment = load_spec(spec)
    with told():
        sweep(loaded, deployment, output, console)
    console.print((output / "results.md").read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    console.print(f"wrote results.json, results.csv, results.md, frontier.png into {output}", markup=False)


@contextmanager
def told() -> Iterator[None]:
    """Failures of the server and the sandbox as what the user is told; Ctrl-C ends with status 130."""
    from tools.client import GenerationError
    from tools.control import ControlError
    from tools.errors import UserError
    from tools.evaluation.sandbox import SandboxError

    try:
        yield
    except GenerationError as error:
        raise UserError(error.told() + ("" if error.refused else "; the same command goes on from here")) from error
    except (ControlError, SandboxError) as error:
        raise UserError(str(error)) from error
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None


def _spec(given: dict[str, Any]) -> SweepSpec:
    """Raises UserError with the option's name."""
    from pydantic import ValidationError

    from tools.config_errors import explain
    from tools.errors import UserError
    from tools.evaluation.spec import SweepSpec

    try:
        return SweepSpec.model_validate(given)
    except ValidationError as error:
        lines = [line.replace("task.type:", "task:", 1) for line in explain(error, SweepSpec, given)]
        raise UserError([f"--{line.replace('_', '-', 1)}" for line in lines]) from error


def _object(text: str | None) -> dict[str, Any]:
    from tools.errors import UserError

    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"--router-params: got {text!r}; is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"--router-params: got {text!r}; must be a JSON object")
    return value
