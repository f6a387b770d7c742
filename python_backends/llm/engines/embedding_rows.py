# SPDX-License-Identifier: Apache-2.0
"""Rows of a model's input embedding, out of its GGUF file: the whole table would take hundreds of MB."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from python_backends.llm.engines.base import EngineError
from python_backends.llm.gguf_header import GgufTensor, locate_gguf_tensor

__all__ = ["EmbeddingRows"]

_TENSOR = "token_embd.weight"  # also the head's, where a model ties the two


class EmbeddingRows:
    """INT64 [n] -> FP32 [n, embedding size], the numbers that llama.cpp computes with. The file is opened with the
    first row, and then mapped: nothing is read but the rows asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Raises EngineError when the file has no such table, or it is of a type that can't be unpacked."""
        kind, table = self._table
        try:
            return torch.from_numpy(gguf.quants.dequantize(table[token_ids.numpy()], kind))
        except NotImplementedError as error:
            raise EngineError(f"weights: {self._path}: {_TENSOR} is of type {kind.name}, unknown here") from error

    @cached_property
    def _table(self) -> tuple[Any, np.memmap[Any, Any]]:
        """The type, and the table's bytes, a row for each token."""
        try:
            found: GgufTensor = locate_gguf_tensor(self._path, _TENSOR)
            kind = gguf.GGMLQuantizationType(found.kind)
            numbers, size = gguf.GGML_QUANT_SIZES[kind]
            shape = (found.rows, found.columns // numbers * size)
            return kind, np.memmap(self._path, np.uint8, "r", found.start, shape)
        except (OSError, ValueError) as error:  # ValueError also of a type unknown here, and of a file that is cut off
            raise EngineError(f"weights: {self._path}: {error}") from error
