# SPDX-License-Identifier: Apache-2.0
"""Reading the checkpoints that R2R's and CITER's own code writes. Nothing in a checkpoint is ever executed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from tools.errors import UserError

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKPOINTS", "Checkpoint", "read_checkpoint"]

_R2R_TYPE = "HiddenStatesTokenLMHeadLogitsClassifier"  # of R2R's routers, the one that its paper describes
_R2R_NAMES = {
    "logits_projection": "logits_projection",
    "combined_projection": "combined_projection",
    "backbone.input_projection": "input_projection",
    "backbone.output_layer.0": "output_norm",
    "backbone.output_layer.1": "output",
}
_R2R_BLOCK_NAMES = {"layer_norm": "norm", "mlp.0": "up", "mlp.3": "down"}
_R2R_EMBEDDING = "token_embeddings.weight"  # in "..._all.pt": the model's own table, which the engine has
_CITER_NAMES = {"mlp.0": "up", "mlp.1": "norm", "mlp.4": "down", "linear": "output"}


@dataclass(frozen=True)
class Checkpoint:
    """A router out of a checkpoint. network: the keyword arguments of its class in `routers.networks`. tensors: its
    state dict. threshold: None = the checkpoint has none. data: where it comes from."""

    network: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    threshold: float | None
    data: dict[str, Any]


def read_checkpoint(path: Path, algorithm: str) -> Checkpoint:
    """The router in a checkpoint of that algorithm's own code.

    Raises UserError when the file can't be read, holds anything but plain data, another layout, or a number that is
    not finite.
    """
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    except Exception as error:  # on a file that isn't a checkpoint, torch's unpickler raises whatever it runs into
        raise UserError(f"{path}: {_refusal(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: got a {type(content).__name__}; allowed: a dict, as {algorithm}'s own code saves")
    try:
        checkpoint = CHECKPOINTS[algorithm](content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    checkpoint.data.update(converted_from=path.name, sha256=digest)
    return checkpoint


def _refusal(error: Exception) -> str:
    """What is wrong with a file that torch didn't load. Torch's own words tell how to load it all the same, which lets
    a malicious file do what it likes: they are not passed on."""
    text = str(error).strip()
    if isinstance(error, UnpicklingError) or "weights_only" in text:
        named = re.search(r"GLOBAL ([\w.]{1,100})", text)
        return (
            f"holds something other than tensors and plain containers{f' ({named[1]})' if named else ''}, or is no"
            " checkpoint; it isn't loaded, because that could run code"
        )
    return f"is no checkpoint ({': '.join([type(error).__name__, *text.splitlines()[:1]])})"


def _r2r(content: Mapping[str, Any]) -> Checkpoint:
    """What R2R's `save_model` writes: model_type, init_args, common_args and state_dict."""
    kind, state = content.get("model_type"), content.get("state_dict")
    if kind != _R2R_TYPE or not isinstance(state, Mapping):
        raise ValueError(f"model_type: got {kind!r}; allowed: '{_R2R_TYPE}', with a state_dict")
    init, common = content.get("init_args") or {}, content.get("common_args") or {}
    for name, value in (("init_args", init), ("common_args", common)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}: got a {type(value).__name__}; allowed: a dict")
    for name in ("normalize_input", "use_position_embedding"):
        if init.get(name):
            raise ValueError(f"init_args.{name}: got {init[name]!r}; allowed: False")
    names = {f"backbone.blocks.{b}.{theirs}": f"blocks.{b}.{ours}" for b in range(_blocks(state))
             for theirs, ours in _R2R_BLOCK_NAMES.items()}  # fmt: skip
    tensors = _renamed({k: v for k, v in state.items() if k != _R2R_EMBEDDING}, {**_R2R_NAMES, **names})
    hidden, top_logits = _matrix(tensors, "logits_projection")
    width, features = _matrix(tensors, "combined_projection")
    if features <= 2 * hidden:
        raise ValueError(
            f"state_dict: combined_projection has {features} inputs; allowed: more than {2 * hidden}, since it takes"
            f" the embedding beside {hidden} numbers of the hidden state and {hidden} of the logits"
        )
    network = {
        "hidden_size": hidden,
        "embedding_size": features - 2 * hidden,
        "width": width,
        "blocks": _blocks(state),
        "top_logits": top_logits,
        "expansion": _matrix(tensors, "blocks.0.up")[0] // width,
    }
    return Checkpoint(network, tensors, common.get("threshold"), {"slm": init.get("pretrained_model_name")})


def _blocks(state: Mapping[str, Any]) -> int:
    return len({key.split(".")[2] for key in map(str, state) if key.startswith("backbone.blocks.")})


def _citer(content: Mapping[str, Any]) -> Checkpoint:
    """The state dict of CITER's ConfidenceModel: torchvision's MLP and a linear layer."""
    tensors = _renamed(content, _CITER_NAMES)
    width, hidden = _matrix(tensors, "down")[0], _matrix(tensors, "up")[1]
    return Checkpoint({"hidden_size": hidden, "width": width}, tensors, None, {})


def _matrix(tensors: Mapping[str, torch.Tensor], module: str) -> tuple[int, int]:
    """The outputs and inputs of a linear layer. Raises ValueError when it isn't there."""
    weight = tensors.get(f"{module}.weight")
    if weight is None or weight.dim() != 2:
        raise ValueError(f"state_dict: the weight of '{module}' is missing, or no matrix")
    return weight.shape[0], weight.shape[1]


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors under our modules' names. Raises ValueError for one that is unknown or not finite, or a module
    without any."""
    import torch

    tensors, missing = {}, dict(names)
    for key, tensor in state.items():
        module, _, last = str(key).rpartition(".")
        if module not in names or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"state_dict: got '{key}', a {type(tensor).__name__}; allowed: tensors of {', '.join(names)}"
            )
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device.type}"
            raise ValueError(f"state_dict: '{key}' is {kind}; allowed: dense, real numbers")
        in_use = tensor.float() if tensor.is_floating_point() else tensor  # FP32, whatever the file has
        if not torch.isfinite(in_use).all():
            raise ValueError(f"state_dict: '{key}' holds NaN or infinite numbers in FP32; allowed: finite ones")
        missing.pop(module, None)
        tensors[f"{names[module]}.{last}"] = tensor
    if missing:
        raise ValueError(f"state_dict: has no tensors of {', '.join(missing)}")
    return tensors


# By the algorithm's name.
CHECKPOINTS: Mapping[str, Callable[[Mapping[str, Any]], Checkpoint]] = {"r2r": _r2r, "citer": _citer}
