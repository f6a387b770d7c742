# SPDX-License-Identifier: Apache-2.0
"""What the shipped routers' scores tell apart on the test prompts of the training that made them.

R2R's labels are of two kinds. Where the large model's answer is right, tests judged what came of the small model's
choice; where it is wrong, another statement counts as divergent by rule. An AUROC over both says mostly how well a
score finds the mismatches. Here each kind stands alone, for every router and the bare entropy. Reads a work folder of
`tokenrouter train r2r`; runs no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import nn

from python_backends.llm.catalog import WeightsError, locate_weights
from python_backends.llm.engines.embedding_rows import EmbeddingRows
from routers.networks import CiterNetwork, CoLLMHead, R2RNetwork, restore
from routers.weights import RouterFile, load_router
from tools.errors import UserError
from tools.training.calibration import auroc, auroc_interval
from tools.training.dataset import Split, Text, Tokens, split_of, tokens_of
from tools.training.fitting import predict
from tools.training.judges import TestsJudge
from tools.training.labels import Labels, r2r_labels
from tools.training.prompts import fingerprint
from tools.training.recipes import R2R, Citer, CoLLM, Embed, Recipe
from tools.training.stages import kept_prompts
from tools.training.work_folder import WorkFolder

NETWORKS: dict[str, type[nn.Module]] = {"r2r": R2RNetwork, "citer": CiterNetwork, "co_llm": CoLLMHead}
ENTROPY = "bare entropy"
_COLUMNS = ("positives", "against", *NETWORKS, ENTROPY)
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Folder:
    """A training's tokens along the large model's answers.

    tokens: all of them; their labels are R2R's, -1 = no verdict. right: [n], whether the token's answer is right.
    options: the folder's. prompts: their fingerprint.
    """

    tokens: Tokens
    right: Mask
    options: Mapping[str, Any]
    prompts: str

    @property
    def test(self) -> Mask:
        found: Mask = self.tokens.split == Split.TEST
        return found


@dataclass(frozen=True)
class Comparison:
    """positive: [n], the tokens to be found. among: [n], in these, and no others."""

    name: str
    positive: Mask
    among: Mask


def read_folder(path: Path) -> Folder:
    """Raises UserError when it isn't the folder of a finished `tokenrouter train r2r` with tests as the judge."""
    try:
        options = json.loads((path / "options.json").read_text(encoding="utf-8"))
        folder = WorkFolder(path, options)
        with folder.alone():
            prompts = kept_prompts(folder.records("prompts"))
            answers, outcomes = folder.records("answers"), folder.records("outcomes")
            verdicts = folder.records(f"verdicts-{TestsJudge.name}")
            texts, right = [], {}
            for prompt in prompts:
                answer, arrays = answers[prompt.id], folder.load_arrays("slm-answers", prompt.id)
                said = {int(at): verdict for at, verdict in verdicts[prompt.id]["verdicts"].items()}
                written = np.array(answer["token_ids"])
                labels = r2r_labels(written, arrays["argmax"], said)
                logprobs = np.array(answer["logprobs"], np.float32)
                # `tokens_of` leaves out what is below 0: here a token without a verdict is still a mismatch
                texts.append(Text(prompt.id, arrays, logprobs, written, labels + np.int8(1)))
                right[prompt.id] = bool(outcomes[prompt.id]["passed"])
            split = split_of(prompts, options["seed"])
    except (OSError, ValueError, LookupError) as error:
        raise UserError(
            f"--work: {path}: must be a folder in which `tokenrouter train r2r` came to its end: {error!r}"
        ) from error
    tokens = tokens_of(texts, split)
    known = np.array([right[key] for key in sorted(split)])  # `Tokens.prompt` numbers them so
    labels = (tokens.labels - 1).astype(np.int8)
    return Folder(replace(tokens, labels=labels), known[tokens.prompt], options, fingerprint(prompts))


def comparisons(folder: Folder) -> list[Comparison]:
    """The four of the table, on test prompts."""
    tokens, test = folder.tokens, folder.test
    divergent, judged = tokens.labels == 1, test & (tokens.labels >= 0)
    return [
        Comparison("mismatches", tokens.mismatch, test),
        Comparison("divergent by R2R's labels", divergent, judged),
        Comparison("divergent, right answers only", divergent, judged & folder.right),
        Comparison(
            "divergent against harmless mismatches, right answers only",
            divergent,
            judged & folder.right & tokens.mismatch,
        ),
    ]


def counts(labels: Labels, among: Mask, folder: Folder) -> dict[str, int]:
    """Of these tokens: mismatches, and what R2R's labels say of them."""
    mismatch, divergent = folder.tokens.mismatch & among, (labels == 1) & among
    return {
        "tokens": int(among.sum()),
        "prompts": len(np.unique(folder.tokens.prompt[among])),
        "mismatches": int(mismatch.sum()),
        "divergent": int(divergent.sum()),
        "divergent_by_tests": int((divergent & folder.right).sum()),
        "divergent_by_rule": int((divergent & ~folder.right).sum()),
        "no_verdict": int((among & (labels < 0)).sum()),
    }


def scores_of(file: RouterFile, recipe: Recipe, folder: Folder) -> NDArray[np.float64]:
    """A router's scores of all tokens, FP64 [n]. Raises UserError when it was trained in another folder: its training
    prompts could be among the test prompts."""
    data = file.header.data
    wanted = {
        "models": folder.options["models"],
        "prompts": folder.prompts,
        "seed": folder.options["seed"],
        "max_tokens": folder.options["max_tokens"],
    }
    found = {"models": file.header.models} | {name: data.get(name) for name in wanted if name != "models"}
    if found != wanted:
        name = next(name for name in wanted if found[name] != wanted[name])
        raise UserError(f"--work: has {name} = {wanted[name]}; {recipe.algorithm} was trained with {found[name]}")
    network: nn.Module = restore(NETWORKS[recipe.algorithm], file.header.network, file.tensors)
    scores: NDArray[np.float64] = recipe.scores(predict(network, recipe.inputs(folder.tokens))).numpy()
    return scores


def measure(folder: Folder, scores: Mapping[str, NDArray[np.floating[Any]]]) -> list[dict[str, Any]]:
    """A row for each comparison: the counts, and of each score its AUROC with the 95 % interval. Raises UserError when
    the test prompts lack one of the two kinds."""
    rows = []
    for comparison in comparisons(folder):
        among = comparison.among
        labels, prompts = comparison.positive[among].astype(np.int8), folder.tokens.prompt[among]
        if len(np.unique(labels)) < 2:
            raise UserError(f"--work: {comparison.name}: {labels.sum()} of {len(labels)} tokens; nothing to tell apart")
        row: dict[str, Any] = {
            "name": comparison.name,
            "prompts": len(np.unique(prompts)),
            "positives": int(labels.sum()),
            "against": int((labels == 0).sum()),
        }
        for name, values in scores.items():
            low, high = auroc_interval(labels, values[among], prompts, folder.options["seed"])
            row[name] = {
                "auroc": round(auroc(labels, values[among]), 4),
                "auroc_95": [round(low, 4), round(high, 4)],
            }
        rows.append(row)
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    labels = result["labels"]
    lines = [
        "# What the shipped routers' scores tell apart",
        "",
        "`python -m perf.router_auroc --work FOLDER`, the folder of the `tokenrouter train` that made them. AUROC and"
        " its 95 % interval (whole prompts drawn with replacement), on test prompts, along the large model's answers.",
        "",
        "| | " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * (len(_COLUMNS) + 1),
        *(f"| {row['name']} | " + " | ".join(_cells(row)) + " |" for row in result["rows"]),
        "",
        "R2R's labels: divergent *by tests* where the large model's answer is right and the one that follows from the"
        " small model's choice is wrong; *by rule* where the large model's answer is wrong and the next statement is"
        " another one.",
        "",
        "| prompts | tokens | mismatches | divergent | of them by tests | by rule | no verdict |",
        "|" + "---|" * 7,
    ]
    for name in ("all", "test"):
        of = labels[name]
        numbers = [of[key] for key in ("tokens", "mismatches", "divergent", "divergent_by_tests", "divergent_by_rule")]
        lines.append(
            f"| {name}: {of['prompts']} | " + " | ".join(f"{n:,}" for n in [*numbers, of["no_verdict"]]) + " |"
        )
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    found = [f"{row['positives']:,}", f"{row['against']:,}"]
    for name in (*NETWORKS, ENTROPY):
        low, high = row[name]["auroc_95"]
        found.append(f"{row[name]['auroc']:.3f} ({low:.3f} to {high:.3f})")
    return found


def shipped_scores(folder: Folder, routers: Path, embed: Embed) -> dict[str, NDArray[np.floating[Any]]]:
    """Of the routers in a folder of them, and of the bare entropy. Raises ValueError when one is missing or no good,
    UserError as `scores_of` does."""
    recipes: list[Recipe] = [R2R(embed, TestsJudge()), Citer(), CoLLM()]
    scores: dict[str, NDArray[np.floating[Any]]] = {}
    for recipe in recipes:
        found = sorted(routers.glob(f"{recipe.algorithm}-*.safetensors"))
        if len(found) != 1:
            raise ValueError(f"--routers: {routers}: has {len(found)} {recipe.algorithm}-*.safetensors; must have one")
        scores[recipe.algorithm] = scores_of(load_router(found[0], recipe.algorithm), recipe, folder)
    return scores | {ENTROPY: folder.tokens.entropy}


def main(
    work: Annotated[Path, typer.Option(help="the folder of `tokenrouter train` that the routers were made in")],
    routers: Annotated[Path, typer.Option(help="the folder of the routers")] = Path("routers/pretrained"),
    output: Annotated[Path, typer.Option(help="the folder of the results")] = Path("perf/results"),
) -> None:
    """Measure the routers' scores on test prompts, by the kind of label."""
    torch.set_num_threads(1)
    try:
        folder = read_folder(work)
        embed = EmbeddingRows(locate_weights(folder.options["models"][0]))
        rows = measure(folder, shipped_scores(folder, routers, embed))
    except (UserError, WeightsError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    every = np.ones(len(folder.right), bool)
    labels = folder.tokens.labels
    result = {
        "prompts": folder.prompts,
        "options": folder.options,
        "labels": {name: counts(labels, of, folder) for name, of in (("all", every), ("test", folder.test))},
        "rows": rows,
    }
    typer.echo(markdown(result))
    output.mkdir(parents=True, exist_ok=True)
    (output / "router_auroc.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (output / "router_auroc.md").write_text(markdown(result), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
