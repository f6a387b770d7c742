# SPDX-License-Identifier: Apache-2.0
"""The file of a trained router: what is refused, and with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import routers.weights
from routers.weights import load_router, locate_router, read_header
from tests.unit.routers.trained import NETWORKS, network, write

HEADER: dict[str, Any] = {
    "algorithm": "co_llm",
    "models": ["a", "b"],
    "hidden_size": 8,
    "vocab_size": 40,
    "threshold": 0.5,
    "network": NETWORKS["co_llm"][1],
}


def test_another_algorithms_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "r.safetensors", "citer", network("citer"))
    assert read_header(path).algorithm == "citer"
    with pytest.raises(ValueError) as refusal:
        load_router(path, "r2r")
    assert str(refusal.value) == f"weights: {path}: algorithm: got 'citer'; allowed: 'r2r'"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format: got 2; Input should be 1"),
        ({"threshold": 1.5}, "threshold: got 1.5; Input should be less than or equal to 1"),
        ({"models": ["a"]}, "models: got ['a']; List should have at least 2 items"),
        ({"colour": "red"}, "colour: got 'red'; Extra inputs are not permitted"),
        ({"network": {"hidden_size": 9}}, "network.hidden_size must be hidden_size, 8"),
    ],
)
def test_a_wrong_header_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    save_file({"output.weight": torch.zeros(1, 8)}, path, {"tokenrouter": json.dumps({**HEADER, **changes})})
    with pytest.raises(ValueError) as refusal:
        read_header(path, "co_llm")
    assert str(refusal.value).startswith(f"weights: {path}: ")
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(("content", "message"), [(b"hello", "must be a .safetensors file"), (b"", "must be a")])
def test_another_kind_of_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_header(path, "r2r")


def test_a_file_without_our_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="has no 'tokenrouter' in its metadata"):
        read_header(path, "r2r")


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    module = network("co_llm")
    torch.nn.init.constant_(module.output.bias, torch.inf)  # type: ignore[union-attr, arg-type]
    path = write(tmp_path / "r.safetensors", "co_llm", module)
    with pytest.raises(ValueError, match=r"output\.bias: holds NaN or infinite numbers"):
        load_router(path, "co_llm")


def test_a_bare_name_is_a_shipped_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers.weights, "_SHIPPED", tmp_path)
    path = write(tmp_path / "mine.safetensors", "co_llm", network("co_llm"))
    assert locate_router("mine") == path
    assert locate_router(str(path)) == path
    for name in ("other", "../mine", "a/mine"):
        with pytest.raises(ValueError) as refusal:
            locate_router(name)
        assert str(refusal.value) == (
            f"weights: got '{name}'; allowed: the path of a .safetensors file, or the name of a shipped router: mine"
        )
    with pytest.raises(ValueError, match=r"none\.safetensors: no such file"):
        locate_router("none.safetensors")


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.safetensors", "co_llm", network("co_llm"))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        write(path, "co_llm", network("co_llm", seed=1))
    assert path.read_bytes() == before
