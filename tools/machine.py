# SPDX-License-Identifier: Apache-2.0
"""Checking a deployment against this machine: its weights, its tokenizer, its GPU, its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from python_backends.llm.catalog import WeightsError, locate_tokenizer, locate_weights, weights_name
from python_backends.llm.engines.config import LlamaCppConfig, TensorRTLLMBackendConfig, TensorRTLLMConfig
from python_backends.llm.engines.stock_facts import stock_facts
from python_backends.llm.gguf_header import GgufHeader, read_gguf_header, read_gguf_strings
from python_backends.llm.kv_size import llama_kv_cells, llama_kv_token_bytes
from routers import ServedModel
from tools.deployment import Deployment
from tools.problem import Problem
from tools.sizing.units import gib
from tools.stock_check import stock_problems
from tools.tensorrt_llm_check import checkpoint_vocabulary, tensorrt_llm_problems

__all__ = ["machine_problems", "machine_warnings", "memory_needed"]

_PROCESS_BYTES = 300 << 20  # a stub with torch, beside weights and KV
_SPECIAL = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
_TOKENS = "tokenizer.ggml.tokens"
_SCHEDULE_PROOF = {2: "Q4_0", 7: "Q8_0"}  # general.file_type of weights whose sums don't depend on the batch


@dataclass(frozen=True)
class _Weights:
    """The weights of model number `index`."""

    index: int
    engine: LlamaCppConfig
    file: Path
    header: GgufHeader

    @property
    def path(self) -> str:
        return f"models[{self.index}].engine.weights"


def machine_problems(deployment: Deployment) -> list[Problem]:
    """What keeps the deployment from serving here."""
    problems: list[Problem] = []
    weights: list[_Weights] = []
    for index in deployment.here:
        engine = deployment.models[index].engine
        if isinstance(engine, LlamaCppConfig):
            found = _read(index, engine)
            (problems if isinstance(found, Problem) else weights).append(found)  # type: ignore[arg-type]
    problems += [*stock_problems(deployment), *tensorrt_llm_problems(deployment)]
    problems += [*_contexts(weights), *_same_vocabulary(deployment, weights)]
    problems += [*_tokenizer(deployment, weights), *_gpu(weights), *_router(deployment, weights)]
    if len(problems) == 0:  # else the estimate would lack something
        problems += _memory(deployment, weights)
    return problems


def memory_needed(deployment: Deployment) -> int:
    """An estimate of the host's memory in bytes: weights, the KV of max_sessions full contexts, the processes
    themselves. A model with layers on a GPU counts as a process only.

    Raises WeightsError, OSError or ValueError when weights aren't there or can't be read.
    """
    return _estimate(deployment, _load_all(deployment))


def machine_warnings(deployment: Deployment) -> list[str]:
    """What the deployment serves with, but not quite as it says, a line each. Raises as `memory_needed` does."""
    held = " and ".join(_SCHEDULE_PROOF.values())
    return [*_unsized(deployment)] + [
        f"models[{w.index}].engine.deterministic: holds for weights in {held} only; '{w.engine.weights}' has"
        f" general.file_type {kind}, so that a greedy answer may depend on who else is served"
        for w in _load_all(deployment)
        if w.engine.deterministic
        and (kind := w.header.values.get("general.file_type")) is not None
        and kind not in _SCHEDULE_PROOF
    ]


def _unsized(deployment: Deployment) -> Iterator[str]:
    for index in deployment.here:
        engine = deployment.models[index].engine
        if isinstance(engine, (TensorRTLLMBackendConfig, TensorRTLLMConfig)) and engine.max_tokens is None:
            yield (
                f"models[{index}].engine.max_tokens: null; admission counts with a full context for each of"
                f" {engine.max_sessions} sessions, and the GPU may hold less: give it, or the section memory"
            )


def _load_all(deployment: Deployment) -> list[_Weights]:
    engines = [(index, deployment.models[index].engine) for index in deployment.here]
    return [_load(index, engine) for index, engine in engines if isinstance(engine, LlamaCppConfig)]


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
    return _Weights(index, engine, file, read_gguf_header(file))


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
        elif isinstance(model.engine, TensorRTLLMBackendConfig):
            if (size := _stock_vocabulary(model.engine)) is not None:
                sizes[f"models[{index}].engine.vocab_size"] = size
        elif isinstance(model.engine, TensorRTLLMConfig):
            if (size := checkpoint_vocabulary(model.engine)) is not None:
                sizes[f"models[{index}].engine.weights"] = size
        elif not isinstance(model.engine, LlamaCppConfig):
            sizes[f"models[{index}].engine.vocab_size"] = model.engine.vocab_size
    return sizes


def _stock_vocabulary(engine: TensorRTLLMBackendConfig) -> int | None:
    """None = nothing says it, which is a problem of its own."""
    try:
        return stock_facts(engine).vocab_size
    except ValueError:
        return None


def _tokenizer(deployment: Deployment, weights: list[_Weights]) -> Iterator[Problem]:
    if deployment.tokenizer is None or not deployment.routes:
        return
    value = repr(deployment.tokenizer)
    try:
        tokenizer = Tokenizer.from_file(str(locate_tokenizer(deployment.tokenizer) / "tokenizer.json"))
    except WeightsError as error:
        yield Problem("tokenizer", value, str(error))
        return
    except Exception as error:  # tokenizers raises plain Exceptions
        yield Problem("tokenizer", value, f"its tokenizer.json can't be loaded: {error}")
        return
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    too_small = [(p, n) for p, n in _vocabulary_sizes(deployment, weights).items() if size > n]
    for path, vocabulary in too_small:
        yield Problem("tokenizer", f"{value} with {size} tokens", f"at most {vocabulary}, the vocabulary of {path}")
    if weights and not too_small:  # the vocabularies of all models have been compared
        yield from _same_tokens(value, tokenizer, weights[0])


def _same_tokens(value: str, tokenizer: Tokenizer, w: _Weights) -> Iterator[Problem]:
    """Added tokens are left out: converting a model to GGUF may spell those in another way."""
    array = w.header.arrays.get(_TOKENS)
    theirs = read_gguf_strings(w.file, array) if array else []
    ours = sorted((i, token) for token, i in tokenizer.get_vocab(with_added_tokens=False).items())
    for token_id, token in ours:
        if theirs[token_id] != token:
            yield Problem(
                "tokenizer", f"{value}, where token {token_id} is {token!r}", f"in {w.path} it is {theirs[token_id]!r}"
            )
            return


def _router(deployment: Deployment, weights: list[_Weights]) -> Iterator[Problem]:
    """A trained router's weights against those of the models beside which it will sit."""
    names, read = deployment.model_names, {w.index: w for w in weights}
    for index, model in enumerate(deployment.models):
        try:
            router = deployment.router.router(index, names)
        except ValueError:
            return  # a problem on any machine (`config_problems`)
        if isinstance(model.engine, LlamaCppConfig):
            if index not in read:
                continue
            header = read[index].header
            tokens, width = header.arrays.get(_TOKENS), header.of_architecture("embedding_length")
            served = ServedModel(model.name, weights_name(model.engine.weights), tokens.length if tokens else 0, width)
        elif isinstance(model.engine, TensorRTLLMBackendConfig):
            served = ServedModel(model.name, None, _stock_vocabulary(model.engine) or 0)
        elif isinstance(model.engine, TensorRTLLMConfig):
            served = ServedModel(model.name, Path(model.engine.weights).name, checkpoint_vocabulary(model.engine) or 0)
        else:
            served = ServedModel(model.name, None, model.engine.vocab_size)
        try:
            router.check(served)
        except ValueError as error:
            yield Problem("router.params", repr(deployment.router.params), str(error))
            return


def _gpu(weights: list[_Weights]) -> Iterator[Problem]:
    wanted = [w for w in weights if w.engine.gpu_layers != 0]
    if not wanted or _offloads():
        return
    for w in wanted:
        yield Problem(
            f"models[{w.index}].engine.gpu_layers",
            str(w.engine.gpu_layers),
            "this build of llama.cpp has no GPU support; allowed: 0",
        )


def _offloads() -> bool:
    """Whether llama.cpp can use a GPU; True where it isn't installed, since the models' processes say that."""
    try:
        import llama_cpp
    except ImportError:
        return True
    return bool(llama_cpp.llama_supports_gpu_offload())


def _memory(deployment: Deployment, weights: list[_Weights]) -> Iterator[Problem]:
    needed, available = _estimate(deployment, weights), psutil.virtual_memory().available
    if needed > available:
        yield Problem(
            "models",
            f"about {gib(needed)} of memory needed",
            f"{gib(available)} are available",
            "lower engine.max_sessions or engine.context_tokens, or take smaller weights",
        )


def _estimate(deployment: Deployment, weights: list[_Weights]) -> int:
    processes = (len(deployment.here) + deployment.routes) * _PROCESS_BYTES
    on_host = [w for w in weights if w.engine.gpu_layers == 0]
    return processes + sum(w.file.stat().st_size + _kv_bytes(w) for w in on_host)


def _kv_bytes(w: _Weights) -> int:
    return llama_kv_cells(w.engine) * llama_kv_token_bytes(w.header, w.engine)
