# SPDX-License-Identifier: Apache-2.0
"""Sizes of real GGUF files, against their own figures and against what llama.cpp takes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import llama_cpp
import pytest

from python_backends.llm.catalog import WeightsError, locate_weights
from python_backends.llm.engines import llama_context
from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.gguf_header import read_gguf_header
from python_backends.llm.kv_size import llama_kv_cells, llama_kv_token_bytes
from tools.deployment import load_deployment
from tools.sizing.config import MemoryConfig
from tools.sizing.joint import joint_plan

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    ("weights", "size", "token"),
    [
        ("smollm2-135m-q4_0", 77_571_136, 2 * 30 * 3 * 64 * 2),  # keys and values, layers, KV heads, head size, bytes
        ("smollm2-135m-q8_0", 144_811_072, 2 * 30 * 3 * 64 * 2),
        ("qwen2.5-coder-0.5b-q4_0", 360_662_912, 2 * 24 * 2 * 64 * 2),
        ("qwen2.5-coder-1.5b-q4_0", 1_066_227_264, 2 * 28 * 2 * 128 * 2),
    ],
)
def test_the_shipped_models(weights: str, size: int, token: int) -> None:
    try:
        path = locate_weights(weights)
    except WeightsError:
        pytest.skip(f"{weights} is not fetched")
    config = LlamaCppConfig(type="llama_cpp", weights=weights)
    assert (path.stat().st_size, llama_kv_token_bytes(read_gguf_header(path), config)) == (size, token)


def test_the_shipped_pair_in_a_gibibyte() -> None:
    """1,073,741,824 - 77,571,136 - 144,811,072 over 2 * 23,040: 18,475.7; 9 sessions of 2048 tokens."""
    shipped = load_deployment("smollm2")
    plan = joint_plan(shipped.model_copy(update={"memory": MemoryConfig(devices={"host": "1GiB"}, reserve=0)}))
    assert plan.tokens == 18_475
    assert [m.engine.max_sessions for m in plan.deployment.models] == [9, 9]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What llama.cpp says, instead of its errors on stderr."""
    said: list[str] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def note(_: int, text: bytes, __: ctypes.c_void_p) -> None:
        said.append(text.decode(errors="replace"))

    monkeypatch.setattr(llama_context, "_print_errors", note)
    yield said
    monkeypatch.undo()
    llama_cpp.llama_log_set(llama_context._print_errors, None)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_sessions": 4, "context_tokens": 300},
        {"max_sessions": 4, "context_tokens": 300, "threads": 2},
        {"max_sessions": 4, "context_tokens": 512, "kv_tokens": 1000, "deterministic": False},
    ],
)
def test_llama_cpp_takes_what_was_reckoned(settings: dict[str, object], log: list[str]) -> None:
    weights = "smollm2-135m-q4_0"
    config = LlamaCppConfig.model_validate({"type": "llama_cpp", "weights": weights, **settings})
    path = locate_weights(weights)
    llama_context.LlamaContext(path, config).close()
    (said,) = re.findall(r"KV buffer size = +([0-9.]+) MiB", "".join(log))
    reckoned = llama_kv_cells(config) * llama_kv_token_bytes(read_gguf_header(path), config)
    assert float(said) == pytest.approx(reckoned / (1 << 20), abs=0.01)
