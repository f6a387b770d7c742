# SPDX-License-Identifier: Apache-2.0
"""A request's parameters, checked at the edge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from python_backends.llm.contract import SamplingParams
from python_backends.token_router.errors import InvalidRequest
from python_backends.token_router.public import REFUSED_INPUTS
from routers.registry import cut, describe

__all__ = ["GenerateParams"]

_MAX_STOP_WORDS = 16


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")  # templates differ in what they read beside these two

    role: str
    content: str


class GenerateParams(BaseModel):
    """What a client may set; the names are those of the public model's inputs (`public.INPUTS`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text_input: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    input_ids: list[int] | None = None
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stop_words: list[str] = Field(default_factory=list, max_length=_MAX_STOP_WORDS)
    temperature: float = Field(0.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, lt=2**64)
    ignore_eos: bool = False
    exclude_input_in_output: bool = True
    return_log_probs: bool = False
    return_num_input_tokens: bool = True
    return_num_output_tokens: bool = True
    router_params: dict[str, Any] = Field(default_factory=dict)

    @field_validator("messages", "router_params", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            parsed = json.loads(value)
            json.dumps(parsed, ensure_ascii=False).encode()  # half a surrogate pair can't become text
        except (ValueError, RecursionError) as error:
            raise ValueError(f"must be JSON ({error})") from error
        return parsed

    @field_validator("stop_words")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if value == [""]:  # how clients of the TensorRT-LLM templates say "none"
            return []
        if "" in value:
            raise ValueError("must not contain an empty string")
        return value

    @classmethod
    def parse(cls, inputs: Mapping[str, Any]) -> GenerateParams:
        """The parameters from the inputs of a Triton request: str, bool, int, float, or lists of them.

        Raises InvalidRequest naming the input, its value and what is allowed.
        """
        for name, value in inputs.items():
            refused = REFUSED_INPUTS.get(name)
            values = value if isinstance(value, list) else [value]
            if refused is not None and not all(v in refused.neutral for v in values):
                raise InvalidRequest(f"{name} {refused.reason}; got {cut(repr(value))}")
        try:
            params = cls.model_validate({n: v for n, v in inputs.items() if n not in REFUSED_INPUTS})
        except ValidationError as error:
            raise InvalidRequest(describe(error)) from error
        prompts = [n for n in ("text_input", "messages", "input_ids") if getattr(params, n) is not None]
        if len(prompts) != 1:
            raise InvalidRequest(
                "exactly one of text_input, messages and input_ids must be given;"
                f" got {' and '.join(prompts) or 'none'}"
            )
        return params

    def sampling(self, seed: int) -> SamplingParams:
        """How tokens are drawn, with the seed chosen for this request."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
        )
