# SPDX-License-Identifier: Apache-2.0
"""The `memory` section of a deployment: what there is for weights and KV."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

__all__ = ["MemoryConfig"]


def _size(value: object, read: ValidatorFunctionWrapHandler) -> object:
    try:
        size = None if isinstance(value, bool) else read(value)
    except ValidationError:
        size = None
    if size is None or size < 1:
        raise ValueError("must be a size above 0, such as 80GiB (1024-based) or 80GB; a number alone is bytes")
    return size


class MemoryConfig(BaseModel):
    """One budget for each device. `models[].devices` says which model is on which: several = tensor parallelism."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    devices: dict[str, Annotated[ByteSize, WrapValidator(_size)]] = Field(
        min_length=1,
        description="name -> size, such as 80GiB: a GPU's memory, or what llama.cpp may have of the host's",
    )
    reserve: float = Field(
        0.1, ge=0, lt=1, description="share of each device kept free: activations, CUDA graphs, the processes"
    )
