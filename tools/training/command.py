# SPDX-License-Identifier: Apache-2.0
"""What `tokenrouter train ROUTER` does: checks its options, puts the parts together, prints what came of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from python_backends.llm.catalog import WeightsError, locate_tokenizer, locate_weights, weights_name
from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.engines.embedding_rows import EmbeddingRows
from python_backends.llm.gguf_header import read_gguf_header
from python_backends.token_router.tokenizer import Tokenizer
from tools.commands.outputs import check_writable, new_figure
from tools.deployment import Deployment, load_deployment
from tools.errors import UserError
from tools.evaluation.sandbox import SandboxError
from tools.training.judges import judge_named
from tools.training.options import TrainOptions
from tools.training.prompts import wording
from tools.training.recipes import R2R, Citer, CoLLM, Recipe
from tools.training.stages import PROMPT_TOKENS, Pair, Stages
from tools.training.training import train_router
from tools.training.work_folder import WorkFolder
from tools.training.workers import Processes

__all__ = ["train"]

_FORMAT = 2  # of the work folder: raise it when what its files hold changes


def train(router: str, config: str | None, options: TrainOptions) -> None:
    """Raises UserError for what a user can put right."""
    console = Console(highlight=False)
    output = options.output or options.work / f"{router}.safetensors"
    if output.suffix != ".safetensors":
        raise UserError(f"--output: got {output}; must end with .safetensors")
    new_figure(1, 1, "train", "train")  # what the report lacks is told before the work, not after it
    deployment = load_deployment(config)
    engines = _engines(deployment)
    recipe = _recipe(router, engines[0], options)
    try:
        pair, vocab_size = _pair(deployment, engines, options)
    except (WeightsError, ValueError, OSError) as error:
        raise UserError(str(error)) from error
    data = options.data
    folder = WorkFolder(
        options.work,
        {
            "format": _FORMAT,
            "models": pair.weights,
            "wording": wording(),
            "prompts": data.prompts,
            "reasoning": data.reasoning,
            "max_tokens": data.max_tokens,
            "seed": data.seed,
        },
    )
    check_writable("--output", output)
    stages = Stages(folder, pair, data, Processes(options.processes), console)
    try:
        with folder.alone():
            facts = train_router(recipe, stages, options.target, output, vocab_size)
    except SandboxError as error:
        raise UserError(f"train: {error}") from error
    except OSError as error:
        raise UserError(f"train: {error.filename or options.work}: {error.strerror or error}") from error
    except KeyboardInterrupt:
        raise UserError("interrupted; the same command goes on where it stopped") from None
    _print(facts, output, console)


def _engines(deployment: Deployment) -> list[LlamaCppConfig]:
    engines = [model.engine for model in deployment.models]
    found = [engine for engine in engines if isinstance(engine, LlamaCppConfig)]
    if len(engines) != 2 or len(found) != 2:
        what = ", ".join(engine.type for engine in engines)
        raise UserError(f"models: a router is trained for two models of engine llama_cpp; the deployment has {what}")
    return found


def _pair(deployment: Deployment, engines: list[LlamaCppConfig], options: TrainOptions) -> tuple[Pair, int]:
    """The two models, and the columns of their logits. Raises ValueError or OSError when a file isn't there or no
    good."""
    if deployment.tokenizer is None:
        raise UserError("tokenizer: is null; a router is trained on texts, so the deployment must name one")
    sizes = {}
    for engine in engines:
        header = read_gguf_header(locate_weights(engine.weights))
        if "tokenizer.ggml.tokens" not in header.arrays:
            raise ValueError(f"weights: {engine.weights}: has no vocabulary")
        sizes[engine.weights] = header.arrays["tokenizer.ggml.tokens"].length
    if len(set(sizes.values())) > 1:
        raise ValueError(f"models: their vocabularies differ: {sizes}")
    sections = [
        {
            **engine.model_dump(),
            "threads": 1,
            "max_sessions": options.sessions,
            "context_tokens": PROMPT_TOKENS + options.data.max_tokens,
            "deterministic": True,
        }
        for engine in engines
    ]
    weights = (weights_name(engines[0].weights), weights_name(engines[1].weights))
    tokenizer = Tokenizer(locate_tokenizer(deployment.tokenizer))
    try:
        tokenizer.encode_chat([{"role": "user", "content": "?"}])
    except ValueError as error:
        raise ValueError(f"tokenizer: {deployment.tokenizer}: prompts are asked as a conversation: {error}") from error
    return Pair(weights, (sections[0], sections[1]), tokenizer), next(iter(sizes.values()))


def _recipe(router: str, slm: LlamaCppConfig, options: TrainOptions) -> Recipe:
    recipe: Recipe
    if router == "r2r":
        judge = judge_named(options.judge, options.judge_model)
        embed = EmbeddingRows(locate_weights(slm.weights))
        try:
            embed(torch.zeros(1, dtype=torch.int64))  # a file without them is known before the labels are made
        except EngineError as error:
            raise UserError(str(error)) from error
        recipe = R2R(embed, judge)
        recipe = recipe if options.width is None else replace(recipe, width=options.width)
    elif router == "citer":
        recipe = Citer(options.width, options.rollouts, options.rounds)
    else:
        recipe = CoLLM(options.marginal)
    return replace(recipe, fit=replace(recipe.fit, epochs=options.epochs, seed=options.data.seed))


def _print(facts: dict[str, Any], output: Path, console: Console) -> None:
    metrics = facts["metrics"]
    table = Table("on test prompts", "router", "bare entropy", "random")
    table.add_row("AUROC", _number(metrics["auroc"]), _number(metrics["auroc_entropy"]), "0.500")
    share, entropy = _number(metrics["llm_share"]), _number(metrics["recall_entropy_same_share"])
    table.add_row(f"recall at {share} of the tokens", _number(metrics["recall"]), entropy, share)
    console.print(table)
    console.print(f"threshold {facts['threshold']:.4f}; wrote {output} and its report", markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
