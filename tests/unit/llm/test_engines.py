# SPDX-License-Identifier: Apache-2.0
"""Choosing an engine by its configuration."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from python_backends.llm.engines import LlamaCppConfig, build_engine, parse_engine_config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, ["type"]),
        ({"type": "vllm"}, ["vllm", "llama_cpp", "paced"]),
        ({"type": "paced", "step_ms": -1}, ["step_ms", "-1", "greater than or equal to 0"]),
        ({"type": "llama_cpp"}, ["weights", "required"]),
        ({"type": "llama_cpp", "weights": "x", "max_sessions": 257}, ["max_sessions", "257", "256"]),
        ({"type": "llama_cpp", "weights": "x", "thread": 2}, ["thread", "not permitted"]),
    ],
)
def test_a_wrong_configuration_is_named(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_engine_config(values)
    assert all(word in str(caught.value) for word in words)


def test_the_type_chooses() -> None:
    assert build_engine(parse_engine_config({"type": "paced"}), "slm", hidden_states=False).name == "paced"
    assert isinstance(parse_engine_config({"type": "llama_cpp", "weights": "x"}), LlamaCppConfig)


def test_hidden_states_are_not_promised_in_vain() -> None:
    with pytest.raises(ValueError, match="paced has no hidden states; use llama_cpp"):
        build_engine(parse_engine_config({"type": "paced"}), "slm", hidden_states=True)


def test_a_paced_process_does_not_import_llama_cpp() -> None:
    code = (
        "import sys; from python_backends.llm.engines import *; import python_backends.llm.runner;"
        "build_engine(parse_engine_config({'type': 'paced'}), 'slm', False); sys.exit('llama_cpp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
