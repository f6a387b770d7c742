# SPDX-License-Identifier: Apache-2.0
"""The `tokenrouter` command. Each command imports what it needs when it runs: `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from python_backends.llm.catalog import WeightsError
from tools.errors import UserError
from tools.models.cli import app as models_app

__all__ = ["app", "main"]

app = typer.Typer(
    name="tokenrouter",
    help="Several LLMs write one answer together, token by token, on NVIDIA Triton.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(models_app, name="models")

Config = Annotated[
    str | None,
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
    log: Annotated[Path | None, typer.Option(help="Keep Triton's log in this file.")] = None,
) -> None:
    """Serve a deployment until Ctrl-C or SIGTERM; the requests under way then finish first."""
    from tools.commands.serve import serve

    serve(config, log)


@app.command()
def validate(config: Config = None) -> None:
    """Check that a deployment's parts fit each other and this machine."""
    from tools.commands.validate import validate

    if not validate(config):
        raise typer.Exit(1)


@app.command()
def prepare(
    config: Config = None,
    output: Annotated[Path, typer.Option(help="The folder of the model repository.")] = Path("model_repository"),
    force: Annotated[bool, typer.Option(help="Write over files that weren't rendered by tokenrouter.")] = False,
) -> None:
    """Render a deployment into the model repository that tritonserver loads."""
    from tools.deployment import ENSEMBLE, ROUTER, load_deployment
    from tools.repository import render
    from tools.validate import config_problems

    deployment = load_deployment(config)
    if problems := config_problems(deployment):
        raise UserError(map(str, problems))
    render(deployment, output, force=force)
    typer.echo(f"rendered {', '.join([*deployment.model_names, ROUTER, ENSEMBLE])} into {output}")


@app.command()
def demo(
    config: Config = None,
    question: Annotated[str | None, typer.Option(help="What to ask.", show_default="a coding question")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    compare: Annotated[bool, typer.Option(help="Then ask each model alone.")] = True,
) -> None:
    """Fetch the models, serve them, and watch two of them write one answer."""
    from tools.demo import QUESTION, demo

    demo(_path(config), question or QUESTION, max_tokens, compare)


@app.command()
def chat(
    config: Config = None,
    url: Annotated[
        str | None,
        typer.Option(help="gRPC host:port of a server that runs already.", show_default="start one"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer.", show_default="the server's"),
    ] = None,
) -> None:
    """Talk with the models in the terminal."""
    from tools.chat import chat

    chat(_path(config), url, max_tokens)


def _path(config: str | None) -> Path | None:
    return None if config is None else Path(config)


def main() -> None:
    """The console script. What a user can put right is one line on stderr and exit status 1."""
    try:
        app()
    except UserError as error:
        _fail(error.lines)
    except WeightsError as error:
        _fail([str(error)])


def _fail(lines: list[str]) -> NoReturn:
    for line in lines:
        print(f"tokenrouter: {line}", file=sys.stderr)
    sys.exit(1)
