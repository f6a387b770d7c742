# SPDX-License-Identifier: Apache-2.0
"""What the engine must know of a model before it is loaded, from its checkpoint's own files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backends.llm.engines.checkpoint_says import checkpoint_says

__all__ = ["Checkpoint", "is_folder", "read_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """vocab_size: columns of the logits. eos_token_ids: those that end a request."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


def read_checkpoint(weights: str) -> Checkpoint:
    """Of a Hugging Face folder, or of a model of that name (downloaded unless it is in the cache).

    Raises ValueError naming the field `weights` and the file that isn't there or says too little.
    """
    model = _json(weights, "config.json", required=True)
    says = checkpoint_says(model, _json(weights, "generation_config.json", required=False))
    if says.vocab_size is None:
        raise ValueError(f"weights: {weights}: its config.json gives no vocab_size")
    if says.eos_token_ids is None:
        raise ValueError(f"weights: {weights}: neither generation_config.json nor config.json gives an eos_token_id")
    return Checkpoint(says.vocab_size, says.eos_token_ids)


def _json(weights: str, name: str, *, required: bool) -> dict[str, Any]:
    """The file's values; empty where there is none and it isn't required."""
    try:
        values = json.loads(_file(weights, name).read_text(encoding="utf-8"))
    except OSError as error:  # no such file, no such model, or no way to it
        if not required:
            return {}
        raise ValueError(
            f"weights: {weights}: {name} can't be read; allowed: a Hugging Face model's folder or name"
            f" ({' '.join(str(error).split())})"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"weights: {weights}: {name} isn't JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"weights: {weights}: {name} must hold a JSON object")
    return values


def is_folder(weights: str) -> bool:
    """Whether it is meant as a folder, not as a name."""
    return weights.startswith(("/", ".", "~")) or Path(weights).is_dir()


def _file(weights: str, name: str) -> Path:
    """Raises OSError when it isn't there."""
    if is_folder(weights):
        return Path(weights).expanduser() / name
    from transformers.utils import cached_file

    return Path(cached_file(weights, name))
