# SPDX-License-Identifier: Apache-2.0
"""The `memory` section of a deployment: what there is for weights and KV."""

from __future__ import annotations

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

__all__ = ["MemoryConfig"]


class MemoryConfig(BaseModel):
    """One budget for each device. `models[].devices` says which model is on which: several = tensor parallelism."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    devices: dict[str, ByteSize] = Field(
        min_length=1,
        description="name -> size, such as 80GiB: a GPU's memory, or what llama.cpp may have of the host's",
    )
    reserve: float = Field(
        0.1, ge=0, lt=1, description="share of each device kept free: activations, CUDA graphs, the processes"
    )

    @field_validator("devices")
    @classmethod
    def _sizes(cls, devices: dict[str, ByteSize]) -> dict[str, ByteSize]:
        for name, size in devices.items():
            if size < 1:
                raise ValueError(f"{name}: must have more than 0 bytes")
        return devices
