# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp's KV takes: positions ("cells"), and bytes for each. It takes all of it when a context is made."""

from __future__ import annotations

from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.gguf_header import GgufHeader

__all__ = ["CELL_BLOCK", "cells", "llama_kv_cells", "llama_kv_token_bytes", "quantised_keys"]

CELL_BLOCK = 256  # llama.cpp rounds the positions of a buffer up to a multiple of this (llama-context.cpp)
_FP16 = 2
_Q8_0_VALUES, _Q8_0_BYTES = 32, 34  # a block of GGML's 8-bit type: the values, and one FP16 scale


def llama_kv_cells(config: LlamaCppConfig) -> int:
    """The positions of all sessions together: of one common buffer, or of one buffer for each session."""
    if config.deterministic:
        return config.max_sessions * cells(config.context_tokens)
    return cells(config.all_kv_tokens)


def llama_kv_token_bytes(header: GgufHeader, config: LlamaCppConfig) -> int:
    """Bytes of one position: keys and values, of all layers."""
    layers = header.of_architecture("block_count") or 0
    heads = header.of_architecture("attention.head_count") or 1
    kv_heads = header.of_architecture("attention.head_count_kv") or heads
    size = (header.of_architecture("embedding_length") or 0) // heads
    keys = kv_heads * (header.of_architecture("attention.key_length") or size)
    values = kv_heads * (header.of_architecture("attention.value_length") or size)
    key_bytes = keys // _Q8_0_VALUES * _Q8_0_BYTES if quantised_keys(config) else keys * _FP16
    return layers * (key_bytes + values * _FP16)


def quantised_keys(config: LlamaCppConfig) -> bool:
    """Whether keys are kept in 8 bits (docs/decisions/0003)."""
    return config.deterministic and config.threads > 1


def cells(tokens: int) -> int:
    """The positions of a buffer for so many tokens."""
    return -(-tokens // CELL_BLOCK) * CELL_BLOCK
