# SPDX-License-Identifier: Apache-2.0
"""Finding an algorithm by its name or by a dotted path, and checking its parameters."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routers.base import Algorithm, BaseRouter, RouterParams
from routers.bild import BILD
from routers.citer import CITER
from routers.co_llm import CO_LLM
from routers.glimp import GLIMP
from routers.markov import MARKOV
from routers.mixture_ensemble import MIXTURE_ENSEMBLE
from routers.r2r import R2R
from routers.random_draw import RANDOM
from routers.rstitch import RSTITCH
from routers.single import SINGLE

__all__ = ["ALGORITHMS", "RouterConfig", "load_algorithm"]

_SHOWN_CHARACTERS = 80  # of a value in a message
_SHOWN_ERRORS = 8

ALGORITHMS: Mapping[str, Algorithm] = {
    a.name: a for a in (RSTITCH, R2R, CITER, CO_LLM, MIXTURE_ENSEMBLE, BILD, GLIMP, SINGLE, RANDOM, MARKOV)
}


def load_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or at that dotted path: "package.module:ALGORITHM".

    Raises ValueError that names what was looked for and what there is.
    """
    if ":" not in name:
        if name in ALGORITHMS:
            return ALGORITHMS[name]
        raise ValueError(
            f"no router '{name}'; there are {', '.join(sorted(ALGORITHMS))},"
            " and your own by a dotted path, 'package.module:ALGORITHM'"
        )
    module_name, _, attribute = name.partition(":")
    try:
        algorithm = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ValueError(f"router '{name}' can't be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"router '{name}' is a {type(algorithm).__name__}; it must be a routers.Algorithm")
    return algorithm


def cut(text: str) -> str:
    """The text, or its beginning: what a client sends may be of any length, what it is told of it isn't."""
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def describe(error: ValidationError) -> str:
    """A pydantic error as "field: message, got value", joined by "; "; the first few of many."""
    errors = error.errors()
    shown = [
        f"{cut('.'.join(map(str, e['loc']))) or 'value'}: {e['msg']}, got {cut(repr(e['input']))}"
        for e in errors[:_SHOWN_ERRORS]
    ]
    more = len(errors) - len(shown)
    return "; ".join([*shown, f"and {more} more"] if more else shown)


class RouterConfig(BaseModel):
    """The `router` section of a deployment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("rstitch", description="a built-in algorithm, or 'package.module:ALGORITHM'")
    path: str | None = Field(None, description="the folder that the module lies in, where it isn't installed")
    params: dict[str, Any] = Field(default_factory=dict, description="the algorithm's parameters")

    def algorithm(self) -> Algorithm:
        """Raises ValueError when there is no such algorithm."""
        if self.path is not None and self.path not in sys.path:
            sys.path.append(self.path)  # the models' processes ignore PYTHONPATH
        return load_algorithm(self.name)

    def parsed_params(self) -> RouterParams:
        """The parameters, checked. Raises ValueError naming the parameter and what is allowed."""
        return parse_params(self.algorithm(), self.params)

    def router(self, index: int, models: Sequence[str]) -> BaseRouter[Any]:
        """The router beside model number `index` of `models`. Raises ValueError as the two above do."""
        return self.algorithm().router(index, self.parsed_params(), models)

    def override(self, overrides: Mapping[str, Any], models: Sequence[str]) -> RouterParams:
        """The parameters of a request that overrides some, in a deployment of these models.

        Raises ValueError for a parameter that is unknown, not open to requests, or out of its bounds.
        """
        return overridden(self.algorithm(), self.params, overrides, models)


def parse_params(algorithm: Algorithm, values: Mapping[str, Any]) -> RouterParams:
    """The algorithm's parameters from plain values. Raises ValueError naming the parameter."""
    try:
        return algorithm.params.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(f"router '{algorithm.name}': {describe(error)}") from error


def overridden(
    algorithm: Algorithm, values: Mapping[str, Any], overrides: Mapping[str, Any], models: Sequence[str]
) -> RouterParams:
    """The parameters of a request to an algorithm whose deployment has `values`: see `RouterConfig.override`."""
    allowed = algorithm.params.per_request
    for key in overrides:
        if key not in allowed:
            names = ", ".join(sorted(allowed)) or "none"
            raise ValueError(f"'{cut(key)}' can't be set by a request to router '{algorithm.name}'; allowed: {names}")
    params = parse_params(algorithm, {**values, **overrides})
    params.check_models(models)
    return params
