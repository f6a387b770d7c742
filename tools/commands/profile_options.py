# SPDX-License-Identifier: Apache-2.0
"""A profile as a command is given it: a file, an algorithm with its rates, or matrices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from python_backends.token_router.threshold.forms import ALGORITHMS, Form, form
from python_backends.token_router.threshold.profile import Profile, StepLatency
from tools.config_errors import explain
from tools.errors import UserError

__all__ = ["ProfileOptions", "load_profile"]

_TWO = ["slm", "llm"]


@dataclass(frozen=True)
class ProfileOptions:
    """The options that `threshold` and `simulate` share. file: as `tokenrouter profile` writes it; or algorithm,
    with the rates that it takes; or matrix_p and matrix_c, as JSON. latency_ms: with the last two, one for each
    model."""

    file: Path | None = None
    algorithm: str | None = None
    p: float | None = None
    q: float | None = None
    weights: Sequence[float] | None = None
    matrix_p: str | None = None
    matrix_c: str | None = None
    latency_ms: Sequence[float] | None = None

    def given(self) -> dict[str, Any]:
        """By option what was given, the file aside."""
        options = {
            "--algorithm": self.algorithm,
            "--p": self.p,
            "--q": self.q,
            "--weights": self.weights or None,
            "--matrix-p": self.matrix_p,
            "--matrix-c": self.matrix_c,
            "--latency-ms": self.latency_ms or None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def profile(self) -> Profile:
        """Raises UserError when they are no profile."""
        given = self.given()
        if self.file is not None:
            if given:
                name, value = next(iter(given.items()))
                raise UserError(f"{name} {value}: given beside the profile {self.file}; allowed: one of them")
            return load_profile(self.file)
        if self.matrix_p is not None or self.matrix_c is not None:
            return self._of_matrices(given)
        if self.algorithm is None:
            names = ", ".join(ALGORITHMS)
            raise UserError(f"give a profile's file, or --algorithm, one of {names}, or --matrix-p and --matrix-c")
        try:
            matrices = form(self.algorithm, p=self.p, q=self.q, weights=self.weights or None)
        except ValueError as error:
            raise UserError(f"--{error}") from error
        data = self._data(matrices) | {"source": {"algorithm": self.algorithm}}
        if len(matrices.p) == len(_TWO):
            data["models"] = _TWO
        return Profile.model_validate(data)

    def _of_matrices(self, given: dict[str, Any]) -> Profile:
        if self.matrix_p is None or self.matrix_c is None:
            missing = "--matrix-p" if self.matrix_p is None else "--matrix-c"
            raise UserError(f"{missing}: not given; --matrix-p and --matrix-c go together")
        if others := [name for name in given if name not in ("--matrix-p", "--matrix-c", "--latency-ms")]:
            raise UserError(f"{others[0]} {given[others[0]]}: given beside --matrix-p; allowed: one of them")
        data = self._data(Form(_matrix("--matrix-p", self.matrix_p), _matrix("--matrix-c", self.matrix_c)))
        try:
            return Profile.model_validate(data)
        except ValidationError as error:
            # The profile's own check of a whole has no path, only a message that begins with the field.
            lines = [line.removeprefix("the file: ") for line in explain(error, Profile, data)]
            raise UserError([f"--matrix-{line}" if line.startswith(("p", "c")) else line for line in lines]) from error

    def _data(self, matrices: Form) -> dict[str, Any]:
        """The fields of a profile with these matrices."""
        models, latency = len(matrices.p), list(self.latency_ms or [])
        if len(latency) != models or any(not 0 < ms < float("inf") for ms in latency):
            raise UserError(f"--latency-ms: got {latency}; must be {models} numbers above 0, one for each model")
        return {
            "models": [f"model{i}" for i in range(models)],
            "p": matrices.p,
            "c": matrices.c,
            "latency": [StepLatency.constant(ms) for ms in latency],
        }


def _matrix(flag: str, text: str) -> list[list[float]]:
    try:
        rows = json.loads(text)
    except ValueError:
        rows = None
    numbers = isinstance(rows, list) and all(
        isinstance(row, list) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in row)
        for row in rows
    )
    if not numbers or not rows:
        raise UserError(f"{flag}: got {text!r}; must be a JSON list of rows of numbers, such as [[0.65, 0.35], [1, 0]]")
    return cast(list[list[float]], rows)


def load_profile(path: Path) -> Profile:
    """A profile from its JSON file. Raises UserError with a line for each error."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from error
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise UserError([f"{path}: {line}" for line in explain(error, Profile, data)]) from error
