# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter routers convert CHECKPOINT` and `tokenrouter routers show FILE`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.errors import UserError

__all__ = ["app"]

app = typer.Typer(help="The weights of trained routers.", no_args_is_help=True)


class _Algorithm(str, Enum):
    r2r = "r2r"
    citer = "citer"


@app.command("convert")
def convert_command(
    checkpoint: Annotated[Path, typer.Argument(help="What the algorithm's own code saved: R2R's .pt, CITER's .pth.")],
    algorithm: Annotated[_Algorithm, typer.Option(help="Whose checkpoint it is.")],
    slm: Annotated[str, typer.Option(help="The small model's weights, as in a deployment file.")],
    llm: Annotated[str, typer.Option(help="The large model's weights, as in a deployment file.")],
    output: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="R2R: the threshold. CITER: tau.", show_default="the file's")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Columns of the models' logits.", show_default="the small model's")
    ] = None,
) -> None:
    """Turn a router's official checkpoint into a file that a deployment can name."""
    from pydantic import ValidationError

    from routers.networks import CiterNetwork, R2RNetwork, restore
    from routers.registry import describe
    from routers.weights import RouterHeader, save_router
    from tools.router_checkpoints import read_checkpoint

    if output.suffix != ".safetensors":
        raise UserError(f"--output: got {output}; allowed: a name that ends in .safetensors")
    read = read_checkpoint(checkpoint, algorithm.value)
    used = read.threshold if threshold is None else threshold
    if used is None:
        raise UserError(f"--threshold: not given, and {checkpoint} has none; allowed: 0 to 1")
    try:
        header = RouterHeader(
            algorithm=algorithm.value,
            models=[_name(slm), _name(llm)],
            hidden_size=read.network["hidden_size"],
            vocab_size=_vocab_size(slm, vocab_size, read.network["hidden_size"], checkpoint),
            threshold=used,
            network=read.network,
            data=read.data,
        )
        if (top_logits := read.network.get("top_logits", 0)) > header.vocab_size:
            raise ValueError(
                f"takes the {top_logits} largest logits, but the vocabulary has {header.vocab_size} tokens"
            )
        restore(R2RNetwork if algorithm is _Algorithm.r2r else CiterNetwork, read.network, read.tensors)
        save_router(output, header, read.tensors)
    except OSError as error:
        raise UserError(f"--output: {output}: can't be written: {error.strerror}") from error
    except ValidationError as error:
        raise UserError(f"{checkpoint}: {describe(error)}") from error
    except ValueError as error:
        raise UserError(f"{checkpoint}: {error}") from error
    typer.echo(
        f"{output}: {algorithm.value} for {slm} + {llm}, threshold {used:g}, {output.stat().st_size / 1e6:.1f} MB"
    )


@app.command("show")
def show_command(
    file: Annotated[str, typer.Argument(help="A .safetensors file, or the name of a shipped router.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the header as JSON.")] = False,
) -> None:
    """Say what a router was trained for, on what, and how well it does."""
    from routers.weights import locate_router, read_header

    try:
        header = read_header(locate_router(file))
    except ValueError as error:
        raise UserError(str(error)) from error
    if as_json:
        typer.echo(header.model_dump_json(indent=2))
        return
    table = Table("field", "value", box=SIMPLE_HEAD)
    for field, value in header.model_dump().items():
        for name, part in value.items() if isinstance(value, dict) else [(None, value)]:
            table.add_row(f"{field}.{name}" if name else field, Text(_shown(part), overflow="fold"))
    Console().print(table)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _name(weights: str) -> str:
    from python_backends.llm.catalog import weights_name

    return weights_name(weights)


def _vocab_size(slm: str, given: int | None, hidden_size: int, checkpoint: Path) -> int:
    """The one given, or that of the small model's file. Raises UserError when there is neither, or when the file, if
    it is there, is of another hidden size than the router."""
    from python_backends.llm.catalog import WeightsError, locate_weights
    from python_backends.llm.gguf_header import read_gguf_header

    try:
        header = read_gguf_header(locate_weights(slm))
        vocab_size = header.arrays["tokenizer.ggml.tokens"].length if given is None else given
    except (WeightsError, OSError, ValueError, KeyError) as error:
        if given is None:
            raise UserError(f"--vocab-size: not given, and not known of the small model: {error}") from error
        return given
    width = header.of_architecture("embedding_length")
    if width not in (None, hidden_size):
        raise UserError(
            f"{checkpoint}: is of a model with hidden size {hidden_size}, but --slm {slm} has {width}; allowed: the"
            " small model that the router was trained beside"
        )
    return vocab_size
