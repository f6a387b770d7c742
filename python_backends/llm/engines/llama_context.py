# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's C API as the engine needs it: one model, one context, and sequences of tokens in its KV."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.engines.llama_calls import CALL_TOKENS, Call
from python_backends.llm.gguf_header import read_gguf_header
from python_backends.llm.kv_size import llama_kv_cells, llama_kv_token_bytes, quantised_keys

__all__ = ["LlamaContext"]

_GGUF_MAGIC = b"GGUF"
_LOG_LEVEL_ERROR = 4  # ggml's; llama-cpp-python's own callback is one off, and hides errors


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _print_errors(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """What llama.cpp reports of a model is some 200 lines; only its errors are worth a line of ours."""
    if level == _LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class LlamaContext:
    """The weights, and the KV of `config.max_sessions` sequences numbered from 0 (`slot`).

    vocab_size, hidden_size: columns of the logits and of the hidden states.
    eos_token_ids: every token that ends a generation.
    Raises EngineError, in one line, when the file isn't a model that llama.cpp knows, or memory is short.
    """

    def __init__(self, path: Path, config: LlamaCppConfig) -> None:
        llama.llama_log_set(_print_errors, None)
        llama.llama_backend_init()
        self._model = _load_model(path, config)
        try:
            self._context = _make_context(self._model, path, config)
        except EngineError:
            llama.llama_model_free(self._model)
            raise
        self._memory = llama.llama_get_memory(self._context)
        self._vocab = vocab = llama.llama_model_get_vocab(self._model)
        self.vocab_size: int = llama.llama_vocab_n_tokens(vocab)
        self.hidden_size: int = llama.llama_model_n_embd(self._model)
        self.eos_token_ids = tuple(t for t in range(self.vocab_size) if llama.llama_vocab_is_eog(vocab, t))
        self._make_batch(config.max_sessions)

    def _make_batch(self, slots: int) -> None:
        """A llama_batch over numpy arrays that every call fills anew."""
        self._token_ids = np.zeros(CALL_TOKENS, np.int32)
        self._positions = np.zeros(CALL_TOKENS, np.int32)
        self._outputs = np.zeros(CALL_TOKENS, np.int8)
        self._slot_counts = np.ones(CALL_TOKENS, np.int32)
        self._slot_pointers = np.zeros(CALL_TOKENS, np.uint64)
        self._slots = np.arange(slots, dtype=np.int32)
        types = dict(llama.llama_batch._fields_)
        arrays: dict[str, NDArray[Any]] = {
            "token": self._token_ids,
            "pos": self._positions,
            "n_seq_id": self._slot_counts,
            "seq_id": self._slot_pointers,
            "logits": self._outputs,
        }
        self._batch = llama.llama_batch(**{k: ctypes.cast(a.ctypes.data, types[k]) for k, a in arrays.items()})

    def decode(self, call: Call) -> list[int]:
        """Compute one call; returns the rows (places in the call) of its outputs, in the order of its pieces.

        Raises EngineError when llama.cpp can't; the KV of the call's sequences is undefined then.
        """
        rows = []
        at = 0
        for piece in call.pieces:
            to = at + len(piece.token_ids)
            self._token_ids[at:to] = piece.token_ids
            self._positions[at:to] = range(piece.start, piece.end)
            self._slot_pointers[at:to] = self._slots.ctypes.data + self._slots.itemsize * piece.slot
            self._outputs[at:to] = 0
            if piece.output:
                self._outputs[to - 1] = 1
                rows.append(to - 1)
            at = to
        self._batch.n_tokens = at
        llama.llama_set_embeddings(self._context, call.hidden_states)
        if code := llama.llama_decode(self._context, self._batch):
            raise EngineError(f"llama.cpp couldn't compute {at} tokens of {len(call.pieces)} sessions (code {code})")
        return rows

    def read_logits(self, row: int, into: torch.Tensor) -> None:
        """Copy the logits of a row of the last call into FP32 [vocab_size]."""
        _copy(llama.llama_get_logits_ith(self._context, row), into)

    def read_hidden_state(self, row: int, into: torch.Tensor) -> None:
        """Copy the hidden state of a row of the last call into FP32 [hidden_size]."""
        _copy(llama.llama_get_embeddings_ith(self._context, row), into)

    def token_bytes(self, token: int) -> bytes:
        """The text of a token; empty of a special one."""
        size = -llama.llama_token_to_piece(self._vocab, token, None, 0, 0, False)  # minus what it would take
        text = ctypes.create_string_buffer(max(0, size))
        llama.llama_token_to_piece(self._vocab, token, text, size, 0, False)
        return text.raw

    def truncate(self, slot: int, length: int) -> None:
        """Drop what sequence `slot` holds from position `length` on."""
        llama.llama_memory_seq_rm(self._memory, slot, length, -1)

    def close(self) -> None:
        """Free the context and the model."""
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)


def _copy(source: Any, into: torch.Tensor) -> None:
    if not source:  # a null pointer would end the process
        raise EngineError("llama.cpp has no output where one was asked for")
    ctypes.memmove(into.data_ptr(), source, into.nbytes)


def _load_model(path: Path, config: LlamaCppConfig) -> Any:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise EngineError(f"weights: {path} can't be read: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise EngineError(f"weights: {path} is not a GGUF file (it begins with {magic!r})")
    params = llama.llama_model_default_params()
    if config.gpu_layers and not llama.llama_supports_gpu_offload():
        raise EngineError(
            f"gpu_layers: {config.gpu_layers}, but this build of llama.cpp has no GPU support; allowed: 0"
        )
    params.n_gpu_layers = config.gpu_layers
    if config.gpu_layers == 0:
        _check_memory(path.stat().st_size, f"the weights {path.name}")
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise EngineError(
            f"weights: llama.cpp can't load {path}: it is damaged, or of a kind that llama.cpp doesn't know"
        )
    return model


def _make_context(model: Any, path: Path, config: LlamaCppConfig) -> Any:
    longest = llama.llama_model_n_ctx_train(model)
    if config.context_tokens > longest:
        raise EngineError(
            f"context_tokens: {config.context_tokens} is more than {path.name} was trained for; at most {longest}"
        )
    if config.gpu_layers == 0:
        _check_memory(
            llama_kv_cells(config) * llama_kv_token_bytes(read_gguf_header(path), config),
            f"the KV of {_pool(config)}",
        )
    context = llama.llama_init_from_model(model, _context_params(config))
    if not context:
        raise EngineError(f"llama.cpp can't make a context of {_pool(config)} for {path.name}: too little memory?")
    return context


def _context_params(config: LlamaCppConfig) -> Any:
    params = llama.llama_context_default_params()
    params.n_ctx = config.all_kv_tokens
    params.n_batch = params.n_ubatch = CALL_TOKENS
    params.n_seq_max = config.max_sessions
    params.n_outputs_max = min(config.max_sessions, CALL_TOKENS)  # the default reserves logits for 512 tokens
    params.n_threads = params.n_threads_batch = config.threads
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.kv_unified = not config.deterministic
    if quantised_keys(config):
        # With several threads, llama.cpp cuts the attention of a single token over 512 or more positions
        # into one part a thread, but only while that token is alone in its micro-batch, and only if keys
        # and values are of one type. With 8-bit keys it never does, and the bits stay the same.
        params.type_k = llama.GGML_TYPE_Q8_0
    return params


def _pool(config: LlamaCppConfig) -> str:
    sessions = f"max_sessions = {config.max_sessions} of context_tokens = {config.context_tokens}"
    return sessions if config.kv_tokens is None else f"{sessions}, kv_tokens = {config.kv_tokens}"


def _check_memory(needed_bytes: int, what: str) -> None:
    """Raises EngineError while the system would still survive: Linux hands out memory that it hasn't got,
    and ends a process that then uses it."""
    available_bytes = psutil.virtual_memory().available
    if needed_bytes > available_bytes:
        raise EngineError(
            f"too little memory: {what} takes {needed_bytes / 1e9:.1f} GB, {available_bytes / 1e9:.1f} GB are free"
        )
