# SPDX-License-Identifier: Apache-2.0
"""What one model of a deployment takes on each of its devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from python_backends.llm.catalog import WeightsError, locate_weights
from python_backends.llm.engines.config import LlamaCppConfig, TensorRTLLMBackendConfig, TensorRTLLMConfig
from python_backends.llm.gguf_header import read_gguf_header
from python_backends.llm.kv_size import CELL_BLOCK, cells, llama_kv_token_bytes
from tools.deployment import ModelConfig
from tools.errors import UserError
from tools.sizing.checkpoint import Checkpoint, kv_type

__all__ = ["Footprint", "footprint"]


@dataclass(frozen=True)
class Footprint:
    """weights: bytes on each of the model's devices. kv_token: bytes of one token's KV there. block: its KV is given
    out in whole blocks of so many tokens."""

    model: str
    devices: tuple[str, ...]
    weights: int
    kv_token: int
    block: int


def footprint(model: ModelConfig, devices: tuple[str, ...]) -> Footprint:
    """Read from the model's own files. Raises UserError when they are missing or of a kind that isn't known."""
    return Footprint(model.name, devices, *_sizes(model))


def _sizes(model: ModelConfig) -> tuple[int, int, int]:
    engine = model.engine
    if isinstance(engine, LlamaCppConfig):
        return _llama_cpp(model.name, engine)
    if isinstance(engine, TensorRTLLMBackendConfig):
        if engine.checkpoint is None:
            raise UserError(f"model '{model.name}': engine.checkpoint is missing; its size is read from there")
        checkpoint, ranks = Checkpoint.read(Path(engine.checkpoint)), engine.tensor_parallel
        checkpoint.require_ranks(ranks, f"model '{model.name}': engine.gpu_device_ids")
        return (
            checkpoint.weight_bytes(ranks, model.build.weights, "engine"),
            checkpoint.kv_token_bytes(ranks, model.build.kv_cache),
            engine.tokens_per_block,
        )
    if isinstance(engine, TensorRTLLMConfig):
        return _pytorch(model.name, engine)
    return 0, 0, 1  # paced: it has neither weights nor KV


def _pytorch(name: str, engine: TensorRTLLMConfig) -> tuple[int, int, int]:
    folder, ranks = Path(engine.weights), engine.tensor_parallel
    if not folder.is_dir():
        raise UserError(f"model '{name}': engine.weights: {folder} is no folder; its size can be read from one only")
    checkpoint = Checkpoint.read(folder)
    checkpoint.require_ranks(ranks, f"model '{name}': engine.tensor_parallel")
    checkpoint.require_16_bits(folder)
    stored_kv = kv_type(folder)
    kv = checkpoint.kv_token_bytes(ranks, "fp8" if engine.kv_cache_dtype == "fp8" else stored_kv)
    if checkpoint.quantization_config is None and not (folder / "hf_quant_config.json").exists():
        return checkpoint.weight_bytes(ranks, "16bit", "pytorch"), kv, engine.tokens_per_block
    try:
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except OSError as error:
        raise UserError(f"model '{name}': engine.weights: {error.filename} can't be read: {error.strerror}") from error
    if not stored:
        raise UserError(
            f"model '{name}': engine.weights: {folder} is quantised, and has no *.safetensors to read its size from"
        )
    return -(-stored // ranks), kv, engine.tokens_per_block  # scales and norms, which aren't divided, are little


def _llama_cpp(name: str, engine: LlamaCppConfig) -> tuple[int, int, int]:
    try:
        path = locate_weights(engine.weights)
        header = read_gguf_header(path)
        size = path.stat().st_size
    except (WeightsError, OSError, ValueError) as error:
        raise UserError(f"model '{name}': engine.weights: {error}") from error
    block = cells(engine.context_tokens) if engine.deterministic else CELL_BLOCK
    return size, llama_kv_token_bytes(header, engine), block
