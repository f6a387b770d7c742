# SPDX-License-Identifier: Apache-2.0
"""Rendering a deployment into the model repository that tritonserver loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from python_backends.llm.wire import REQUEST_TENSOR, RESPONSE_TENSOR, WIRE_TYPE
from python_backends.token_router.public import INPUTS, OUTPUTS, REFUSED_INPUTS, Refused, Tensor
from tools.deployment import ENSEMBLE, ROUTER, Deployment
from tools.errors import UserError
from tools.stock_model import stock_model

__all__ = ["HEADER", "configs", "render"]

# also how a folder is known as ours
HEADER = "# SPDX-License-Identifier: Apache-2.0\n# rendered by tokenrouter prepare; do not edit"
_DECOUPLED = "model_transaction_policy { decoupled: true }"
_ON_CPU = "instance_group [ { count: 1 kind: KIND_CPU } ]"  # the engine places itself; Triton needn't know of GPUs
_PUBLIC_INPUTS: dict[str, Tensor | Refused] = {**INPUTS, **REFUSED_INPUTS}


def render(deployment: Deployment, folder: Path, *, force: bool = False) -> list[str]:
    """Make `folder` the rendering of `deployment`, and return its models. Rendering the same again changes nothing.

    Model folders of an earlier rendering that the deployment no longer has are removed; others are left
    alone. Raises UserError when something there wasn't rendered by us, unless `force`.
    """
    texts = configs(deployment)
    try:
        if not force:
            _refuse_foreign(folder, texts)
        for name, text in texts.items():
            version = folder / name / "1"
            version.mkdir(parents=True, exist_ok=True)
            _write_if_new(version / ".gitkeep", "")  # git keeps no empty folder, and Triton wants a version
            _write_if_new(folder / name / "config.pbtxt", text)
        for stale in _rendered_in(folder) - set(texts):
            shutil.rmtree(folder / stale)
    except OSError as error:
        raise UserError(f"{folder}: can't be read or written: {error}") from error
    return list(texts)


def configs(deployment: Deployment) -> dict[str, str]:
    """The text of config.pbtxt by model name, of the models on this host."""
    llms = {deployment.model_names[index]: _llm(deployment, index) for index in deployment.here}
    if not deployment.routes:
        return llms
    return llms | {ROUTER: _token_router(deployment), ENSEMBLE: _ensemble()}


def _refuse_foreign(folder: Path, names: Iterable[str]) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a folder")
    ours = _rendered_in(folder)
    if not ours and any(folder.iterdir()):
        raise UserError(f"{folder}: has files that are no rendered model repository; --force writes into it anyway")
    if foreign := [name for name in names if (folder / name).exists() and name not in ours]:
        raise UserError(
            f"{folder}: {', '.join(foreign)} was not rendered by tokenrouter; --force overwrites its config.pbtxt"
        )


def _rendered_in(folder: Path) -> set[str]:
    """The model folders in `folder` that an earlier `render` made."""
    return {path.parent.name for path in folder.glob("*/config.pbtxt") if path.read_bytes().startswith(HEADER.encode())}


def _write_if_new(path: Path, text: str) -> None:
    content = text.encode()
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def _llm(deployment: Deployment, index: int) -> str:
    model = deployment.models[index]
    if isinstance(model.engine, TensorRTLLMBackendConfig):
        return _config(*stock_model(model.name, model.engine))
    return _config(
        f'name: "{model.name}"',
        'backend: "llm"',
        "max_batch_size: 0  # a call is a batch of sessions already",
        _tensors("input", {REQUEST_TENSOR: WIRE_TYPE}),
        _tensors("output", {RESPONSE_TENSOR: WIRE_TYPE}),
        _ON_CPU,
        _parameter("engine", model.engine.model_dump_json()),
        _parameter("router", deployment.router.model_dump_json()),
        _parameter("models", json.dumps(deployment.model_names)),
        _parameter("index", json.dumps(index)),
    )


def _token_router(deployment: Deployment) -> str:
    return _config(
        f'name: "{ROUTER}"',
        f'backend: "{ROUTER}"',
        *_public(),
        _ON_CPU,
        _parameter("runtime", deployment.runtime().model_dump_json()),
    )


def _ensemble() -> str:
    maps = [f'input_map {{ key: "{name}" value: "{name}" }}' for name in _PUBLIC_INPUTS]
    maps += [f'output_map {{ key: "{name}" value: "{name}" }}' for name in OUTPUTS]
    step = "\n".join(f"      {line}" for line in (f'model_name: "{ROUTER}"', "model_version: -1", *maps))
    return _config(
        f'name: "{ENSEMBLE}"',
        'platform: "ensemble"',
        *_public(),
        f"ensemble_scheduling {{\n  step [\n    {{\n{step}\n    }}\n  ]\n}}",
    )


def _public() -> tuple[str, ...]:
    """What token_router and the ensemble have in common."""
    return (
        "max_batch_size: 1",
        _DECOUPLED,
        _tensors("input", {name: (t.data_type, t.dims) for name, t in _PUBLIC_INPUTS.items()}, " optional: true"),
        _tensors("output", {name: (t.data_type, t.dims) for name, t in OUTPUTS.items()}),
    )


def _config(*parts: str) -> str:
    return "\n".join((HEADER, *parts)) + "\n"


def _tensors(field: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]], extra: str = "") -> str:
    rows = [
        f'  {{ name: "{name}" data_type: {data_type} dims: [ {", ".join(map(str, dims))} ]{extra} }}'
        for name, (data_type, dims) in tensors.items()
    ]
    return f"{field} [\n" + ",\n".join(rows) + "\n]"


def _parameter(key: str, json_text: str) -> str:
    # single quotes, which the protobuf text format allows too, leave the JSON readable
    quoted = json_text.replace("\\", "\\\\").replace("'", "\\'")
    return f"parameters {{ key: \"{key}\" value {{ string_value: '{quoted}' }} }}"
