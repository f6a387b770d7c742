# SPDX-License-Identifier: Apache-2.0
"""Training one router: labels, fit, threshold, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from routers.weights import RouterHeader, save_router
from tools.errors import UserError
from tools.training.calibration import cut_for_recall, cut_for_share
from tools.training.dataset import Split, Tokens, split_of, tokens_of
from tools.training.fitting import fit, predict
from tools.training.options import RECALL
from tools.training.recipes import Recipe, Trained
from tools.training.report import Judged, measure, write_report
from tools.training.stages import Stages

__all__ = ["Target", "train_router"]


@dataclass(frozen=True)
class Target:
    """Where to cut on the held-out prompts: the fewest tokens delegated with this recall, or this share of them."""

    recall: float | None = RECALL
    llm_share: float | None = None

    def cut(self, labels: Any, scores: Any) -> float:
        """Raises UserError when the held-out prompts can't say."""
        if self.llm_share is not None:
            return cut_for_share(scores, self.llm_share)
        try:
            return cut_for_recall(labels, scores, self.recall or 0.0)
        except ValueError as error:
            raise UserError(f"train: {error}; give more prompts") from error


def train_router(recipe: Recipe, stages: Stages, target: Target, output: Path, vocab_size: int) -> dict[str, Any]:
    """Train and write `output` and, beside it, the report. Returns the figures (`report.measure`).

    Raises UserError when the prompts give no token to learn from.
    """
    with stages.folder.sitting(recipe.algorithm) as minutes:
        return _train(recipe, stages, target, output, vocab_size, minutes)


def _train(
    recipe: Recipe, stages: Stages, target: Target, output: Path, vocab_size: int, minutes: Callable[[], float]
) -> dict[str, Any]:
    seed = stages.options.seed
    before: torch.nn.Module | None = None
    split = split_of(stages.prompts, seed)
    for number in range(1, recipe.rounds + 1):
        tokens = tokens_of(recipe.texts(stages, number, before), split)
        _check(tokens)
        trained, histories, logits = _fit(recipe, stages, tokens, f"{recipe.algorithm}-{number}")
        before = trained.network
    scores = recipe.scores(logits).numpy()
    held_out, test = tokens.rows(Split.HELD_OUT).numpy(), tokens.rows(Split.TEST).numpy()
    cut = target.cut(tokens.labels[held_out], scores[held_out])
    judged = Judged(scores[test], tokens.entropy[test], tokens.labels[test], tokens.mismatch[test], tokens.prompt[test])
    metrics = measure(judged, cut, seed)
    data = {
        "prompts": stages.fingerprint,
        "code_prompts": stages.options.prompts,
        "reasoning_prompts": stages.options.reasoning,
        "max_tokens": stages.options.max_tokens,
        "seed": seed,
        "right_answers": sum(stages.outcomes.values()),
        "trained_tokens": len(tokens.rows(Split.TRAIN)),
        "trained_positives": int(tokens.labels[tokens.rows(Split.TRAIN).numpy()].sum()),
        "rounds": recipe.rounds,
        "epochs_run": [len(history) - 1 for history in histories],  # the first loss is from before them
        "target": {"llm_share": target.llm_share} if target.llm_share is not None else {"recall": target.recall},
    } | recipe.facts()
    header = RouterHeader(
        algorithm=recipe.algorithm,
        models=list(stages.pair.weights),
        hidden_size=tokens.hidden.shape[1],
        vocab_size=vocab_size,
        threshold=recipe.threshold(cut),
        network=trained.arguments,
        data=data,
        metrics=metrics,
    )
    save_router(output, header, _in_fp16(trained.network))
    facts = {
        **header.model_dump(),
        "held_out_loss": histories,
        "minutes": round(minutes(), 1),  # of all sittings with this algorithm in this folder
    }
    title = f"{recipe.algorithm} for {' and '.join(stages.pair.weights)}"
    write_report(output.parent, output.stem, title, judged, cut, facts)
    return facts


def _in_fp16(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its numbers, which are those of FP16 already."""
    return {name: x.half() if x.is_floating_point() else x for name, x in network.state_dict().items()}


def _fit(recipe: Recipe, stages: Stages, tokens: Tokens, name: str) -> tuple[Trained, list[list[float]], torch.Tensor]:
    """The network, the held-out losses of each phase, and the logits of all tokens."""
    torch.manual_seed(recipe.fit.seed)
    train, held_out = tokens.rows(Split.TRAIN), tokens.rows(Split.HELD_OUT)
    prepared = recipe.prepare(tokens, train)
    depends_on = {**recipe.facts(), "tokens": len(train), "positives": int(tokens.labels[train.numpy()].sum())}
    histories = []
    for number, phase in enumerate(prepared.phases):
        checkpoint = stages.folder.checkpoint(f"{name}-{number}", {**depends_on, "options": asdict(phase.options)})
        with _progress(stages.console, f"fitting {name}, phase {number + 1}", phase.options.epochs) as done:
            found = fit(
                prepared.network,
                prepared.inputs,
                phase.loss,
                train,
                held_out,
                phase.held_out_loss,
                phase.options,
                checkpoint,
                done,
            )
        histories.append([round(x, 5) for x in found])
    trained = prepared.finish()
    return trained, histories, predict(trained.network, prepared.raw)


def _check(tokens: Tokens) -> None:
    for split in Split:
        rows = tokens.rows(split).numpy()
        needed = int(tokens.labels[rows].sum())
        if needed == 0 or needed == len(rows):
            raise UserError(
                f"train: {needed} of the {len(rows)} tokens of the {split.name.lower()} prompts need the large model:"
                " nothing to learn from; give more prompts"
            )


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
