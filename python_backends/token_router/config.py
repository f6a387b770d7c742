# SPDX-License-Identifier: Apache-2.0
"""What `token_router` is told about its deployment. Every default stands here."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from routers import RouterConfig

__all__ = ["BatchingConfig", "LLMConfig", "LimitsConfig", "RuntimeConfig", "Transport"]

# How a step travels between token_router and an LLM on its host: socket = past Triton, by a Unix socket between the two
# processes (docs/decisions/0016); bls = as a BLS call, which Triton's own metrics count.
Transport: TypeAlias = Literal["socket", "bls"]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BatchingConfig(_Config):
    """Delayed batching, the other scheduling policies, run-ahead.

    policy: async = every model launches by its threshold (delayed batching; with B = 1, eager-async);
        step_sync = a barrier after each step; model_sync = one model at a time (paper, section 4.3).
    threshold: B, the number of waiting requests at which a model's batch is released: one number for all
        models, a list with one number for each, or a table from the number of live requests N to such a
        list (the entry with the largest N that isn't above the present one applies; B = 1 below the first).
        A B that could leave every model waiting (sum of B_i - 1 >= N) is lowered to one that can't.
        auto = B by N follows the traffic: the Markov model solved for what is measured (docs/auto.md). In YAML
        `batching: auto` is short for it.
    """

    policy: Literal["async", "step_sync", "model_sync"] = "async"
    threshold: PositiveInt | Literal["auto"] | list[PositiveInt] | dict[PositiveInt, list[PositiveInt]] = 1
    max_wait_ms: PositiveFloat = Field(50.0, description="a request waits no longer than this for a batch to fill")
    run_ahead: PositiveInt = Field(1, description="tokens of a call while no request can come to join it")
    send_ahead: bool = Field(
        True, description="with policy async, the next call leaves shortly before the present one should end"
    )
    hold: bool = Field(
        False,
        description="a batch that could launch waits for requests that are about to come from another model,"
        " when that saves more waiting than it costs",
    )
    llm_prefill: Literal["eager", "lazy"] = Field(
        "eager",
        description="eager: the peers prefill the prompt when a request is admitted; lazy: at the first handoff",
    )
    resume: bool = Field(
        True,
        description="a model keeps the KV of a request that is away; false: it frees it, and prefills all again"
        " when the request comes back, as standard serving does",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        if isinstance(value, str) and value != "auto":
            raise ValueError("must be auto, or a section")
        return {"threshold": "auto"} if value == "auto" else value

    @field_validator("threshold")
    @classmethod
    def _table(cls, value: object) -> object:
        if isinstance(value, dict) and not value:
            raise ValueError("a table by N needs at least one entry")
        return value

    @model_validator(mode="after")
    def _policy_uses(self) -> BatchingConfig:
        if self.policy != "async":
            for name in ("threshold", "max_wait_ms", "hold"):
                if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: has no meaning with policy {self.policy}; allowed with policy async")
        if self.threshold == "auto" and not self.resume:
            raise ValueError("threshold: auto needs resume: true; what it solves has no steps that prefill all again")
        return self


class LimitsConfig(_Config):
    """What is admitted."""

    max_live: PositiveInt = Field(16, description="requests generating at once; at most what every engine holds")
    max_queue: int = Field(64, ge=0, description="requests waiting for admission; one more is refused as UNAVAILABLE")
    default_max_tokens: PositiveInt = Field(
        512, description="of a request that gives none, at most what its context has left"
    )
    step_timeout_s: PositiveFloat = Field(60.0, description="a step that takes longer means that its model hangs")
    silence_s: PositiveFloat = Field(5.0, description="a model on another host is lost when it is silent for longer")


class LLMConfig(_Config):
    """The way to one LLM. name: of its Triton model. url: host:port of the gRPC endpoint of another Triton that has
    this model; None = it is beside `token_router`. engine: of a stock `tensorrtllm` model, which token_router calls
    with that backend's own tensors; None = the model is of the backend `llm`."""

    name: str
    url: str | None = None
    engine: TensorRTLLMBackendConfig | None = None


class RuntimeConfig(_Config):
    """The whole of it, as `tokenrouter prepare` renders it into token_router/config.pbtxt.

    models: the LLMs to call, the entry first. tokenizer: a name of `tokenrouter models list`
        or a folder that transformers can load; None = token ids only.
    transport: of the steps of the backend `llm`'s models on this host.
    """

    models: list[LLMConfig] = Field(min_length=1)
    tokenizer: str | None = None
    router: RouterConfig = RouterConfig()
    batching: BatchingConfig = BatchingConfig()
    limits: LimitsConfig = LimitsConfig()
    transport: Transport = "socket"

    @property
    def model_names(self) -> list[str]:
        """Of the LLMs, the entry first."""
        return [llm.name for llm in self.models]
