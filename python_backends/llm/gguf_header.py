# SPDX-License-Identifier: Apache-2.0
"""The metadata at the start of a GGUF file, its arrays only when they are asked for, and where a tensor lies.

The gguf package's reader makes objects of every string of the vocabulary: 10 s for Qwen2's 151,936 tokens on
the machine where this was written. Here an array is skipped, and known by its place, its length and a digest.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["Array", "GgufHeader", "GgufTensor", "locate_gguf_tensor", "read_gguf_header", "read_gguf_strings"]

# GGUF's value types; 8 is a string, 9 an array
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # of the tensors, where general.alignment doesn't say


@dataclass(frozen=True)
class Array:
    """length: of the array. digest: equal for equal contents. start: where it lies in its file, in bytes."""

    length: int
    digest: str
    start: int = field(compare=False)


@dataclass(frozen=True)
class GgufHeader:
    """values: the scalars and strings by key. arrays: the arrays by key."""

    values: dict[str, int | float | bool | str]
    arrays: dict[str, Array]

    def of_architecture(self, key: str) -> int | None:
        """An integer that the file has under its architecture's name, such as "qwen2.block_count"."""
        value = self.values.get(f"{self.values.get('general.architecture')}.{key}")
        return value if isinstance(value, int) else None


@dataclass(frozen=True)
class GgufTensor:
    """columns, rows: of a matrix, the numbers of a row side by side. kind: GGML's number of its type. start: of its
    first byte in the file."""

    columns: int
    rows: int
    kind: int
    start: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises ValueError when the file isn't GGUF version 2 or 3, OSError when it can't be read."""
    with _mapped(path) as data:
        return _Reader(data).header()


def locate_gguf_tensor(path: Path, name: str) -> GgufTensor:
    """Where the matrix `name` lies in `path`. Raises as `read_gguf_header` does, and ValueError without one."""
    with _mapped(path) as data:
        return _Reader(data).tensor(name)


def read_gguf_strings(path: Path, array: Array) -> list[str]:
    """The strings of an array of the header of `path`. Raises as `read_gguf_header` does."""
    with _mapped(path) as data:
        return _Reader(data, array.start).strings(array.length)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """The file's bytes. What a reader of them runs into is a ValueError."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            yield data
        except (struct.error, KeyError, UnicodeDecodeError, ZeroDivisionError) as error:
            raise ValueError(f"its header is damaged: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap, at: int = 0) -> None:
        self._data = data
        self._at = at

    def header(self) -> GgufHeader:
        magic, version = self._data[:4], self._unpack_at(4, "<I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it is not a GGUF file of version 2 or 3")
        entries = int(self._unpack_at(16, "<Q"))  # after the number of tensors
        self._at = 24
        header = GgufHeader({}, {})
        for _ in range(entries):
            key, kind = self._string(), int(self._scalar("<I"))
            if kind == _ARRAY:
                header.arrays[key] = self._array()
            else:
                header.values[key] = self._string() if kind == _STRING else self._scalar(_SCALARS[kind])
        return header

    def tensor(self, name: str) -> GgufTensor:
        """Of the list that follows the metadata."""
        header = self.header()
        found = None
        for _ in range(int(self._unpack_at(8, "<Q"))):
            called, dimensions = self._string(), int(self._scalar("<I"))
            shape = [int(self._scalar("<Q")) for _ in range(dimensions)]
            kind, offset = int(self._scalar("<I")), int(self._scalar("<Q"))
            if called == name and dimensions == 2:
                found = GgufTensor(shape[0], shape[1], kind, offset)
        if found is None:
            raise ValueError(f"it has no matrix '{name}'")
        alignment = int(header.values.get("general.alignment", _ALIGNMENT))
        first = -(-self._at // alignment) * alignment
        return replace(found, start=first + found.start)

    def strings(self, count: int) -> list[str]:
        return [self._string() for _ in range(count)]

    def _array(self) -> Array:
        kind, length = int(self._scalar("<I")), int(self._scalar("<Q"))
        start = self._at
        if kind == _STRING:
            self._skip_strings(length)
        else:
            self._skip(length * struct.calcsize(_SCALARS[kind]))
        return Array(length, hashlib.sha256(self._data[start : self._at]).hexdigest(), start)

    def _skip_strings(self, count: int) -> None:
        length_at = struct.Struct("<Q").unpack_from
        at, data, size = self._at, self._data, len(self._data)
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
            if at > size:
                break
        self._skip(at - self._at)

    def _skip(self, count: int) -> None:
        """Raises ValueError where the file ends before that: a damaged length can be any number."""
        self._at += count
        if self._at > len(self._data):
            raise ValueError("its header is damaged: it says that it is longer than the file")

    def _string(self) -> str:
        length = int(self._scalar("<Q"))
        start = self._at
        self._skip(length)
        return self._data[start : self._at].decode()

    def _scalar(self, layout: str) -> int | float | bool:
        value = self._unpack_at(self._at, layout)
        self._at += struct.calcsize(layout)
        return value

    def _unpack_at(self, at: int, layout: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from(layout, self._data, at)[0]
        return value
