# SPDX-License-Identifier: Apache-2.0
"""Pydantic's errors in a deployment file as lines for its author: key path, value, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

__all__ = ["did_you_mean", "explain"]

_LONGEST_VALUE = 60  # characters of a value that a message repeats


def explain(error: ValidationError, model: type[BaseModel], data: object) -> list[str]:
    """One line for each key at fault of `data`, the parsed YAML that didn't make a `model`."""
    found = [(_path_in(data, e["loc"], e["type"]), e) for e in error.errors()]
    # A union gives an error for each of its members. The one that matched furthest says what is wrong.
    deepest = [(path, e) for path, e in found if not any(_is_inside(other, path) for other, _ in found)]
    lines: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for path, e in deepest:
        lines.setdefault(path, []).append(e)
    return [f"{_dotted(path)}: {_reason(errors, model)}" for path, errors in lines.items()]


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A question in brackets when one of `known` is near, else an empty string."""
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _is_inside(path: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(path) > len(outer) and path[: len(outer)] == outer


def _path_in(data: object, loc: tuple[int | str, ...], kind: str) -> tuple[int | str, ...]:
    """`loc` without the names of union members that pydantic puts between the keys."""
    path: list[int | str] = []
    node: object = data
    for i, part in enumerate(loc):
        if isinstance(node, dict) and (part in node or (kind == "missing" and i == len(loc) - 1)):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            continue
        path.append(part)
    if kind.startswith("union_tag"):
        path.append("type")  # every union of sections here is told apart by that key
    return tuple(path)


def _dotted(path: tuple[int | str, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


def _reason(errors: list[ErrorDetails], model: type[BaseModel]) -> str:
    first = errors[0]
    kind, value = first["type"], first["input"]
    if kind in ("missing", "union_tag_not_found"):
        return "is missing"
    if kind == "union_tag_invalid":
        return f"got {first['ctx']['tag']!r}; allowed: {first['ctx']['expected_tags']}"
    if kind == "extra_forbidden":
        key, allowed = str(first["loc"][-1]), list(_model_at(model, first["loc"][:-1]).model_fields)
        return f"unknown key{did_you_mean(key, allowed)}; allowed: {', '.join(allowed)}"
    messages = dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in errors)
    if kind == "value_error" and isinstance(value, (list, dict)) and value:
        return " or ".join(messages)  # they say what of the value is wrong
    return f"got {_short(value)}; {' or '.join(m[0].lower() + m[1:] for m in messages)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    """The class whose fields stand at `loc`, pydantic's way there from `model` (list places, union tags)."""
    for part in loc:
        if part in model.model_fields:
            members = list(_models_in(model.model_fields[str(part)].annotation))
            model = members[0]
        elif isinstance(part, str):
            model = next(m for m in members if part in get_args(m.model_fields["type"].annotation))
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model class that an annotation such as list[A | B] mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
