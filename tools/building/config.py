# SPDX-License-Identifier: Apache-2.0
"""The `build` section of a model: how `tokenrouter build` makes its TensorRT engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from tools.sizing.checkpoint import KvType, WeightType

__all__ = ["BuildConfig"]


class BuildConfig(BaseModel):
    """Only for the engine `tensorrtllm`; what else a build needs stands in the engine's own settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["auto", "float16", "bfloat16"] = Field("auto", description="of what isn't quantised")
    weights: WeightType = Field("16bit", description="of the linear layers; the others need a GPU to calibrate")
    kv_cache: KvType = Field("16bit", description="of keys and values; fp8 only with weights: fp8")
    max_num_tokens: PositiveInt = Field(8192, description="of all sessions in one step; longer prompts are cut")
    examples: str = Field("/app/examples", description="folder of TensorRT-LLM's examples, of the engine's version")

    @model_validator(mode="after")
    def _attention_reads_both(self) -> BuildConfig:
        # TensorRT-LLM's builder: with paged context attention, FP8 KV works in the FP8 workflow only, INT8 KV never
        if self.kv_cache == "fp8" and self.weights != "fp8":
            raise ValueError(
                f"kv_cache: got fp8 with weights: {self.weights}; KV blocks are reused with fp8 for both only"
            )
        return self
