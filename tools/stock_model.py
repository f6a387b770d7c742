# SPDX-License-Identifier: Apache-2.0
"""config.pbtxt of a stock `tensorrtllm` backend model, as TensorRT-LLM 1.0 to 1.2 has it.

The tensors are those of the backend's template (triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/
config.pbtxt); tests/unit/tools/stock_tensors.json is a record of them to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from python_backends.llm.engines.stock_parameters import FIELDS, PARAMETERS

__all__ = ["stock_model"]

_INT32, _UINT64, _FP16, _FP32 = "TYPE_INT32", "TYPE_UINT64", "TYPE_FP16", "TYPE_FP32"
_BOOL, _STRING = "TYPE_BOOL", "TYPE_STRING"


class _Tensor(NamedTuple):
    """scalar: its one element reaches the backend without a dimension. ragged: requests with different sizes may be
    handed over together."""

    data_type: str
    dims: tuple[int, ...]
    scalar: bool = False
    ragged: bool = False
    optional: bool = True


def _scalar(data_type: str, optional: bool = True) -> _Tensor:
    return _Tensor(data_type, (1,), scalar=True, optional=optional)


def _ragged(data_type: str, *dims: int) -> _Tensor:
    return _Tensor(data_type, dims, ragged=True)


def _inputs(logits: str) -> dict[str, _Tensor]:
    """logits: the data type of the model's logits."""
    return {
        "input_ids": _ragged(_INT32, -1),
        "encoder_input_features": _ragged(_FP16, -1, -1),
        "encoder_output_lengths": _scalar(_INT32),
        "input_lengths": _scalar(_INT32, optional=False),
        "request_output_len": _scalar(_INT32, optional=False),
        "num_return_sequences": _scalar(_INT32),
        "draft_input_ids": _ragged(_INT32, -1),
        "decoder_input_ids": _ragged(_INT32, -1),
        "decoder_input_lengths": _scalar(_INT32),
        "draft_logits": _ragged(logits, -1, -1),
        "draft_acceptance_threshold": _scalar(_FP32),
        "end_id": _scalar(_INT32),
        "pad_id": _scalar(_INT32),
        "stop_words_list": _ragged(_INT32, 2, -1),
        "bad_words_list": _ragged(_INT32, 2, -1),
        "embedding_bias": _ragged(_FP32, -1),
        "beam_width": _scalar(_INT32),
        "temperature": _scalar(_FP32),
        "runtime_top_k": _scalar(_INT32),
        "runtime_top_p": _scalar(_FP32),
        "runtime_top_p_min": _scalar(_FP32),
        "runtime_top_p_decay": _scalar(_FP32),
        "runtime_top_p_reset_ids": _scalar(_INT32),
        "len_penalty": _scalar(_FP32),
        "early_stopping": _scalar(_BOOL),
        "repetition_penalty": _scalar(_FP32),
        "min_tokens": _scalar(_INT32),
        "beam_search_diversity_rate": _scalar(_FP32),
        "presence_penalty": _scalar(_FP32),
        "frequency_penalty": _scalar(_FP32),
        "seed": _scalar(_UINT64),
        "return_log_probs": _scalar(_BOOL),
        "return_context_logits": _scalar(_BOOL),
        "return_generation_logits": _scalar(_BOOL),
        "return_perf_metrics": _scalar(_BOOL),
        "return_num_input_tokens": _scalar(_BOOL),
        "return_num_output_tokens": _scalar(_BOOL),
        "exclude_input_in_output": _scalar(_BOOL),
        "stop": _scalar(_BOOL),
        "streaming": _scalar(_BOOL),
        "prompt_embedding_table": _ragged(_FP16, -1, -1),
        "prompt_table_extra_ids": _ragged(_UINT64, -1),
        "prompt_vocab_size": _scalar(_INT32),
        "cross_attention_mask": _ragged(_BOOL, -1, -1),
        "mrope_rotary_cos_sin": _Tensor(_FP32, (-1,)),
        "mrope_position_deltas": _Tensor("TYPE_INT64", (1,)),
        "lora_task_id": _scalar(_UINT64),
        "lora_weights": _ragged(_FP16, -1, -1),
        "lora_config": _ragged(_INT32, -1, 3),
        "context_phase_params": _ragged("TYPE_UINT8", -1),
        "skip_cross_attn_blocks": _ragged(_BOOL, 1),
        "retention_token_range_starts": _ragged(_INT32, -1),
        "retention_token_range_ends": _ragged(_INT32, -1),
        "retention_token_range_priorities": _ragged(_INT32, -1),
        "retention_token_range_durations_ms": _ragged(_INT32, -1),
        "retention_decode_priority": _ragged(_INT32, 1),
        "retention_decode_duration_ms": _ragged(_INT32, 1),
        "guided_decoding_guide_type": _ragged(_STRING, 1),
        "guided_decoding_guide": _ragged(_STRING, 1),
        "lookahead_window_size": _ragged(_INT32, 1),
        "lookahead_ngram_size": _ragged(_INT32, 1),
        "lookahead_verification_set_size": _ragged(_INT32, 1),
    }


def _outputs(logits: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    int32, int64, fp32 = (_INT32, (1,)), ("TYPE_INT64", (1,)), (_FP32, (1,))
    return {
        "output_ids": (_INT32, (-1, -1)),
        "sequence_length": (_INT32, (-1,)),
        "cum_log_probs": (_FP32, (-1,)),
        "output_log_probs": (_FP32, (-1, -1)),
        "context_logits": (logits, (-1, -1)),
        "generation_logits": (logits, (-1, -1, -1)),
        "batch_index": int32,
        "sequence_index": int32,
        "context_phase_params": ("TYPE_UINT8", (-1,)),
        "kv_cache_alloc_new_blocks": int32,
        "kv_cache_reused_blocks": int32,
        "kv_cache_alloc_total_blocks": int32,
        "arrival_time_ns": int64,
        "first_scheduled_time_ns": int64,
        "first_token_time_ns": int64,
        "last_token_time_ns": int64,
        "acceptance_rate": fp32,
        "total_accepted_draft_tokens": int32,
        "total_draft_tokens": int32,
        "num_input_tokens": int32,
        "num_output_tokens": int32,
    }


def stock_model(name: str, config: TensorRTLLMBackendConfig) -> tuple[str, ...]:
    """The parts of the file, its header left out.

    Not decoupled: every request has one answer. A model with a stream of answers would keep each with its logits in
    shared memory until the last.
    """
    logits = f"TYPE_{config.logits_dtype.upper()}"
    size = config.max_sessions
    return (
        f'name: "{name}"',
        'backend: "tensorrtllm"',
        f"max_batch_size: {size}",
        "model_transaction_policy { decoupled: false }",
        f"dynamic_batching {{\n  preferred_batch_size: [ {size} ]\n"
        f"  max_queue_delay_microseconds: {config.max_queue_delay_microseconds}\n"
        f"  default_queue_policy {{ max_queue_size: {config.max_queue_size} }}\n}}",
        "input [\n" + ",\n".join(_input(*item) for item in _inputs(logits).items()) + "\n]",
        "output [\n" + ",\n".join(_tensor(key, *value) for key, value in _outputs(logits).items()) + "\n]",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
        *(_parameter(key, value) for key, value in _parameters(config)),
    )


def _parameters(config: TensorRTLLMBackendConfig) -> Iterator[tuple[str, str]]:
    """Those that have a value, by name."""
    values = {parameter: _text(getattr(config, field)) for parameter, field in FIELDS.items()}
    values |= PARAMETERS
    values |= {name: _text(value) for name, value in config.parameters.items()}
    for name, value in sorted(values.items()):
        if value is not None:
            yield name, value


def _text(value: object) -> str | None:
    """As the backend reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    return None if value is None else str(value)


def _input(name: str, tensor: _Tensor) -> str:
    extra = " reshape: { shape: [ ] }" if tensor.scalar else ""
    extra += " allow_ragged_batch: true" if tensor.ragged else ""
    extra += " optional: true" if tensor.optional else ""
    return _tensor(name, tensor.data_type, tensor.dims, extra)


def _tensor(name: str, data_type: str, dims: tuple[int, ...], extra: str = "") -> str:
    return f'  {{ name: "{name}" data_type: {data_type} dims: [ {", ".join(map(str, dims))} ]{extra} }}'


def _parameter(key: str, value: str) -> str:
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'parameters {{ key: "{key}" value {{ string_value: "{quoted}" }} }}'
