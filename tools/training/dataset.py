# SPDX-License-Identifier: Apache-2.0
"""The tokens that a router is trained and judged on, as arrays."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tools.training.labels import Labels
from tools.training.prompts import Prompt, grams

__all__ = ["Split", "Text", "Tokens", "split_of", "tokens_of"]


class Split(IntEnum):
    """TRAIN: fitted. HELD_OUT: says when to stop, and where to cut. TEST: what the report's figures are from."""

    TRAIN = 0
    HELD_OUT = 1
    TEST = 2


_SHARES = (0.65, 0.15, 0.20)


@dataclass(frozen=True)
class Text:
    """A text that the small model was led along. arrays: `jobs.Followed`. llm_logprobs: FP32 [n], of the text's tokens.

    labels: of its tokens (`labels`). trained: whether routers are fitted to it. judged: whether they are judged on it:
    a text like those that are served.
    """

    prompt: str
    arrays: Mapping[str, NDArray[Any]]
    llm_logprobs: NDArray[np.float32]
    tokens: NDArray[np.int64]
    labels: Labels
    trained: bool = True
    judged: bool = True


@dataclass(frozen=True)
class Tokens:
    """n tokens of many texts, in order.

    hidden: FP32 [n, H]. top_logits: FP32 [n, 100]. choice: INT64 [n], the small model's own. entropy: [n], normalised.
    slm_logprobs, llm_logprobs: [n], of the text's token. labels: [n], 0 or 1. mismatch: [n], whether the choice isn't
    the text's token. prompt: [n], a number for each. split, trained, judged: [n].
    """

    hidden: torch.Tensor
    top_logits: torch.Tensor
    choice: torch.Tensor
    entropy: NDArray[np.float32]
    slm_logprobs: torch.Tensor
    llm_logprobs: torch.Tensor
    labels: NDArray[np.int8]
    mismatch: NDArray[np.bool_]
    prompt: NDArray[np.int64]
    split: NDArray[np.int64]
    trained: NDArray[np.bool_]
    judged: NDArray[np.bool_]

    def rows(self, split: Split) -> torch.Tensor:
        """The numbers of the tokens of a split: for TRAIN of the texts that routers are fitted to, else of those that
        they are judged on."""
        used = self.trained if split is Split.TRAIN else self.judged
        return torch.from_numpy(np.flatnonzero((self.split == split) & used))


def split_of(prompts: Sequence[Prompt], seed: int) -> dict[str, Split]:
    """Each prompt's part, at random. A prompt's tokens are never in two, nor are functions whose texts share ten
    words in a row: packages have several versions of one function."""
    groups = _alike(prompts)
    random.Random(seed).shuffle(groups)
    train, held_out = _SHARES[0] * len(prompts), (_SHARES[0] + _SHARES[1]) * len(prompts)
    parts: dict[str, Split] = {}
    for group in groups:
        part = Split.TRAIN if len(parts) < train else Split.HELD_OUT if len(parts) < held_out else Split.TEST
        parts |= dict.fromkeys(group, part)
    return parts


def _alike(prompts: Sequence[Prompt]) -> list[list[str]]:
    """The prompts' ids, those of functions that are alike together."""
    group_of: dict[tuple[str, ...], list[str]] = {}  # by ten words in a row
    groups: list[list[str]] = []
    for prompt in sorted(prompts, key=lambda p: p.id):
        words = set(grams(prompt.text)) if prompt.kind == "code" else set()
        merged = [prompt.id]
        for group in {id(g): g for w in words if (g := group_of.get(w)) is not None}.values():
            merged += group
            groups.remove(group)
            group_of |= {w: merged for w, g in group_of.items() if g is group}
        group_of |= dict.fromkeys(words, merged)
        groups.append(merged)
    return groups


def tokens_of(texts: Iterable[Text], split: Mapping[str, Split]) -> Tokens:
    """All tokens with a label."""
    parts: list[dict[str, Any]] = []
    numbers = {prompt: number for number, prompt in enumerate(sorted(split))}
    for text in texts:
        known = text.labels >= 0
        n = int(known.sum())
        parts.append(
            {
                "hidden": text.arrays["hidden"][known],
                "top_logits": text.arrays["top_logits"][known],
                "choice": text.arrays["argmax"][known],
                "entropy": text.arrays["entropy"][known],
                "slm_logprobs": text.arrays["logprobs"][known],
                "llm_logprobs": text.llm_logprobs[known],
                "labels": text.labels[known],
                "mismatch": (text.arrays["argmax"] != text.tokens)[known],
                "prompt": np.full(n, numbers[text.prompt]),
                "split": np.full(n, int(split[text.prompt])),
                "trained": np.full(n, text.trained),
                "judged": np.full(n, text.judged),
            }
        )
    joined: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name in ("hidden", "top_logits", "choice", "slm_logprobs", "llm_logprobs"):
        joined[name] = torch.from_numpy(joined[name])
    return Tokens(**joined)
