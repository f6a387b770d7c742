# SPDX-License-Identifier: Apache-2.0
"""The rendered model repository: what Triton reads in it, and what happens to what lies there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.wire import REQUEST_TENSOR, RESPONSE_TENSOR
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.public import INPUTS, OUTPUTS, REFUSED_INPUTS
from routers import RouterConfig
from tools.deployment import Deployment, load_deployment
from tools.errors import UserError
from tools.repository import configs, render

CHECKED_IN = Path(__file__).parents[3] / "model_repository"


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


def parsed(text: str) -> Any:
    """The text as Triton's own message."""
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def one_model(name: str, **engine: Any) -> Deployment:
    return Deployment.model_validate(
        {"models": [{"name": name, "engine": {"type": "paced"} | engine}], "router": {"name": "single"}}
    )


def test_the_checked_in_repository_is_the_rendering_of_the_default(tmp_path: Path) -> None:
    render(load_deployment(), tmp_path / "r")
    assert files_in(tmp_path / "r") == files_in(CHECKED_IN)


def test_an_llm_gets_its_engine_its_router_and_its_place() -> None:
    deployment = load_deployment()
    config = parsed(configs(deployment)["llm"])
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert config.backend == "llm" and config.max_batch_size == 0
    assert LlamaCppConfig.model_validate_json(parameters["engine"]) == deployment.models[1].engine
    assert RouterConfig.model_validate_json(parameters["router"]) == deployment.router
    assert (json.loads(parameters["models"]), json.loads(parameters["index"])) == (["slm", "llm"], 1)
    assert [(t.name, tuple(t.dims)) for t in config.input] == [(REQUEST_TENSOR, (-1,))]
    assert [(t.name, tuple(t.dims)) for t in config.output] == [(RESPONSE_TENSOR, (-1,))]


def test_token_router_gets_the_runtime_and_every_public_tensor() -> None:
    deployment = load_deployment()
    config = parsed(configs(deployment)["token_router"])
    assert RuntimeConfig.model_validate_json(config.parameters["runtime"].string_value) == deployment.runtime()
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 1
    declared = {t.name: (model_config_pb2.DataType.Name(t.data_type), tuple(t.dims)) for t in config.input}
    assert declared == {name: tensor[:2] for name, tensor in (INPUTS | REFUSED_INPUTS).items()}
    assert all(t.optional for t in config.input)
    assert [t.name for t in config.output] == list(OUTPUTS)


def test_the_ensemble_hands_every_tensor_through() -> None:
    texts = configs(load_deployment())
    ensemble, router = parsed(texts["ensemble"]), parsed(texts["token_router"])
    (step,) = ensemble.ensemble_scheduling.step
    assert step.model_name == "token_router"
    assert dict(step.input_map) == {name: name for name in INPUTS | REFUSED_INPUTS}
    assert dict(step.output_map) == {name: name for name in OUTPUTS}
    assert ensemble.input == router.input and ensemble.output == router.output


def test_any_text_survives_the_quoting() -> None:
    path = '/it\'s a \\ "path"\n/é.gguf'
    deployment = Deployment.model_validate(
        {"models": [{"name": "a", "engine": {"type": "llama_cpp", "weights": path}}]}
    )
    engine = parsed(configs(deployment)["a"]).parameters["engine"].string_value
    assert json.loads(engine)["weights"] == path


def test_rendering_again_touches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    render(load_deployment(), folder)
    times = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    render(load_deployment(), folder)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == times


def test_a_model_that_is_gone_is_removed_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    render(one_model("old"), folder)
    (folder / "foreign" / "1").mkdir(parents=True)
    (folder / "foreign" / "config.pbtxt").write_text('backend: "onnxruntime"')
    render(one_model("new"), folder)
    assert sorted(p.name for p in folder.iterdir()) == ["ensemble", "foreign", "new", "token_router"]


def test_what_was_not_rendered_is_only_overwritten_by_force(tmp_path: Path) -> None:
    (tmp_path / "slm").mkdir()
    (tmp_path / "slm" / "config.pbtxt").write_text('backend: "python"')
    with pytest.raises(UserError, match="no rendered model repository; --force"):
        render(one_model("a"), tmp_path)
    render(one_model("a"), tmp_path, force=True)
    with pytest.raises(UserError, match="slm was not rendered by tokenrouter; --force"):
        render(one_model("slm"), tmp_path)
    assert (tmp_path / "slm" / "config.pbtxt").read_text() == 'backend: "python"'
    render(one_model("slm"), tmp_path, force=True)
    assert (tmp_path / "slm" / "config.pbtxt").read_text() == configs(one_model("slm"))["slm"]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render(one_model("a"), tmp_path / "r")

    def forbidden(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(UserError, match=r"r: can't be read or written: .*Permission denied"):
        render(one_model("a"), tmp_path / "r")


def test_force_overwrites_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.pbtxt").write_bytes(b"\xff")
    render(one_model("a"), tmp_path, force=True)
    assert (tmp_path / "a" / "config.pbtxt").read_text() == configs(one_model("a"))["a"]


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        render(one_model("a"), tmp_path / "r")
