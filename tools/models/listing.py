# SPDX-License-Identifier: Apache-2.0
"""The table of `tokenrouter models list`."""

from __future__ import annotations

from dataclasses import dataclass

from python_backends.llm.catalog import CATALOG, Derived, Official, is_present, weights_path

__all__ = ["ModelRow", "list_models"]


@dataclass(frozen=True)
class ModelRow:
    """One catalogued model. size_bytes of an absent derived file is an estimate."""

    name: str
    family: str
    size_bytes: int
    present: bool
    licence: str
    source: str


def list_models() -> list[ModelRow]:
    """All of the catalogue, by family and name."""
    entries = sorted(CATALOG.values(), key=lambda entry: (entry.family, entry.name))
    return [_row(entry) for entry in entries]


def _row(entry: Official | Derived) -> ModelRow:
    present = is_present(entry.name)
    official = CATALOG[entry.source] if isinstance(entry, Derived) else entry
    if not isinstance(official, Official):
        raise TypeError(f"the source of '{entry.name}' is not an official file")
    return ModelRow(
        name=entry.name,
        family=entry.family,
        size_bytes=weights_path(entry.name).stat().st_size if present else entry.size_bytes,
        present=present,
        licence=official.licence,
        source=f"made from {entry.source}" if isinstance(entry, Derived) else entry.hub.repo,
    )
