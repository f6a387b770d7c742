# SPDX-License-Identifier: Apache-2.0
"""What a trained router is worth, on prompts that it hasn't seen: JSON, Markdown, and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.commands.outputs import new_figure, save_figure
from tools.training.calibration import auroc, auroc_interval, curve, recall_at, reliability

__all__ = ["Judged", "measure", "write_report"]


@dataclass(frozen=True)
class Judged:
    """n tokens of the test prompts.

    scores: the router's. entropy: the small model's, normalised: the rule that needs no training. labels: 1 = the large
    model is needed. mismatch: it would have written something else. prompt: whose token it is.
    """

    scores: NDArray[np.float64]
    entropy: NDArray[np.float32]
    labels: NDArray[np.int8]
    mismatch: NDArray[np.bool_]
    prompt: NDArray[np.int64]


def measure(judged: Judged, cut: float, seed: int) -> dict[str, Any]:
    """The figures of a router that delegates above `cut`. Beside it the bare entropy, and random routing, whose recall
    is its share."""
    labels, scores, entropy = judged.labels, judged.scores, judged.entropy
    recall, share = recall_at(labels, scores, cut)
    same_share = float(np.quantile(entropy, 1 - share)) if len(entropy) else 0.0
    entropy_recall, _ = recall_at(labels, entropy, same_share)
    figures: dict[str, Any] = {
        "prompts": len(np.unique(judged.prompt)),
        "tokens": len(labels),
        "needed": int((labels == 1).sum()),
        "mismatches": int(judged.mismatch.sum()),
        "auroc": auroc(labels, scores),
        "auroc_95": list(auroc_interval(labels, scores, judged.prompt, seed)),
        "auroc_entropy": auroc(labels, entropy),
        "auroc_mismatch": auroc(judged.mismatch.astype(np.int8), scores),
        "auroc_mismatch_entropy": auroc(judged.mismatch.astype(np.int8), entropy),
        "recall": recall,
        "llm_share": share,
        "recall_entropy_same_share": entropy_recall,
    }
    return {name: _finite(value) for name, value in figures.items()}


def write_report(folder: Path, name: str, title: str, judged: Judged, cut: float, facts: Mapping[str, Any]) -> None:
    """Write name.json, name.md and name.png into `folder`. facts: with "metrics" as `measure` gives them. Raises
    OSError, and UserError when there is no matplotlib or the picture can't be written."""
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(_markdown(name, title, facts), encoding="utf-8")
    _picture(folder / f"{name}.png", title, judged, cut)


def _markdown(name: str, title: str, facts: Mapping[str, Any]) -> str:
    m = facts["metrics"]
    low, high = m["auroc_95"]
    lines = [
        f"# {title}",
        "",
        f"Measured on {m['tokens']:,} tokens of {m['prompts']} prompts that the router has not seen, along the large"
        f" model's own answers. {m['needed']} of them need the large model; at {m['mismatches']} it would have written"
        " something else than the small one.",
        "",
        "| | router | bare entropy |",
        "|---|---|---|",
        f"| AUROC, tokens that need the large model | {_number(m['auroc'])} (95 %: {_number(low)} to {_number(high)}) |"
        f" {_number(m['auroc_entropy'])} |",
        f"| AUROC, mismatches | {_number(m['auroc_mismatch'])} | {_number(m['auroc_mismatch_entropy'])} |",
        f"| recall at {_number(m['llm_share'])} of the tokens | {_number(m['recall'])} |"
        f" {_number(m['recall_entropy_same_share'])} |",
        "",
        f"Random routing has a recall of {_number(m['llm_share'])} there.",
        "",
        f"![ROC, share against recall, calibration]({name}.png)",
        "",
        "```json",
        json.dumps({key: value for key, value in facts.items() if key != "metrics"}, indent=1),
        "```",
        "",
    ]
    return "\n".join(lines)


def _picture(path: Path, title: str, judged: Judged, cut: float) -> None:
    figure = new_figure(13, 4.2, "train", "train")
    roc, shares, calibration = figure.subplots(1, 3)
    for label, scores, style in (("router", judged.scores, "C0-"), ("bare entropy", judged.entropy, "C1--")):
        points = curve(judged.labels, scores)
        roc.plot(points.false_share, points.recall, style, label=f"{label}: {auroc(judged.labels, scores):.3f}")
        shares.plot(points.share, points.recall, style, label=label)
    roc.plot([0, 1], [0, 1], color="grey", lw=0.5)
    roc.set(xlabel="share of the other tokens delegated", ylabel="recall", title="ROC (AUROC)")
    recall, share = recall_at(judged.labels, judged.scores, cut)
    shares.plot([share], [recall], "C0o", label="operating point")
    shares.plot([0, 1], [0, 1], color="grey", lw=0.5, label="random")
    shares.set(xlim=(0, 0.4), xlabel="LLM share of tokens", ylabel="recall", title="share against recall")
    bins = reliability(judged.labels, judged.scores)
    calibration.plot([b[0] for b in bins], [b[1] for b in bins], "C0o-")
    calibration.axvline(cut, color="grey", lw=0.8, ls=":", label="cut")
    calibration.set(
        xlabel="mean score of a tenth of the tokens", ylabel="share that needs the LLM", title="calibration"
    )
    for axes in (roc, shares, calibration):
        axes.legend(fontsize="small")
    figure.suptitle(title)
    save_figure(figure, path, "--output")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _finite(value: Any) -> Any:
    """JSON knows no nan; 4 digits are more than the data has."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value if isinstance(value, int) else round(value, 4) if np.isfinite(value) else None
