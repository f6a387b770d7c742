# SPDX-License-Identifier: Apache-2.0
"""What the files of an engine and of a checkpoint say, and where they contradict the deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from python_backends.llm.engines.stock_facts import StockFacts, engine_mismatches, stock_facts

BUILD = {
    "pretrained_config": {"vocab_size": 151936, "logits_dtype": "float32"},
    "build_config": {
        "max_batch_size": 32,
        "max_seq_len": 8192,
        "gather_generation_logits": True,
        "plugin_config": {"tokens_per_block": 32, "use_paged_context_fmha": True, "paged_kv_cache": True},
    },
}


def config(folder: Path, **settings: Any) -> TensorRTLLMBackendConfig:
    values = {"type": "tensorrtllm", "engine_dir": str(folder / "engine"), "max_sessions": 16} | settings
    return TensorRTLLMBackendConfig.model_validate(values)


def write(path: Path, values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def changed(**build: Any) -> dict[str, Any]:
    """BUILD with these in its build_config; a plugin's name changes plugin_config, a dtype pretrained_config."""
    new: dict[str, Any] = json.loads(json.dumps(BUILD))
    for name, value in build.items():
        plugins = new["build_config"]["plugin_config"]
        part = (
            plugins if name in plugins else new["pretrained_config"] if name == "logits_dtype" else new["build_config"]
        )
        part[name] = value
    return new


def test_the_deployment_comes_first_then_the_engine_then_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "qwen3"
    settings = {"checkpoint": str(checkpoint)}
    write(checkpoint / "config.json", {"vocab_size": 9, "max_position_embeddings": 40960, "eos_token_id": 151645})
    assert stock_facts(config(tmp_path, **settings)) == StockFacts(9, 40960, (151645,))
    write(checkpoint / "generation_config.json", {"eos_token_id": [151645, 151643]})
    write(tmp_path / "engine" / "config.json", BUILD)
    assert stock_facts(config(tmp_path, **settings)) == StockFacts(151936, 8192, (151645, 151643))
    given = config(tmp_path, vocab_size=100, context_tokens=200, eos_token_ids=[])
    assert stock_facts(given) == StockFacts(100, 200, ())


def test_an_empty_list_in_a_file_says_nothing_and_a_text_model_has_a_section(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    write(checkpoint / "generation_config.json", {"eos_token_id": []})
    text = {"vocab_size": 9, "max_position_embeddings": 40}
    write(checkpoint / "config.json", {"text_config": text, "vocab_size": 8, "eos_token_id": 7})
    assert stock_facts(config(tmp_path, checkpoint=str(checkpoint))) == StockFacts(9, 40, (7,))
    write(checkpoint / "config.json", {"text_config": {**text, "eos_token_id": [6, 5]}, "eos_token_id": 7})
    assert stock_facts(config(tmp_path, checkpoint=str(checkpoint))) == StockFacts(9, 40, (6, 5))


def test_what_nothing_says_is_named(tmp_path: Path) -> None:
    write(tmp_path / "engine" / "config.json", BUILD)
    with pytest.raises(ValueError, match=r"^eos_token_ids: is not given, and neither .*/engine/config.json nor"):
        stock_facts(config(tmp_path))
    (tmp_path / "engine" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json can't be read: "):
        stock_facts(config(tmp_path))


@pytest.mark.parametrize(
    ("build", "settings", "expected"),
    [
        ({}, {}, []),
        ({"tokens_per_block": 64}, {}, [("tokens_per_block", "32", "the engine was built with 64")]),
        ({"max_batch_size": 8}, {}, [("max_sessions", "16", "at most 8, the engine's max_batch_size")]),
        ({}, {"context_tokens": 9000}, [("context_tokens", "9000", "at most 8192, the engine's max_seq_len")]),
        (
            {"logits_dtype": "float16"},
            {},
            [("logits_dtype", "fp32", "the engine was built with --logits_dtype float16")],
        ),
        ({"logits_dtype": "float16"}, {"logits_dtype": "fp16"}, []),
        (
            {"gather_generation_logits": False},
            {},
            [("return_logits", "true", "the engine was built without --gather_generation_logits")],
        ),
        ({"gather_generation_logits": False}, {"return_logits": False}, []),
    ],
)
def test_an_engine_built_for_something_else(
    tmp_path: Path, build: dict[str, Any], settings: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    write(tmp_path / "engine" / "config.json", changed(**build))
    assert list(engine_mismatches(config(tmp_path, **settings))) == expected


@pytest.mark.parametrize(("ranks", "gpus"), [(1, None), (1, [3]), (2, [0, 1]), (2, None), (1, [0, 1]), (4, [0, 1])])
def test_an_engine_has_a_gpu_for_each_rank(tmp_path: Path, ranks: int, gpus: list[int] | None) -> None:
    """Its plan and its build go by gpu_device_ids too."""
    mapping = {"world_size": ranks, "tp_size": ranks}
    write(tmp_path / "engine" / "config.json", {**BUILD, "pretrained_config": {"mapping": mapping}})
    found = list(engine_mismatches(config(tmp_path, gpu_device_ids=gpus)))
    given = "null" if gpus is None else str(gpus)
    wrong = [("gpu_device_ids", given, f"one for each rank; the engine was built for {ranks}")]
    assert found == ([] if len(gpus or [0]) == ranks else wrong)


def test_an_engine_that_can_t_reuse_its_kv(tmp_path: Path) -> None:
    write(tmp_path / "engine" / "config.json", changed(use_paged_context_fmha=False))
    ((field, _, why),) = engine_mismatches(config(tmp_path))
    assert field == "engine_dir" and "reuses no KV" in why


def test_no_engine_and_an_engine_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no engine there"):
        list(engine_mismatches(config(tmp_path)))
    write(tmp_path / "engine" / "config.json", {"version": "1.2.1"})
    assert list(engine_mismatches(config(tmp_path))) == []
