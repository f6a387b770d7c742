# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter train ROUTER [CONFIG]`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.errors import UserError
from tools.training.options import RECALL, DataOptions, TrainOptions

__all__ = ["train_command"]


class _Router(str, Enum):
    r2r = "r2r"
    citer = "citer"
    co_llm = "co_llm"


# options that mean something to some algorithms only
_ONLY_OF = {
    "judge": ("r2r",),
    "judge_model": ("r2r",),
    "width": ("r2r", "citer"),
    "rounds": ("citer",),
    "rollouts": ("citer",),
    "marginal": ("co_llm",),
}


def train_command(
    router: Annotated[_Router, typer.Argument(help="The algorithm.")],
    config: Annotated[
        str | None,
        typer.Argument(
            help="A deployment's YAML file, or the name of a shipped one: its two models.", show_default="default"
        ),
    ] = None,
    work: Annotated[
        Path, typer.Option(help="Keep everything in this folder; what is there already isn't made again.")
    ] = Path("training"),
    output: Annotated[
        Path | None, typer.Option(help="The .safetensors file to write.", show_default="in the work folder")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=0, max=700, help="Functions to write, from packages.")
    ] = DataOptions.prompts,
    reasoning: Annotated[int, typer.Option(min=0, max=5000, help="Tasks of reasoning-gym.")] = DataOptions.reasoning,
    max_tokens: Annotated[int, typer.Option(min=16, max=4096, help="Of an answer.")] = DataOptions.max_tokens,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of all randomness.")] = DataOptions.seed,
    recall: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1, help="Threshold: this share of the tokens that need it.", show_default=str(RECALL)
        ),
    ] = None,
    llm_share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Instead: this share of all tokens goes to the large model.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            help="r2r: tests, continuation, or the http:// URL of an OpenAI-compatible API.",
            show_default=TrainOptions.judge,
        ),
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="r2r: the model that judges at the URL.")] = None,
    width: Annotated[
        int | None,
        typer.Option(
            min=8, max=4096, help="r2r, citer: of the network.", show_default="r2r: 128; citer: the hidden size"
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=10, help="citer: rounds of labels and fit.", show_default=str(TrainOptions.rounds)),
    ] = None,
    rollouts: Annotated[
        int | None,
        typer.Option(
            min=0, max=1000, help="citer: most roll-outs of a text in a round.", show_default=str(TrainOptions.rollouts)
        ),
    ] = None,
    marginal: Annotated[bool, typer.Option(help="co_llm: then fit the marginal likelihood.")] = False,
    epochs: Annotated[int, typer.Option(min=1, max=10_000, help="Of a fit, at most.")] = TrainOptions.epochs,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="That run the models, with one thread each.")
    ] = TrainOptions.processes,
    sessions: Annotated[int, typer.Option(min=1, max=256, help="Of a model in each process.")] = TrainOptions.sessions,
) -> None:
    """Train a router for the two models of a deployment. An interrupted training goes on where it stopped."""
    if recall is not None and llm_share is not None:
        raise UserError("--recall and --llm-share: give one of them")
    if prompts + reasoning < 8:
        raise UserError(f"--prompts: got {prompts}; with --reasoning {reasoning} there must be 8 or more")
    values: dict[str, Any] = {
        "judge": judge,
        "judge_model": judge_model,
        "width": width,
        "rounds": rounds,
        "rollouts": rollouts,
        "marginal": marginal or None,
    }
    given = {name: value for name, value in values.items() if value is not None}
    for name in given:
        if router.value not in _ONLY_OF[name]:
            raise UserError(
                f"--{name.replace('_', '-')}: only of {', '.join(_ONLY_OF[name])}; the router is {router.value}"
            )
    from tools.training.command import train
    from tools.training.training import Target

    options = TrainOptions(
        work=work,
        output=output,
        data=DataOptions(prompts, reasoning, max_tokens, seed),
        target=Target(RECALL if recall is None and llm_share is None else recall, llm_share),
        epochs=epochs,
        processes=processes,
        sessions=sessions,
        **given,
    )
    train(router.value, config, options)
