# SPDX-License-Identifier: Apache-2.0
"""From our configuration to the arguments of TensorRT-LLM's public classes."""

from __future__ import annotations

from typing import Any

from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.config import TensorRTLLMConfig

__all__ = ["make_llm", "make_retention"]

_DEFAULT_BLOCK = 32  # of versions whose KvCacheConfig has no tokens_per_block


def make_llm(package: Any, config: TensorRTLLMConfig) -> Any:
    """The LLM, loaded. Raises ValueError naming a field that this version can't do, EngineError when it fails."""
    llmapi = package.llmapi
    kv: dict[str, Any] = {
        "enable_block_reuse": True,
        "enable_partial_reuse": True,  # else up to a block of every resume would be computed again
        "copy_on_partial_reuse": True,
        "max_tokens": config.max_tokens,
        "free_gpu_memory_fraction": config.free_memory_fraction,
        "host_cache_size": config.host_cache_bytes,
        "dtype": config.kv_cache_dtype,
    }
    if "tokens_per_block" in llmapi.KvCacheConfig.model_fields:
        kv["tokens_per_block"] = config.tokens_per_block
    elif config.tokens_per_block != _DEFAULT_BLOCK:
        raise ValueError(
            f"tokens_per_block: got {config.tokens_per_block}; tensorrt_llm {package.__version__} allows"
            f" {_DEFAULT_BLOCK} only"
        )
    # one more than the sessions that are kept: CUDA graphs pad a batch with a sequence of their own
    sequences = config.max_sessions + 1
    graphs = llmapi.CudaGraphConfig(max_batch_size=config.max_sessions, enable_padding=True)
    try:
        return package.LLM(
            model=config.weights,
            skip_tokenizer_init=True,  # token ids in, token ids out
            tensor_parallel_size=config.tensor_parallel,
            kv_cache_config=llmapi.KvCacheConfig(**kv),
            max_batch_size=sequences,
            max_seq_len=config.context_tokens + 1,  # with the token that a step samples, which we don't take
            max_num_tokens=config.max_step_tokens,
            enable_chunked_prefill=True,
            cuda_graph_config=graphs if config.cuda_graphs else None,
            disable_overlap_scheduler=True,  # a processor must see each token that was taken, and may end the request
            gather_generation_logits=config.tensor_parallel > 1,
        )
    except Exception as error:  # whatever loading raises: no memory, no such checkpoint, an unknown architecture
        reason = " ".join(str(error).split())
        raise EngineError(f"{config.weights} can't be loaded: {type(error).__name__}: {reason}") from error


def make_retention(package: Any, priority: int) -> Any:
    """The retention of a session's blocks, prompt and output: 0 to 100, 35 is what others have."""
    retention = package.llmapi.KvCacheRetentionConfig
    everything = retention.TokenRangeRetentionConfig(0, None, priority, None)
    return retention([everything], priority, None)
