# SPDX-License-Identifier: Apache-2.0
"""Whether the installed `tensorrt_llm` has the names and the signatures that the engine was written against.

`contracts/<version>.json` records them, in two lists: `public`, what the engine can't be without, and `kept`, the
private names of `kept.py`. The records of a list are grouped by where they come from: `read` is the release's pages or
the copy of the source (repository@commit) and `version` what is known of its version, and whether only names were seen;
`inferred` says what a record that could not be read for its version was taken over from. All are checked alike; a
difference from an inferred one says that it is one.

A record has a module, a name in it, and a kind:

- `attribute`: the name is there.
- `callable`: it takes `parameters`, by these names, and needs no others. What it takes as **kwargs isn't known, and
  passes; so does a binding, which has no signature.
- `fields`: a pydantic model that has the fields `parameters`.
- `instance`: made without arguments, it has the attributes `parameters`.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.tensorrt_llm.package import minor_version

__all__ = ["Contract", "Record", "load_contract", "mismatches", "require"]

_ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Record:
    """One name: see the module. inferred: from what; None when it was read."""

    module: str
    name: str
    kind: Literal["attribute", "callable", "fields", "instance"]
    parameters: tuple[str, ...] = ()
    inferred: str | None = None


@dataclass(frozen=True)
class Contract:
    """What one minor version is recorded to have."""

    version: str
    public: tuple[Record, ...]
    kept: tuple[Record, ...]


def load_contract(version: str) -> Contract:
    """The recorded list for an installed version. Raises EngineError, naming it, when it isn't supported."""
    minor = minor_version(version)
    values = json.loads(resources.files(f"{__package__}.contracts").joinpath(f"{minor}.json").read_text("utf-8"))
    return Contract(minor, tuple(_records(values["public"])), tuple(_records(values["kept"])))


def _records(groups: Iterable[dict[str, Any]]) -> Iterator[Record]:
    for group in groups:
        for values in group["records"]:
            parameters = tuple(values.get("parameters", ()))
            yield Record(**{**values, "parameters": parameters}, inferred=group.get("inferred"))


def mismatches(records: Iterable[Record]) -> list[str]:
    """A line for each record that the installed package doesn't meet: the name, what was found, what was expected."""
    return [f"{r.module}.{r.name}: {problem}" for r in records if (problem := _problem(r)) is not None]


def _problem(record: Record) -> str | None:
    try:
        value: Any = importlib.import_module(record.module)
        for part in record.name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        return f"found nothing ({error}), expected {_expected(record)}"
    if (found := _CHECKS[record.kind](value, record.parameters)) is None:
        return None
    return f"found {found}, expected {_expected(record)}"


def _expected(record: Record) -> str:
    parameters = f" ({', '.join(record.parameters)})" if record.parameters else ""
    return record.kind + parameters + (f" [inferred from {record.inferred}]" if record.inferred else "")


def _attribute(value: Any, parameters: Sequence[str]) -> str | None:
    return None


def _callable(value: Any, parameters: Sequence[str]) -> str | None:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a binding, which has none
        return None if callable(value) else f"a {type(value).__name__}"
    found = [p for p in signature.parameters.values() if p.name != "self"]
    named = [p for p in found if p.kind not in _ANYTHING]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found)
    lacks = set(parameters) - {p.name for p in named}
    needs = [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in parameters]
    return None if not needs and (takes_any or not lacks) else f"callable ({', '.join(p.name for p in found)})"


def _fields(value: Any, parameters: Sequence[str]) -> str | None:
    fields = getattr(value, "model_fields", None)
    if fields is None:
        return f"a {type(value).__name__} without fields"
    lacks = [p for p in parameters if p not in fields]
    return f"no fields {', '.join(lacks)}" if lacks else None


def _instance(value: Any, parameters: Sequence[str]) -> str | None:
    try:
        made = value()
    except Exception as error:
        return f"it can't be made without arguments: {error}"
    lacks = [p for p in parameters if not hasattr(made, p)]
    return f"no attributes {', '.join(lacks)}" if lacks else None


_CHECKS: dict[str, Callable[[Any, Sequence[str]], str | None]] = {
    "attribute": _attribute,
    "callable": _callable,
    "fields": _fields,
    "instance": _instance,
}


def require(records: Iterable[Record], version: str) -> None:
    """Raises EngineError naming each record that isn't met."""
    if found := mismatches(records):
        raise EngineError(f"tensorrt_llm {version} isn't what this engine was written for: {'; '.join(found)}")
