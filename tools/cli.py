# SPDX-License-Identifier: Apache-2.0
"""The `tokenrouter` command. Each command imports what it needs when it runs: `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from tools.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="tokenrouter",
    help="Several LLMs write one answer together, token by token, on NVIDIA Triton.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Config = Annotated[
    Optional[str],  # noqa: UP045, typer reads the annotation at run time, and it must work on Python 3.10
    typer.Argument(help="A deployment's YAML file, or the name of a shipped one.", show_default="default"),
]


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"tokenrouter {installed('tokenrouter')}")
        raise typer.Exit


@app.command()
def serve(
    config: Config = None,
    log: Annotated[Optional[Path], typer.Option(help="Keep Triton's log in this file.")] = None,  # noqa: UP045
) -> None:
    """Serve a deployment until SIGTERM or Ctrl-C; the requests under way then finish first."""
    from tools.serve import serve as serve_deployment

    raise typer.Exit(serve_deployment(config, log))


@app.command()
def validate(config: Config = None) -> None:
    """Check that a deployment's parts fit each other and this machine."""
    from tools.validate_report import report

    raise typer.Exit(report(config))


@app.command()
def prepare(
    config: Config = None,
    output: Annotated[Path, typer.Option(help="The folder of the model repository.")] = Path("model_repository"),
    force: Annotated[bool, typer.Option(help="Write over files that weren't rendered by tokenrouter.")] = False,
) -> None:
    """Render a deployment into the model repository that tritonserver loads."""
    from tools.deployment import load_deployment
    from tools.repository import render
    from tools.validate import require_valid_config

    deployment = load_deployment(config)
    require_valid_config(deployment)
    render(deployment, output, force=force)
    typer.echo(f"rendered {', '.join(deployment.model_names)}, token_router and ensemble into {output}")
