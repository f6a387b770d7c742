# SPDX-License-Identifier: Apache-2.0
"""The commands of a build, as TensorRT-LLM 1.0 to 1.2 takes them, against golden files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sizing.models import write_checkpoint
from tools.building.steps import steps
from tools.deployment import ModelConfig
from tools.errors import UserError

GOLDEN = Path(__file__).with_name("golden")


def model(folder: Path, name: str, ranks: int = 1, build: dict[str, Any] | None = None, **engine: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "name": "llm",
            "engine": {
                "type": "tensorrtllm",
                "engine_dir": str(folder / "engines" / f"{name}-tp{ranks}"),
                "checkpoint": str(write_checkpoint(folder / "models", name)),
                "gpu_device_ids": list(range(ranks)),
                "context_tokens": 8192,
                "max_sessions": 32,
                **engine,
            },
            "build": build or {},
        }
    )


def script(made: ModelConfig, folder: Path) -> str:
    """The commands, a flag on each line."""
    lines = (f"# {s.title}\n{shlex.join(s.command)}\n".replace(" --", " \\\n  --") for s in steps(made))
    return "".join(lines).replace(str(folder), "")


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B"])
def test_the_family(tmp_path: Path, name: str, ranks: int) -> None:
    assert script(model(tmp_path, name, ranks), tmp_path) == (GOLDEN / f"{name}-tp{ranks}.sh").read_text()


def test_8_bits_and_no_logits(tmp_path: Path) -> None:
    made = model(
        tmp_path, "Qwen3-32B", 8, {"weights": "fp8", "kv_cache": "fp8", "dtype": "bfloat16"},
        return_logits=False, run_tokens=4,
    )  # fmt: skip
    assert script(made, tmp_path) == (GOLDEN / "Qwen3-32B-tp8-fp8.sh").read_text()


def test_awq(tmp_path: Path) -> None:
    convert, _ = steps(model(tmp_path, "Qwen3-8B", 2, {"weights": "int4_awq", "examples": "/e"}))
    assert convert.command[:2] == ("python3", "/e/quantization/quantize.py")
    assert convert.command[-4:] == ("--qformat", "int4_awq", "--tp_size", "2")


def test_a_context_that_is_not_given_is_the_checkpoints(tmp_path: Path) -> None:
    _, build = steps(model(tmp_path, "Qwen3-8B", context_tokens=None))
    assert build.command[build.command.index("--max_seq_len") + 1] == "40960"


def test_other_engines_need_no_building(tmp_path: Path) -> None:
    for engine in ({"type": "paced"}, {"type": "tensorrt_llm", "weights": str(tmp_path)}):
        assert steps(ModelConfig.model_validate({"name": "a", "engine": engine})) == []


@pytest.mark.parametrize(
    ("build", "engine", "message"),
    [
        ({}, {"checkpoint": None}, "model 'llm': engine.checkpoint is missing; the engine is built from there"),
        ({}, {"tokens_per_block": 24, "prefill_chunk": 480}, "tokens_per_block: got 24; allowed: 8, 16, 32, 64, 128"),
        ({"max_num_tokens": 256}, {}, "build.max_num_tokens: got 256; at least 512"),
    ],
)
def test_what_cannot_be_built_is_named(
    tmp_path: Path, build: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        steps(model(tmp_path, "Qwen3-8B", 1, build, **engine))


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    made = model(tmp_path, "Qwen3-8B")
    write_checkpoint(tmp_path / "models", "Qwen3-8B", quantization_config={"quant_method": "awq"})
    with pytest.raises(UserError, match="is quantised already"):
        steps(made)


def test_8_bit_keys_need_8_bit_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_cache: got fp8 with weights: 16bit"):
        model(tmp_path, "Qwen3-8B", 1, {"kv_cache": "fp8"})
