# SPDX-License-Identifier: Apache-2.0
"""What a stock `tensorrtllm` model can't be asked, from the files of its engine and of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backends.llm.engines.checkpoint_says import checkpoint_says
from python_backends.llm.engines.config import TensorRTLLMBackendConfig

__all__ = ["StockFacts", "engine_mismatches", "stock_facts"]

_LOGITS = {"fp32": "float32", "fp16": "float16"}  # ours -> trtllm-build's


@dataclass(frozen=True)
class StockFacts:
    """As the fields of `Capacity` with these names."""

    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]


def stock_facts(config: TensorRTLLMBackendConfig) -> StockFacts:
    """What the deployment says, else the engine's config.json, else the checkpoint's files.

    Raises ValueError naming the field that nothing says, or the file that can't be read.
    """
    engine = _read(Path(config.engine_dir) / "config.json")
    folder = None if config.checkpoint is None else Path(config.checkpoint)
    model = {} if folder is None else _read(folder / "config.json")
    generation = {} if folder is None else _read(folder / "generation_config.json")
    says = checkpoint_says(model, generation)
    pretrained, build = _section(engine, "pretrained_config"), _section(engine, "build_config")
    vocab_size = _first(config.vocab_size, pretrained.get("vocab_size"), says.vocab_size)
    context = _first(config.context_tokens, build.get("max_seq_len"), says.context_tokens)
    ends = _first(config.eos_token_ids, says.eos_token_ids)
    found = {"vocab_size": vocab_size, "context_tokens": context, "eos_token_ids": ends}
    if missing := [name for name, value in found.items() if value is None]:
        raise ValueError(
            f"{missing[0]}: is not given, and neither {config.engine_dir}/config.json nor a checkpoint says it;"
            " give it, or the checkpoint's folder"
        )
    return StockFacts(int(vocab_size), int(context), tuple(ends))


def engine_mismatches(config: TensorRTLLMBackendConfig) -> Iterator[tuple[str, str, str]]:
    """Where the engine's config.json says something else than the deployment: field, its value, what it must be.

    Keys that the file hasn't are not judged. Raises ValueError when there is no such file, or it can't be read.
    """
    path = Path(config.engine_dir) / "config.json"
    engine = _read(path)
    if not engine:
        raise ValueError(f"no engine there: {path} is missing")
    build = _section(engine, "build_config")
    plugins = _section(build, "plugin_config")
    block, most, longest = plugins.get("tokens_per_block"), build.get("max_batch_size"), build.get("max_seq_len")
    if block not in (None, config.tokens_per_block):
        yield "tokens_per_block", str(config.tokens_per_block), f"the engine was built with {block}"
    if most is not None and config.max_sessions > most:
        yield "max_sessions", str(config.max_sessions), f"at most {most}, the engine's max_batch_size"
    if longest is not None and config.context_tokens is not None and config.context_tokens > longest:
        yield "context_tokens", str(config.context_tokens), f"at most {longest}, the engine's max_seq_len"
    pretrained = _section(engine, "pretrained_config")
    ranks = _section(pretrained, "mapping").get("world_size")
    if ranks not in (None, config.tensor_parallel):
        given = "null" if config.gpu_device_ids is None else str(config.gpu_device_ids)
        yield "gpu_device_ids", given, f"one for each rank; the engine was built for {ranks}"
    dtype = pretrained.get("logits_dtype")
    if dtype not in (None, _LOGITS[config.logits_dtype]):
        yield "logits_dtype", config.logits_dtype, f"the engine was built with --logits_dtype {dtype}"
    if config.return_logits and build.get("gather_generation_logits") is False:
        yield "return_logits", "true", "the engine was built without --gather_generation_logits"
    for plugin in ("use_paged_context_fmha", "paged_kv_cache"):
        if plugins.get(plugin) is False:
            yield "engine_dir", config.engine_dir, f"reuses no KV: it was built with {plugin} disabled"


def _read(path: Path) -> Mapping[str, Any]:
    """The file's values; empty where there is no such file. Raises ValueError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return values


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
