# SPDX-License-Identifier: Apache-2.0
"""A profile as a command is given it: a file, or an algorithm with its rates and step latencies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from python_backends.token_router.threshold.forms import ALGORITHMS, form
from python_backends.token_router.threshold.profile import Profile, StepLatency
from tools.config_errors import explain
from tools.errors import UserError

__all__ = ["ProfileOptions", "load_profile"]

_TWO = ["slm", "llm"]


@dataclass(frozen=True)
class ProfileOptions:
    """The options that `threshold` and `simulate` share. file: as `tokenrouter profile` writes it; or else
    algorithm, with the rates that it takes, and latency_ms, one for each model."""

    file: Path | None = None
    algorithm: str | None = None
    p: float | None = None
    q: float | None = None
    weights: Sequence[float] | None = None
    latency_ms: Sequence[float] | None = None

    def profile(self) -> Profile:
        """Raises UserError when they are no profile."""
        given = {
            "--algorithm": self.algorithm,
            "--p": self.p,
            "--q": self.q,
            "--weights": self.weights or None,
            "--latency-ms": self.latency_ms or None,
        }
        if self.file is not None:
            if extra := [f"{name} {value}" for name, value in given.items() if value is not None]:
                raise UserError(f"{extra[0]}: given beside the profile {self.file}; allowed: one of them")
            return load_profile(self.file)
        if self.algorithm is None:
            raise UserError(f"give a profile's file, or --algorithm, one of {', '.join(ALGORITHMS)}")
        try:
            matrices = form(self.algorithm, p=self.p, q=self.q, weights=self.weights or None)
        except ValueError as error:
            raise UserError(f"--{error}") from error
        models, latency = len(matrices.p), list(self.latency_ms or [])
        if len(latency) != models or any(not 0 < ms < float("inf") for ms in latency):
            raise UserError(f"--latency-ms: got {latency}; must be {models} numbers above 0, one for each model")
        return Profile(
            models=_TWO if models == len(_TWO) else [f"model{i}" for i in range(models)],
            p=matrices.p,
            c=matrices.c,
            latency=[StepLatency.constant(ms) for ms in latency],
            source={"algorithm": self.algorithm},
        )


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
