# SPDX-License-Identifier: Apache-2.0
"""Rows of the input embedding out of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import gguf
import pytest
import torch

from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.embedding_rows import EmbeddingRows
from python_backends.llm.gguf_header import locate_gguf_tensor
from tests.unit.tools.test_validate import write_header
from tools.tiny_models import make_tiny_gguf


@pytest.mark.parametrize("quantization", ["q8_0", "q4_0"])
def test_rows_are_those_that_the_gguf_package_reads(tmp_path: Path, quantization: Literal["q8_0", "q4_0"]) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(path, seed=1, quantization=quantization)
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    whole = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    wanted = torch.tensor([0, len(whole) - 1, 7, 7])
    rows = EmbeddingRows(path)(wanted)
    assert rows.dtype == torch.float32 and torch.equal(rows, whole[wanted])


def test_a_file_without_the_table_is_named(tmp_path: Path) -> None:
    path = write_header(tmp_path / "header.gguf", ["a", "b"])
    rows = EmbeddingRows(path)  # it is the first row that is looked for
    with pytest.raises(EngineError, match=r"header\.gguf: it has no matrix 'token_embd\.weight'"):
        rows(torch.tensor([0]))


# of a file, the end of the table's name in its header, and the begin of the table; behind the name: how many dimensions
# (4 bytes), 2 of 8 bytes, and the type (4)
DAMAGES: list[tuple[Callable[[bytes, int, int], bytes], str]] = [
    (lambda whole, name, table: whole[: name + 3], "its header is damaged"),
    (lambda whole, name, table: whole[: name + 20] + b"\xee" + whole[name + 21 :], "238 is not a valid GGML"),
    (lambda whole, name, table: whole[: table + 3], "mmap length is greater than file size"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=["cut in the header", "type", "cut in the table"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[bytes, int, int], bytes], message: str) -> None:
    path, name = tmp_path / "tiny.gguf", "token_embd.weight"
    make_tiny_gguf(path, seed=1)
    whole, table = path.read_bytes(), locate_gguf_tensor(path, name).start
    path.write_bytes(damage(whole, whole.index(name.encode()) + len(name), table))
    with pytest.raises(EngineError, match=rf"tiny\.gguf: .*{message}"):
        EmbeddingRows(path)(torch.tensor([0]))
