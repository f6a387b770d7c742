# SPDX-License-Identifier: Apache-2.0
"""The parameters of a stock `tensorrtllm` backend model, by the names that its config.pbtxt has.

Read from TensorRT-LLM 1.0 to 1.2 (triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt, and
model_state.cc and model_instance_state.cc of the backend): a parameter that isn't given, or can't be read as its
type, is logged and takes its default there.
"""

from __future__ import annotations

__all__ = ["FIELDS", "PARAMETERS"]

# parameter -> the field of TensorRTLLMBackendConfig that sets it
FIELDS = {
    "batch_scheduler_policy": "batch_scheduler_policy",
    "cancellation_check_period_ms": "cancellation_check_period_ms",
    "gpt_model_path": "engine_dir",
    "gpu_device_ids": "gpu_device_ids",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_free_gpu_mem_fraction",
    "kv_cache_host_memory_bytes": "kv_cache_host_memory_bytes",
    "max_tokens_in_paged_kv_cache": "max_tokens",
}

# the others -> what is rendered when the deployment says nothing; None = nothing, which leaves the backend's default
PARAMETERS: dict[str, str | None] = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "cross_kv_cache_fraction": None,
    "cuda_graph_cache_size": None,
    "cuda_graph_mode": "true",
    "decoding_mode": None,
    "eagle_choices": None,
    "enable_chunked_context": "true",  # without it a prompt may be no longer than the engine's max_num_tokens
    "enable_context_fmha_fp32_acc": None,
    "enable_kv_cache_reuse": "true",  # every step sends the whole prefix
    "enable_trt_overlap": None,
    "encoder_model_path": None,
    "exclude_input_in_output": "true",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    "gpt_model_type": "inflight_fused_batching",
    "gpu_weights_percent": None,
    # the model isn't loaded without these three, even when there is no guided decoding
    "guided_decoding_backend": "",
    "tokenizer_dir": "",
    "xgrammar_tokenizer_info_path": "",
    "iter_stats_max_iterations": None,
    "kv_cache_onboard_blocks": None,
    "lookahead_ngram_size": None,
    "lookahead_verification_set_size": None,
    "lookahead_window_size": None,
    "lora_cache_gpu_memory_fraction": None,
    "lora_cache_host_memory_bytes": None,
    "lora_cache_max_adapter_size": None,
    "lora_cache_optimal_adapter_size": None,
    "lora_prefetch_dir": None,
    "max_attention_window_size": None,
    "max_beam_width": "1",
    "medusa_choices": None,
    "multi_block_mode": None,
    "normalize_log_probs": None,
    "num_nodes": None,
    "participant_ids": None,
    "recv_poll_period_ms": None,
    "request_stats_max_iterations": None,
    "sink_token_length": None,
    "speculative_decoding_fast_logits": None,
    "stats_check_period_ms": None,
}
