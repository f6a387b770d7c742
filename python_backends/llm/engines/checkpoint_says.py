# SPDX-License-Identifier: Apache-2.0
"""What the two JSON files of a Hugging Face checkpoint say of the model, whichever engine loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CheckpointSays", "checkpoint_says"]


@dataclass(frozen=True)
class CheckpointSays:
    """vocab_size: columns of the logits. context_tokens: the most that it was made for. eos_token_ids: those that end a
    request. None = the files don't say."""

    vocab_size: int | None
    context_tokens: int | None
    eos_token_ids: tuple[int, ...] | None


def checkpoint_says(config: Mapping[str, Any], generation: Mapping[str, Any]) -> CheckpointSays:
    """config: of config.json, where a model of more than text has its text model in a section of its own.
    generation: of generation_config.json, which says better what ends a generation; empty = there is none."""
    text = config.get("text_config")
    places = [text, config] if isinstance(text, dict) else [config]
    return CheckpointSays(
        _number(places, "vocab_size"), _number(places, "max_position_embeddings"), _ends([generation, *places])
    )


def _number(places: list[Mapping[str, Any]], key: str) -> int | None:
    """Of the first place that has one."""
    return next((place[key] for place in places if isinstance(place.get(key), int)), None)


def _ends(places: list[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """eos_token_id is a number or a list of them; an empty one says nothing."""
    ends = next((place["eos_token_id"] for place in places if place.get("eos_token_id") not in (None, [])), None)
    return tuple(ends) if isinstance(ends, list) else None if ends is None else (ends,)
