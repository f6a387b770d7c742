# SPDX-License-Identifier: Apache-2.0
"""The few calls of llama.cpp that fetching needs: requantising a file, and tokenising as it does."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from python_backends.llm.catalog import Recipe, WeightsError
from tools.models.extra import from_extra

__all__ = ["llama_tokenizer", "requantize"]


def requantize(source: Path, target: Path, recipe: Recipe) -> None:
    """Write `source` to `target` with the weights' types that `recipe` says, on all CPUs.

    Raises WeightsError when llama.cpp can't; `target` is then absent.
    """
    llama_cpp = _quiet_llama_cpp()
    ftypes = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftypes[recipe.target]
    params.pure = recipe.pure
    params.allow_requantize = True
    params.nthread = os.cpu_count() or 1
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)) != 0:
        target.unlink(missing_ok=True)
        raise WeightsError(f"llama.cpp could not requantise {source.name} to {recipe.target}")


@contextmanager
def llama_tokenizer(weights: Path) -> Iterator[Callable[[str], list[int]]]:
    """A function from text to token ids, special tokens recognised, by the vocabulary of a GGUF file.

    Raises WeightsError when llama.cpp can't read the file.
    """
    llama_cpp = _quiet_llama_cpp()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(weights), params)
    if not model:
        raise WeightsError(f"llama.cpp could not read {weights.name}")
    vocab = llama_cpp.llama_model_get_vocab(model)

    def tokenize(text: str) -> list[int]:
        encoded = text.encode()
        ids = (llama_cpp.llama_token * (len(encoded) + 1))()  # a token is at least a byte
        count = llama_cpp.llama_tokenize(vocab, encoded, len(encoded), ids, len(ids), False, True)
        return list(ids[:count])

    try:
        yield tokenize
    finally:
        llama_cpp.llama_model_free(model)


def _quiet_llama_cpp() -> Any:
    llama_cpp = from_extra("llama_cpp")
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    return llama_cpp
