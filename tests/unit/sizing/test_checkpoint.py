# SPDX-License-Identifier: Apache-2.0
"""Sizes of the Qwen3 family against figures by hand, and what can't be sized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sizing.models import GOLDEN, write_checkpoint
from tools.errors import UserError
from tools.sizing.checkpoint import Checkpoint, kv_type

RANKS = [(name, ranks) for name, golden in GOLDEN.items() for ranks in golden["ranks"]]


@pytest.mark.parametrize(("name", "ranks"), RANKS)
def test_the_family_is_as_by_hand(name: str, ranks: int) -> None:
    checkpoint, golden = Checkpoint.model_validate(GOLDEN[name]["config"]), GOLDEN[name]["ranks"][ranks]
    assert {
        "pytorch": checkpoint.weight_bytes(ranks, "16bit", "pytorch"),
        "engine": checkpoint.weight_bytes(ranks, "16bit", "engine"),
        "engine_fp8": checkpoint.weight_bytes(ranks, "fp8", "engine"),
        "kv_16bit": checkpoint.kv_token_bytes(ranks, "16bit"),
        "kv_fp8": checkpoint.kv_token_bytes(ranks, "fp8"),
    } == golden


@pytest.mark.parametrize("name", GOLDEN)
def test_one_rank_holds_what_the_files_of_the_weights_hold(name: str) -> None:
    checkpoint = Checkpoint.model_validate(GOLDEN[name]["config"])
    assert checkpoint.weight_bytes(1, "16bit", "pytorch") == GOLDEN[name]["total"]


def test_with_more_ranks_than_kv_heads_each_has_one() -> None:
    checkpoint = Checkpoint.model_validate(GOLDEN["Qwen3-32B"]["config"])
    assert checkpoint.kv_token_bytes(16, "16bit") == checkpoint.kv_token_bytes(8, "16bit")


def test_awq_is_half_a_byte_and_a_scale_for_each_128() -> None:
    checkpoint = Checkpoint.model_validate(GOLDEN["Qwen3-8B"]["config"])
    saved = checkpoint.weight_bytes(1, "16bit", "engine") - checkpoint.weight_bytes(1, "int4_awq", "engine")
    assert saved == 6_945_767_424 * (2 - 0.5 - 2 / 128)


@pytest.mark.parametrize(
    ("model_type", "more", "difference"),
    [
        # Qwen2 has biases of queries, keys and values, and no norms of the heads
        ("qwen2", {}, 2 * 28 * (16 * 128 + 2 * 1024 - 2 * 128)),
        ("llama", {}, -2 * 28 * 2 * 128),
        ("llama", {"attention_bias": True}, 2 * 28 * (16 * 128 + 2 * 1024 + 1024 - 2 * 128)),
    ],
)
def test_families_differ_in_small_things(model_type: str, more: dict[str, Any], difference: int) -> None:
    config = GOLDEN["Qwen3-0.6B"]["config"]
    other = Checkpoint.model_validate({**config, "model_type": model_type, **more})
    assert other.weight_bytes(1, "16bit", "pytorch") == GOLDEN["Qwen3-0.6B"]["total"] + difference


@pytest.mark.parametrize(("model_type", "head_dim"), [("qwen3", 128), ("qwen2", 1024 // 16)])
def test_what_transformers_would_take_for_a_missing_key(tmp_path: Path, model_type: str, head_dim: int) -> None:
    folder = write_checkpoint(tmp_path, "Qwen3-0.6B", model_type=model_type, head_dim=None, num_key_value_heads=None)
    checkpoint = Checkpoint.read(folder)
    assert (checkpoint.head_dim, checkpoint.num_key_value_heads) == (head_dim, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json: can't be read: No such file or directory"),
        ("{", "config.json: is not JSON: "),
        ("[]", "config.json: must hold a JSON object"),
        (
            '{"model_type": "deepseek_v3"}',
            "config.json: model_type: got 'deepseek_v3'; allowed: llama, mistral, qwen2, qwen3",
        ),
        (
            json.dumps({**GOLDEN["Qwen3-8B"]["config"], "num_hidden_layers": 0}),
            "config.json: num_hidden_layers: got 0; input should be greater than 0",
        ),
    ],
)
def test_what_cannot_be_sized(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as error:
        Checkpoint.read(tmp_path)
    (line,) = error.value.lines
    assert message in line


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_numbers_of_32_bits_are_not_taken_for_16(tmp_path: Path, key: str) -> None:
    """The PyTorch flow would load them as they are, in twice the memory."""
    types: dict[str, Any] = {"torch_dtype": None, "dtype": None}
    for good in ("bfloat16", "float16", None):
        folder = write_checkpoint(tmp_path, "Qwen3-0.6B", **{**types, key: good})
        Checkpoint.read(folder).require_16_bits(folder)
    folder = write_checkpoint(tmp_path, "Qwen3-0.6B", **{**types, key: "float32"})
    with pytest.raises(
        UserError, match=r"config\.json: torch_dtype: got 'float32'; can be sized: bfloat16, float16; conv"
    ):
        Checkpoint.read(folder).require_16_bits(folder)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "16bit"),
        ('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null}}', "16bit"),
        ('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}', "fp8"),
        ('{"producer": {"name": "modelopt"}}', "16bit"),
    ],
)
def test_the_type_of_the_kv_is_the_checkpoints(tmp_path: Path, text: str | None, found: str) -> None:
    if text is not None:
        (tmp_path / "hf_quant_config.json").write_text(text)
    assert kv_type(tmp_path) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"quantization": {"kv_cache_quant_algo": "NVFP4"}}',
            "kv_cache_quant_algo: got 'NVFP4'; can be sized: FP8, or",
        ),
        ("[", "hf_quant_config.json: is not JSON"),
    ],
)
def test_a_type_of_kv_that_cannot_be_sized(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(UserError) as error:
        kv_type(tmp_path)
    assert message in error.value.lines[0]


def test_missing_keys_are_named_each_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 3, "max_position_embeddings": 9}')
    with pytest.raises(UserError) as error:
        Checkpoint.read(tmp_path)
    keys = (
        *("num_hidden_layers", "hidden_size", "intermediate_size"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    )
    assert error.value.lines == [f"{tmp_path}/config.json: {key}: is missing" for key in keys]


def test_heads_are_divided_evenly() -> None:
    checkpoint = Checkpoint.model_validate(GOLDEN["Qwen3-0.6B"]["config"])
    for ranks in (1, 2, 4, 8, 16):
        checkpoint.require_ranks(ranks, "x")
    with pytest.raises(UserError, match=r"^x: got 3 ranks; must divide the model's 16 attention heads"):
        checkpoint.require_ranks(3, "x")
