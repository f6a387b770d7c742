# SPDX-License-Identifier: Apache-2.0
"""The `engine` section of a model: which engine, with which settings. Every default stands here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

__all__ = ["EngineConfig", "LlamaCppConfig", "PacedConfig"]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LlamaCppConfig(_Config):
    """llama.cpp, through llama-cpp-python."""

    type: Literal["llama_cpp"]
    weights: str = Field(description="a name of `tokenrouter models list`, or the path of a .gguf file")
    threads: PositiveInt = Field(
        1, description="CPU threads of a step; with 1 each, two LLMs don't slow each other on 2 cores"
    )
    gpu_layers: int = Field(0, ge=-1, description="layers on the GPU of a GPU build; -1 = all")
    context_tokens: PositiveInt = Field(4096, description="of one session, prompt and output together")
    max_sessions: int = Field(16, ge=1, le=256, description="sessions held at once (llama.cpp: up to 256)")
    prefill_chunk: int = Field(128, ge=64, le=512, description="prompt tokens of one session in one step")
    deterministic: bool = Field(
        True,
        description="a greedy answer never depends on who else is served: prompts are prefilled in calls of"
        " their own, and every session has a KV buffer of its own",
    )


class PacedConfig(_Config):
    """No weights: each step takes a given time, the next token is a fixed function of the whole prefix."""

    type: Literal["paced"]
    step_ms: NonNegativeFloat = Field(5.0, description="time of one step")
    prefill_token_ms: NonNegativeFloat = Field(
        0.0, description="added for each token of a session beyond its first in a step"
    )
    vocab_size: int = Field(1000, ge=2)
    eos_every: int = Field(0, ge=0, description="on average every how many tokens the end of sequence comes; 0 = never")
    context_tokens: PositiveInt = 4096
    max_sessions: PositiveInt = 256
    prefill_chunk: PositiveInt = 512


EngineConfig = Annotated[LlamaCppConfig | PacedConfig, Field(discriminator="type")]
