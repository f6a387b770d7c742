# SPDX-License-Identifier: Apache-2.0
"""The commands that make a TensorRT engine of a Hugging Face checkpoint, with the flags that routing needs.

Flags as TensorRT-LLM 1.0 to 1.2 has them: examples/models/core/{qwen,llama}/convert_checkpoint.py,
examples/quantization/quantize.py, and trtllm-build (tensorrt_llm/commands/build.py, tensorrt_llm/plugin/plugin.py).
The engine flow ends with 1.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from tools.building.config import BuildConfig
from tools.deployment import ModelConfig
from tools.errors import UserError
from tools.sizing.checkpoint import Checkpoint

__all__ = ["Step", "steps"]

_EXAMPLE = {"qwen2": "qwen", "qwen3": "qwen", "llama": "llama", "mistral": "llama"}
_LOGITS = {"fp32": "float32", "fp16": "float16"}
_BLOCKS = (8, 16, 32, 64, 128)  # tokens_per_block must be a power of two


@dataclass(frozen=True)
class Step:
    """One command. source: the folder that it reads; output: the one that it makes."""

    title: str
    command: tuple[str, ...]
    source: Path
    output: Path


def steps(model: ModelConfig) -> list[Step]:
    """For a model of the engine `tensorrtllm`; none for others. Raises UserError when a setting is missing or the
    checkpoint can't be built."""
    engine = model.engine
    if not isinstance(engine, TensorRTLLMBackendConfig):
        return []
    if engine.checkpoint is None:
        raise UserError(f"model '{model.name}': engine.checkpoint is missing; the engine is built from there")
    source, output = Path(engine.checkpoint), Path(engine.engine_dir)
    checkpoint, build = Checkpoint.read(source), model.build
    _check(model.name, engine, build, checkpoint)
    checkpoint.require_ranks(engine.tensor_parallel, f"model '{model.name}': engine.gpu_device_ids")
    converted = output.with_name(f"{output.name}-checkpoint")
    context = engine.context_tokens or checkpoint.max_position_embeddings
    return [
        Step(f"{model.name}: checkpoint", _convert(engine, build, checkpoint, source, converted), source, converted),
        Step(f"{model.name}: engine", _build(engine, build, context, converted, output), converted, output),
    ]


def _check(name: str, engine: TensorRTLLMBackendConfig, build: BuildConfig, checkpoint: Checkpoint) -> None:
    if checkpoint.quantization_config is not None:
        raise UserError(
            f"model '{name}': engine.checkpoint: {engine.checkpoint} is quantised already; build from the model itself,"
            " with build.weights"
        )
    if engine.tokens_per_block not in _BLOCKS:
        raise UserError(
            f"model '{name}': engine.tokens_per_block: got {engine.tokens_per_block}; allowed:"
            f" {', '.join(map(str, _BLOCKS))}"
        )
    least = max(engine.max_sessions, engine.prefill_chunk)
    if build.max_num_tokens < least:
        raise UserError(
            f"model '{name}': build.max_num_tokens: got {build.max_num_tokens}; at least {least}, one step's"
            " engine.prefill_chunk or a token of each of engine.max_sessions"
        )


def _convert(
    engine: TensorRTLLMBackendConfig, build: BuildConfig, checkpoint: Checkpoint, source: Path, output: Path
) -> tuple[str, ...]:
    folders = ("--model_dir", str(source), "--output_dir", str(output), "--dtype", build.dtype)
    ranks = str(engine.tensor_parallel)
    if build.weights == "16bit":
        script = f"{build.examples}/models/core/{_EXAMPLE[checkpoint.model_type]}/convert_checkpoint.py"
        return ("python3", script, *folders, "--tp_size", ranks, "--workers", ranks)
    kv = () if build.kv_cache == "16bit" else ("--kv_cache_dtype", build.kv_cache)
    script = f"{build.examples}/quantization/quantize.py"
    return ("python3", script, *folders, "--qformat", build.weights, *kv, "--tp_size", ranks)


def _build(
    engine: TensorRTLLMBackendConfig, build: BuildConfig, context: int, source: Path, output: Path
) -> tuple[str, ...]:
    """max_input_len = max_seq_len: a session that comes back brings its whole sequence as the input."""
    command = [
        *("trtllm-build", "--checkpoint_dir", str(source), "--output_dir", str(output)),
        *("--max_batch_size", str(engine.max_sessions)),
        *("--max_input_len", str(context), "--max_seq_len", str(context)),
        *("--max_num_tokens", str(build.max_num_tokens)),
        *("--kv_cache_type", "paged", "--tokens_per_block", str(engine.tokens_per_block)),
        *("--use_paged_context_fmha", "enable"),  # reuse of KV blocks needs it
        *("--remove_input_padding", "enable", "--gemm_plugin", "auto"),
        *("--logits_dtype", _LOGITS[engine.logits_dtype]),
        *("--workers", str(engine.tensor_parallel)),
    ]
    if build.kv_cache == "fp8":
        command += ["--use_fp8_context_fmha", "enable"]
    if engine.return_logits:
        command.append("--gather_generation_logits")
    return tuple(command)
