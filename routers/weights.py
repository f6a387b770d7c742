# SPDX-License-Identifier: Apache-2.0
"""The file of a trained router: a safetensors file whose header says what it was trained for.

Reading the header reads no tensor and needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch

__all__ = ["RouterFile", "RouterHeader", "load_router", "locate_router", "read_header", "save_router"]

_KEY = "tokenrouter"  # of the header, in the metadata of the file
_ENDING = ".safetensors"
_SHIPPED = Path(__file__).parent / "pretrained"


class RouterHeader(BaseModel):
    """What a router was trained for, and how well it did.

    models: names of the weights, in the order in which they are served, the small model first.
    network: the keyword arguments of the network's class.
    data: what it was trained on. metrics: on the test prompts: AUROC, recall, LLM share, ...
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal[1] = 1
    algorithm: str
    models: list[str] = Field(min_length=2)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    threshold: float = Field(ge=0, le=1)
    network: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_hidden_size(self) -> RouterHeader:
        if self.network.get("hidden_size") != self.hidden_size:
            raise ValueError(f"network.hidden_size must be hidden_size, {self.hidden_size}")
        return self


@dataclass(frozen=True)
class RouterFile:
    """tensors: by name, as in the network's state dict; floating-point ones in FP32."""

    header: RouterHeader
    tensors: dict[str, torch.Tensor]


def locate_router(name_or_path: str) -> Path:
    """The file at a path, which ends in .safetensors, or the shipped one of a bare name.

    Raises ValueError when there is none; the message says what there is.
    """
    if name_or_path.endswith(_ENDING):
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            raise ValueError(f"weights: {path}: no such file; allowed: the path of a {_ENDING} file")
        return path
    path = _SHIPPED / f"{name_or_path}{_ENDING}"
    if os.sep in name_or_path or not path.is_file():
        shipped = ", ".join(sorted(p.stem for p in _SHIPPED.glob(f"*{_ENDING}"))) or "none"
        raise ValueError(
            f"weights: got '{name_or_path}'; allowed: the path of a {_ENDING} file, or the name of a"
            f" shipped router: {shipped}"
        )
    return path


def save_router(path: Path, header: RouterHeader, module_state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write a router's file; an interrupted write leaves what was there. Raises OSError."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module_state_dict.items()}
    part = path.with_name(path.name + ".part")
    part.write_bytes(save(tensors, {_KEY: header.model_dump_json()}))
    part.replace(path)


def read_header(path: Path, algorithm: str | None = None) -> RouterHeader:
    """The header of a router, of that algorithm if one is given.

    Raises ValueError naming file, field, value and what is allowed.
    """
    try:
        with safe_open(path, framework="np") as file:
            text = (file.metadata() or {}).get(_KEY)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"weights: {path}: must be a {_ENDING} file; {error}") from error
    if text is None:
        raise ValueError(f"weights: {path}: has no '{_KEY}' in its metadata; `tokenrouter routers convert` makes it")
    try:
        header = RouterHeader.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'header'}: got {e['input']!r}; {e['msg']}" for e in error.errors()
        )
        raise ValueError(f"weights: {path}: {problems}") from error
    if algorithm is not None and header.algorithm != algorithm:
        raise ValueError(f"weights: {path}: algorithm: got '{header.algorithm}'; allowed: '{algorithm}'")
    return header


def load_router(path: Path, algorithm: str) -> RouterFile:
    """A router's file. Raises ValueError as `read_header` does, and when a number in it is not finite."""
    import torch

    header = read_header(path, algorithm)
    tensors = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            tensor = file.get_tensor(name)
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
            if not torch.isfinite(tensors[name]).all():
                raise ValueError(f"weights: {path}: {name}: holds NaN or infinite numbers; allowed: finite ones")
    return RouterFile(header, tensors)
