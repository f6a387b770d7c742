# SPDX-License-Identifier: Apache-2.0
"""Checking a deployment against this machine: its weights, its tokenizer, its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from python_backends.llm.catalog import WeightsError, locate_tokenizer, locate_weights
from python_backends.llm.engines.config import LlamaCppConfig
from tools.deployment import Deployment
from tools.gguf_header import GgufHeader, read_gguf_header
from tools.problem import Problem

__all__ = ["machine_problems", "memory_needed"]

_PROCESS_BYTES = 300 << 20  # a stub with torch, beside weights and KV
_KV_BYTES = 2  # of one number in llama.cpp's KV, FP16
_SPECIAL = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class _Weights:
    """The weights of model number `index`."""

    index: int
    engine: LlamaCppConfig
    header: GgufHeader
    size_bytes: int

    @property
    def path(self) -> str:
        return f"models[{self.index}].engine.weights"


def machine_problems(deployment: Deployment) -> list[Problem]:
    """What keeps the deployment from serving here."""
    problems: list[Problem] = []
    weights: list[_Weights] = []
    for index, model in enumerate(deployment.models):
        if isinstance(model.engine, LlamaCppConfig):
            found = _read(index, model.engine)
            (problems if isinstance(found, Problem) else weights).append(found)  # type: ignore[arg-type]
    problems += [*_contexts(weights), *_same_vocabulary(deployment, weights)]
    problems += _tokenizer(deployment, weights)
    if len(problems) == 0:  # else the estimate would lack something
        problems += _memory(deployment, weights)
    return problems


def memory_needed(deployment: Deployment) -> int:
    """An estimate in bytes: weights, the KV of max_sessions full contexts, the processes themselves.

    Raises WeightsError, OSError or ValueError when weights aren't there or can't be read.
    """
    found = [
        _load(index, model.engine)
        for index, model in enumerate(deployment.models)
        if isinstance(model.engine, LlamaCppConfig)
    ]
    return _estimate(deployment, found)


def _read(index: int, engine: LlamaCppConfig) -> _Weights | Problem:
    path = f"models[{index}].engine.weights"
    try:
        return _load(index, engine)
    except WeightsError as error:
        return Problem(path, repr(engine.weights), str(error))
    except (OSError, ValueError) as error:
        return Problem(path, repr(engine.weights), f"must be a GGUF file; {error}")


def _load(index: int, engine: LlamaCppConfig) -> _Weights:
    file = locate_weights(engine.weights)
    return _Weights(index, engine, read_gguf_header(file), file.stat().st_size)


def _contexts(weights: list[_Weights]) -> Iterator[Problem]:
    for w in weights:
        trained = w.header.of_architecture("context_length")
        if trained is not None and w.engine.context_tokens > trained:
            yield Problem(
                f"models[{w.index}].engine.context_tokens",
                str(w.engine.context_tokens),
                f"at most {trained}, which these weights were trained for",
            )


def _same_vocabulary(deployment: Deployment, weights: list[_Weights]) -> Iterator[Problem]:
    sizes = _vocabulary_sizes(deployment, weights)
    first = next(iter(sizes), None)  # None: no weights could be read
    for path, size in sizes.items():
        if first is not None and size != sizes[first]:
            yield Problem(path, f"a vocabulary of {size}", f"must have that of {first}, {sizes[first]}")
    for w in weights[1:]:
        ours, theirs = weights[0].header, w.header
        if ours.arrays.get(_TOKENS) != theirs.arrays.get(_TOKENS) and sizes[w.path] == sizes[weights[0].path]:
            yield Problem(w.path, repr(w.engine.weights), f"must have the vocabulary of {weights[0].path}")
        for key in _SPECIAL:
            a, b = ours.values.get(key), theirs.values.get(key)
            if a != b:
                yield Problem(w.path, f"{key} {b}", f"must be {a}, as in {weights[0].path}")


def _vocabulary_sizes(deployment: Deployment, weights: list[_Weights]) -> dict[str, int]:
    """By the key that settles it, in the order of the models; without the weights that couldn't be read."""
    read = {w.index: w for w in weights}
    sizes = {}
    for index, model in enumerate(deployment.models):
        if index in read:
            tokens = read[index].header.arrays.get(_TOKENS)
            sizes[read[index].path] = tokens.length if tokens else 0
        elif not isinstance(model.engine, LlamaCppConfig):
            sizes[f"models[{index}].engine.vocab_size"] = model.engine.vocab_size
    return sizes


def _tokenizer(deployment: Deployment, weights: list[_Weights]) -> Iterator[Problem]:
    if deployment.tokenizer is None:
        return
    value = repr(deployment.tokenizer)
    try:
        size = _tokenizer_size(locate_tokenizer(deployment.tokenizer))
    except WeightsError as error:
        yield Problem("tokenizer", value, str(error))
        return
    except Exception as error:  # tokenizers raises plain Exceptions
        yield Problem("tokenizer", value, f"its tokenizer.json can't be loaded: {error}")
        return
    for path, vocabulary in _vocabulary_sizes(deployment, weights).items():
        if size > vocabulary:
            yield Problem("tokenizer", f"{value} with {size} tokens", f"at most {vocabulary}, the vocabulary of {path}")


def _tokenizer_size(folder: Path) -> int:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True).values()
    return max(ids) + 1


def _memory(deployment: Deployment, weights: list[_Weights]) -> Iterator[Problem]:
    needed, available = _estimate(deployment, weights), psutil.virtual_memory().available
    if needed > available:
        yield Problem(
            "models",
            f"about {_gib(needed)} of memory needed",
            f"{_gib(available)} are available",
            "lower engine.max_sessions or engine.context_tokens, or take smaller weights",
        )


def _estimate(deployment: Deployment, weights: list[_Weights]) -> int:
    processes = (len(deployment.models) + 1) * _PROCESS_BYTES
    return processes + sum(w.size_bytes + _kv_bytes(w) for w in weights)


def _kv_bytes(w: _Weights) -> int:
    """Keys and values of every layer and token; llama.cpp takes them at once for all sessions."""
    layers = w.header.of_architecture("block_count") or 0
    heads = w.header.of_architecture("attention.head_count") or 1
    kv_heads = w.header.of_architecture("attention.head_count_kv") or heads
    width = w.header.of_architecture("embedding_length") or 0
    per_token = layers * kv_heads * (width // heads) * 2 * _KV_BYTES
    return per_token * w.engine.context_tokens * w.engine.max_sessions


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
