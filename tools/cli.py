# SPDX-License-Identifier: Apache-2.0
"""The `tokenrouter` command. Each command imports what it needs when it runs: `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from python_backends.llm.catalog import WeightsError
from tools.commands.eval import app as eval_app
from tools.commands.options import DEMO_MAX_TOKENS, MeasureOptions, SimulateOptions, ThresholdOptions
from tools.commands.routers import app as routers_app
from tools.commands.train import train_command
from tools.commands.variadic import NumbersCommand
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
app.add_typer(eval_app, name="eval")
app.add_typer(routers_app, name="routers")
app.command("train")(train_command)

Config = Annotated[
    str | None,
    typer.Argument(help="A deployment's YAML file, or the name of a shipped one.", show_default="default"),
]

ProfileFile = Annotated[Path | None, typer.Argument(help="What `tokenrouter profile` wrote.", show_default="none")]
Only = Annotated[
    str | None,
    typer.Option(help="On a host that serves LLMs for another one's token_router: which, with commas between them."),
]
Algorithm = Annotated[str | None, typer.Option(help="Instead of a profile: a routing algorithm, with its rates.")]
RateP = Annotated[float | None, typer.Option("--p", help="Its share of the SLM's steps that go to the LLM.")]
RateQ = Annotated[float | None, typer.Option("--q", help="rstitch, glimp: share of the LLM's steps that go back.")]
Weights = Annotated[list[float] | None, typer.Option(help="me: the weight of each model.")]
MatrixP = Annotated[str | None, typer.Option(help="Instead: P as JSON, a row for each model.")]
MatrixC = Annotated[str | None, typer.Option(help="With --matrix-p: C as JSON.")]
LatencyMs = Annotated[
    list[float] | None, typer.Option(help="With --algorithm or --matrix-p: the step time of each model.")
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
    only: Only = None,
) -> None:
    """Serve a deployment until Ctrl-C or SIGTERM; the requests under way then finish first."""
    from tools.commands.serve import serve

    serve(config, log, only)


@app.command()
def health(
    server: Annotated[str, typer.Option(help="auto, its pid or its run directory.")] = "auto",
    timeout_s: Annotated[float, typer.Option(help="For the token, or for each model.")] = 20.0,
) -> None:
    """Check that the server on this machine makes a token (on a host of LLMs only: that they are loaded)."""
    from tools.commands.health import health

    typer.echo(health(server, timeout_s))


@app.command()
def validate(config: Config = None, only: Only = None) -> None:
    """Check that a deployment's parts fit each other and this machine."""
    from tools.commands.validate import validate

    if not validate(config, only):
        raise typer.Exit(1)


@app.command()
def prepare(
    config: Config = None,
    output: Annotated[Path, typer.Option(help="The folder of the model repository.")] = Path("model_repository"),
    force: Annotated[bool, typer.Option(help="Write over files that weren't rendered by tokenrouter.")] = False,
    only: Only = None,
) -> None:
    """Render a deployment into the model repository that tritonserver loads."""
    from tools.deployment import load_node
    from tools.repository import render
    from tools.sizing.joint import sized
    from tools.validate import config_problems

    deployment = load_node(config, only)
    if problems := config_problems(deployment):
        raise UserError(map(str, problems))
    rendered = render(sized(deployment), output, force=force)
    typer.echo(f"rendered {', '.join(rendered)} into {output}")


@app.command()
def plan(
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """How many tokens of KV every model can have beside the weights, in the memory that the deployment gives."""
    from tools.commands.plan import plan

    plan(config, as_json)


@app.command()
def build(
    config: Config = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run none.")] = False,
) -> None:
    """Make the TensorRT engines of a deployment from their Hugging Face checkpoints."""
    from tools.commands.build import build

    build(config, dry_run)


@app.command()
def demo(
    config: Config = None,
    question: Annotated[str | None, typer.Option(help="What to ask.", show_default="a coding question")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = DEMO_MAX_TOKENS,
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


@app.command(cls=NumbersCommand)
def simulate(
    profile: ProfileFile = None,
    algorithm: Algorithm = None,
    p: RateP = None,
    q: RateQ = None,
    weights: Weights = None,
    matrix_p: MatrixP = None,
    matrix_c: MatrixC = None,
    latency_ms: LatencyMs = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Clients that each send the next request at once.", show_default="4")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Instead: requests/s of a Poisson stream.")] = None,
    policy: Annotated[str, typer.Option(help="async, step_sync, model_sync, or all.")] = SimulateOptions.policy,
    threshold: Annotated[
        list[int] | None, typer.Option(help="B of each model.", show_default="the Markov model's best")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of a request, the mean of a geometric length.", show_default="endless")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Of every request; cost what the profile says.")
    ] = SimulateOptions.prompt_tokens,
    max_live: Annotated[int | None, typer.Option(help="Most requests generating at once.")] = None,
    max_wait_ms: Annotated[
        float | None, typer.Option(help="Longest wait for a batch to fill.", show_default="for ever")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Models keep the KV of requests that are away.")
    ] = SimulateOptions.resume,
    duration: Annotated[float, typer.Option(help="Simulated seconds.")] = SimulateOptions.duration,
    seed: Annotated[int, typer.Option(help="Of all randomness.")] = SimulateOptions.seed,
    trace: Annotated[Path | None, typer.Option(help="Write 5 s of the last policy, for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a chart (.png, .svg, .pdf).")] = None,
) -> None:
    """What each scheduling policy makes of a deployment's traffic, by simulation."""
    from tools.commands.profile_options import ProfileOptions
    from tools.commands.simulate import simulate

    options = SimulateOptions(
        policy=policy,
        threshold=threshold or (),
        concurrency=4 if concurrency is None and rate is None else concurrency,
        rate=rate,
        max_live=max_live,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        resume=resume,
        max_wait_ms=max_wait_ms,
        duration=duration,
        seed=seed,
    )
    given = ProfileOptions(profile, algorithm, p, q, weights, matrix_p, matrix_c, latency_ms)
    simulate(given.profile(), options, as_json=as_json, trace=trace, plot=plot)


@app.command(cls=NumbersCommand)
def threshold(
    profile: ProfileFile = None,
    server: Annotated[
        str | None,
        typer.Option(help="Instead: what a running server has measured: auto, its pid or its run directory."),
    ] = None,
    algorithm: Algorithm = None,
    p: RateP = None,
    q: RateQ = None,
    weights: Weights = None,
    matrix_p: MatrixP = None,
    matrix_c: MatrixC = None,
    latency_ms: LatencyMs = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            help="Live requests, one number or several.", show_default=" ".join(map(str, ThresholdOptions.concurrency))
        ),
    ] = None,
    delta_ms: Annotated[
        float | None, typer.Option(help="The grid of the step times.", show_default="as fine as they need, 0.1 at most")
    ] = ThresholdOptions.delta_ms,
    method: Annotated[str, typer.Option(help="auto, exact, or sampled.")] = ThresholdOptions.method,
    seed: Annotated[int, typer.Option(help="Of what is sampled.")] = ThresholdOptions.seed,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a chart (.png, .svg, .pdf).")] = None,
) -> None:
    """The best delayed-batching thresholds B for a deployment's traffic, by the Markov model."""
    from tools.commands.measured import server_profile
    from tools.commands.profile_options import ProfileOptions
    from tools.commands.threshold import threshold

    options = ThresholdOptions(concurrency or ThresholdOptions.concurrency, delta_ms, method, seed)
    given = ProfileOptions(profile, algorithm, p, q, weights, matrix_p, matrix_c, latency_ms)
    traffic = given.profile() if server is None else server_profile(server, given)
    threshold(traffic, options, as_json=as_json, plot=plot)


@app.command(cls=NumbersCommand)
def profile(
    config: Config = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("profile.json"),
    server: Annotated[
        str | None,
        typer.Option(help="Measure a running server with the B that it has: auto, a pid or a run directory."),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Requests at once, in turn.", show_default="1 2 4 ...")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of each of them.")] = MeasureOptions.seconds,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt on each line.", show_default="some of our own")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = MeasureOptions.max_tokens,
    seed: Annotated[int, typer.Option(help="Of the prompts' order and of the requests.")] = MeasureOptions.seed,
) -> None:
    """Measure a deployment's routing and step times, for `threshold` and `simulate`."""
    from tools.commands.profile import profile

    profile(config, output, MeasureOptions(server, concurrency, seconds, prompts, max_tokens, seed))


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
