# SPDX-License-Identifier: Apache-2.0
"""What a sweep is told: a YAML file with the routers, the thresholds of each, and what they are measured on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from python_backends.llm.contract import GREEDY_BELOW
from routers import RouterConfig
from tools.config_errors import explain
from tools.deployment import Deployment, load_deployment
from tools.errors import UserError
from tools.evaluation.tasks import HumanEvalTask, TaskConfig

__all__ = ["Point", "RouterSweep", "SweepSpec", "load_spec", "points_of"]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RouterSweep(_Config):
    """One router and the points that it is measured at.

    name, path, params: as in a deployment's `router`. label: in tables and pictures; None = the name.
    sweep: a parameter -> its values, one after the other; null = what the params or the router's file say. Empty =
    the one point that the params make.
    """

    name: str
    path: str | None = None
    params: dict[str, Any] = {}
    label: str | None = None
    sweep: dict[str, list[Any]] = {}

    @model_validator(mode="after")
    def _one(self) -> RouterSweep:
        if len(self.sweep) > 1:
            raise ValueError(f"sweep: one parameter at a time; got {', '.join(self.sweep)}")
        if any(not values for values in self.sweep.values()):
            raise ValueError("sweep: needs at least one value")
        if any(values.count(value) > 1 for values in self.sweep.values() for value in values):
            raise ValueError("sweep: a value is given twice")
        return self

    @property
    def shown(self) -> str:
        return self.label or self.name


class SweepSpec(_Config):
    """deployment: whose models and limits serve; its router is replaced. problems: see `tasks.selected`.

    temperature: of routers that must sample; the others are asked greedily.
    controls: for each point random routing at its LLM share, if that is neither 0 nor 1. control_tolerance: points
    whose shares are this near have one in common.
    query_level: the router that decides once per request. first_tokens: of the answer, whose entropy it looks at.
    speed: report tokens/s; false where the machine does other things meanwhile.
    """

    deployment: str = "default"
    task: TaskConfig = HumanEvalTask()
    problems: str | None = None
    routers: list[RouterSweep] = []
    max_tokens: PositiveInt = 400
    concurrency: PositiveInt = 8
    temperature: float = Field(1.0, ge=GREEDY_BELOW, le=100)  # as requests of such routers may have it
    seed: int = Field(0, ge=0, lt=2**64 - 2**32)  # each question adds 32 bits of its own
    controls: bool = True
    control_tolerance: float = Field(0.005, ge=0, le=1)
    query_level: bool = True
    first_tokens: PositiveInt = 64
    speed: bool = True

    @field_validator("routers")
    @classmethod
    def _labels(cls, routers: list[RouterSweep]) -> list[RouterSweep]:
        labels = [router.shown for router in routers]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"each needs a label of its own; given twice: {', '.join(twice)}")
        return routers


@dataclass(frozen=True)
class Point:
    """One setting to measure.

    router: that its server is started with. overrides: what each request overrides. group: what it belongs to in
    pictures. value: of the parameter that is swept; None where none is.
    """

    label: str
    group: str
    router: RouterConfig
    overrides: dict[str, Any] = field(default_factory=dict)
    value: Any = None

    @property
    def samples(self) -> bool:
        """Whether its router takes no greedy request."""
        return self.router.algorithm().needs_sampling


def points_of(sweep: RouterSweep, models: Sequence[str]) -> Iterator[Point]:
    """The points of one router; a parameter that requests may set needs no server of its own for each value.

    Raises UserError when the router or a value is none.
    """
    for name, values in sweep.sweep.items() or [("", [None])]:
        for value in values:
            params = {**sweep.params, **({} if value is None else {name: value})}
            given = RouterConfig(name=sweep.name, path=sweep.path, params=params)
            try:
                algorithm, parsed = given.algorithm(), given.parsed_params()
                algorithm.check_models(models)
                parsed.check_models(models)
            except ValueError as error:
                raise UserError(f"{sweep.shown}: {error}") from error
            if value is None:
                yield Point(sweep.shown, sweep.shown, given)
                continue
            label = f"{sweep.shown} {name}={value}"
            if name in algorithm.params.per_request and _is_valid(given, sweep.params):
                started = given.model_copy(update={"params": sweep.params})
                yield Point(label, sweep.shown, started, {name: value}, value)
            else:
                yield Point(label, sweep.shown, given, {}, value)


def _is_valid(given: RouterConfig, params: dict[str, Any]) -> bool:
    """Whether a server could be started with these: the parameter that is swept may be a required one."""
    try:
        given.model_copy(update={"params": params}).parsed_params()
    except ValueError:
        return False
    return True


def load_spec(path: Path) -> tuple[SweepSpec, Deployment]:
    """Relative paths in it are taken from its folder. Raises UserError with a line for each error."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: must be a mapping with the keys {', '.join(SweepSpec.model_fields)}")
    try:
        spec = SweepSpec.model_validate(data)
    except ValidationError as error:
        raise UserError([f"{path}: {line}" for line in explain(error, SweepSpec, data)]) from error
    folder = path.resolve().parent
    deployment = load_deployment(folder / spec.deployment if spec.deployment.endswith(".yaml") else spec.deployment)
    return spec.model_copy(update={"routers": [_with_absolute_paths(r, folder) for r in spec.routers]}), deployment


def _with_absolute_paths(router: RouterSweep, folder: Path) -> RouterSweep:
    """A router's files, as in a deployment, lie beside the file that names them."""

    def absolute(value: Any) -> Any:
        is_file = isinstance(value, str) and value.endswith(".safetensors")
        return str(folder / Path(value).expanduser()) if is_file else value

    params = {k: absolute(v) if k == "weights" else v for k, v in router.params.items()}
    swept = {k: [absolute(v) for v in values] if k == "weights" else values for k, values in router.sweep.items()}
    path = None if router.path is None else str(folder / Path(router.path).expanduser())
    return router.model_copy(update={"params": params, "sweep": swept, "path": path})
