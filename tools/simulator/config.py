# SPDX-License-Identifier: Apache-2.0
"""What is simulated besides the profile: the policy, the load, how long."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from python_backends.token_router.config import BatchingConfig

__all__ = ["Lengths", "Phase", "SimulationConfig"]

_LEAST_MEASURED_S = 0.001  # it is divided into parts


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Phase(_Config):
    """A part of the run with routing of its own. p: as in the profile, which it replaces; the last one stays."""

    duration_s: PositiveFloat
    p: list[list[float]]


class Lengths(_Config):
    """How many tokens a request makes. endless: its whole life is one request, as the Markov model has it.
    constant: `mean` tokens. geometric: `mean` tokens on average, at least 1."""

    kind: Literal["endless", "constant", "geometric"] = "endless"
    mean: float = Field(1.0, ge=1)


class SimulationConfig(_Config):
    """One run.

    concurrency: closed loop, so many clients that each send their next request when one has ended.
    rate_per_s: instead of them, a Poisson stream of requests; needs lengths that end.
    max_live: the requests generating at once; later ones wait for admission. None = no limit.
    batching: policy, thresholds, resume and eager or lazy peer prefill, as the runtime reads them.
    max_wait_ms: the cap on a request's wait for a batch; None = none, as the Markov model has it. (That of
        `batching` is not read: it can't be infinite.)
    lengths, prompt_tokens: of every request. prompt_tokens cost time at the models whose profile says what
        a token costs (`token_ms`); elsewhere the prefill is free.
    prefill_chunk: the most tokens of a suffix that one step processes.
    phases: a routing matrix that changes with time.
    duration_s: simulated, of which warm_up_s are not measured. seed: of all randomness.
    """

    concurrency: PositiveInt | None = None
    rate_per_s: PositiveFloat | None = None
    max_live: PositiveInt | None = None
    batching: BatchingConfig = BatchingConfig()
    max_wait_ms: PositiveFloat | None = None
    lengths: Lengths = Lengths()
    prompt_tokens: NonNegativeInt = 0
    prefill_chunk: PositiveInt = 512
    phases: list[Phase] = Field(default_factory=list)
    duration_s: PositiveFloat = 600.0
    warm_up_s: NonNegativeFloat = 10.0
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> SimulationConfig:
        if (self.concurrency is None) == (self.rate_per_s is None):
            raise ValueError("concurrency, rate_per_s: exactly one of them must be given")
        if self.rate_per_s is not None and self.lengths.kind == "endless":
            raise ValueError("lengths: endless requests can't arrive at a rate; allowed: constant, geometric")
        if self.batching.threshold == "auto":
            raise ValueError("batching.threshold: got auto; a simulation takes numbers, or a `tools.simulator.auto`")
        if self.warm_up_s >= self.duration_s:
            raise ValueError(f"warm_up_s: got {self.warm_up_s}; must be less than duration_s, {self.duration_s}")
        if self.duration_s - self.warm_up_s < _LEAST_MEASURED_S:
            raise ValueError(
                f"duration_s: got {self.duration_s}; must be at least {_LEAST_MEASURED_S} more than warm_up_s,"
                f" {self.warm_up_s}"
            )
        return self
