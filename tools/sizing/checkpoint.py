# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face checkpoint takes on one of its tensor-parallel ranks: its weights, and the KV of a token."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator
from pydantic_core import ErrorDetails

from tools.errors import UserError

__all__ = ["KV_BYTES", "WEIGHT_BYTES", "Checkpoint", "Flow", "KvType", "WeightType", "kv_type"]

WeightType: TypeAlias = Literal["16bit", "fp8", "int4_awq"]
KvType: TypeAlias = Literal["16bit", "fp8"]
_ModelType: TypeAlias = Literal["llama", "mistral", "qwen2", "qwen3"]
Flow: TypeAlias = Literal["engine", "pytorch"]

KV_BYTES: dict[KvType, int] = {"16bit": 2, "fp8": 1}
# of a number in a linear layer; AWQ: half a byte, and an FP16 scale for each group of 128
WEIGHT_BYTES: dict[WeightType, Fraction] = {
    "16bit": Fraction(2), "fp8": Fraction(1), "int4_awq": Fraction(1, 2) + Fraction(2, 128)
}  # fmt: skip
_16_BITS = ("bfloat16", "float16")
_FLOAT = 2  # bytes of a number that is never quantised: embeddings, norms, biases, the head


class Checkpoint(BaseModel):
    """config.json of a dense decoder whose layers are attention and a gated feed-forward network; the names are its."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_type: _ModelType
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What transformers takes for a key that is missing or null."""
        heads, width = values.get("num_attention_heads"), values.get("hidden_size")
        found = dict(values)
        if found.get("torch_dtype") is None:
            found["torch_dtype"] = values.get("dtype")  # as newer versions of transformers write it
        if found.get("num_key_value_heads") is None and heads is not None:
            found["num_key_value_heads"] = heads
        if found.get("head_dim") is None and found.get("model_type") == "qwen3":
            found["head_dim"] = 128
        elif found.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
            found["head_dim"] = width // heads
        return found

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Raises UserError when its config.json is missing, damaged, or of another kind of model."""
        path = folder / "config.json"
        values = _json(path)
        if (kind := values.get("model_type")) not in get_args(_ModelType):  # the other keys would mean something else
            raise UserError(f"{path}: model_type: got {kind!r:.60}; allowed: {', '.join(get_args(_ModelType))}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError([f"{path}: {_line(e)}" for e in error.errors()]) from error

    def require_ranks(self, tensor_parallel: int, where: str) -> None:
        """Raises UserError, which begins with `where`, when the model can't be divided so: TensorRT-LLM gives every
        rank the same number of attention heads."""
        heads = self.num_attention_heads
        if heads % tensor_parallel:
            raise UserError(
                f"{where}: got {tensor_parallel} ranks; must divide the model's {heads} attention heads"
                " (num_attention_heads of its config.json)"
            )

    def require_16_bits(self, folder: Path) -> None:
        """Raises UserError when its numbers are of another type: the PyTorch flow takes it from here, whatever its
        argument `dtype` says (_torch/pyexecutor/model_loader.py, a copy of 1.2's time)."""
        if self.torch_dtype not in (None, *_16_BITS):  # without one it takes bfloat16
            raise UserError(
                f"{folder / 'config.json'}: torch_dtype: got {self.torch_dtype!r:.60}; can be sized:"
                f" {', '.join(_16_BITS)}; convert the checkpoint"
            )

    def kv_token_bytes(self, tensor_parallel: int, kv: KvType) -> int:
        """Keys and values of one token in all layers, on each rank. With more ranks than KV heads, each has one
        (TensorRT-LLM rounds up)."""
        return 2 * self.num_hidden_layers * self._kv_heads(tensor_parallel) * self.head_dim * KV_BYTES[kv]

    def weight_bytes(self, tensor_parallel: int, weights: WeightType, flow: Flow) -> int:
        """On each rank: linear layers are divided, norms are on every rank, KV projections as the KV heads are.

        flow: in an "engine" of trtllm-build the input embedding is whole on every rank, and a tied head is a matrix
        of its own; the "pytorch" flow divides the embedding, and keeps a tied one once.
        """
        layers, width, ranks = self.num_hidden_layers, self.hidden_size, tensor_parallel
        queries = _share(self.num_attention_heads, ranks) * self.head_dim
        keys = self._kv_heads(ranks) * self.head_dim
        linear = width * (2 * queries + 2 * keys) + 3 * width * _share(self.intermediate_size, ranks)
        qkv_bias = queries + 2 * keys if self.attention_bias or self.model_type == "qwen2" else 0
        output_bias = width if self.attention_bias else 0
        head_norms = 2 * self.head_dim if self.model_type == "qwen3" else 0
        rest = layers * (2 * width + head_norms + qkv_bias + output_bias) + width
        head = width * _share(self.vocab_size, ranks)
        embedding = width * self.vocab_size if flow == "engine" else head
        if flow == "pytorch" and self.tie_word_embeddings:
            embedding = 0
        quantised = -(-layers * linear * WEIGHT_BYTES[weights].numerator // WEIGHT_BYTES[weights].denominator)
        return quantised + _FLOAT * (rest + embedding + head)

    def _kv_heads(self, ranks: int) -> int:
        return _share(self.num_key_value_heads, ranks)


def kv_type(folder: Path) -> KvType:
    """Of the KV that a checkpoint in the format of NVIDIA's Model Optimizer asks for; the PyTorch flow looks for it in
    hf_quant_config.json alone (_torch/model_config.py, 1.1.0rc6). Raises UserError for a type that isn't known here.
    """
    path = folder / "hf_quant_config.json"
    values = _json(path) if path.exists() else {}
    section = values.get("quantization")
    found = section.get("kv_cache_quant_algo") if isinstance(section, dict) else None
    if found not in (None, "FP8"):
        raise UserError(f"{path}: quantization.kv_cache_quant_algo: got {found!r:.60}; can be sized: FP8, or none")
    return "16bit" if found is None else "fp8"


def _json(path: Path) -> dict[str, Any]:
    """Raises UserError when it's missing or no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return values


def _line(error: ErrorDetails) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{name}: is missing"
    return f"{name}: got {error['input']!r:.60}; {error['msg'][0].lower()}{error['msg'][1:]}"


def _share(count: int, ranks: int) -> int:
    """Of one rank, rounded up."""
    return -(-count // ranks)
