# SPDX-License-Identifier: Apache-2.0
"""Tiny language models with random weights and one vocabulary, for tests: real files, made in a moment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tools.models.vocabulary import TokenType, Vocabulary, write_tokenizer

__all__ = ["ensure_tiny_models", "make_tiny_gguf", "make_tiny_tokenizer", "tiny_vocabulary"]

Array = npt.NDArray[np.float32]

_SPECIAL = ("<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Pieces that BPE puts together byte by byte. Some characters get a token of their own, of others only the
# first bytes get one, and the rest only single bytes: so a character may be split over two to four tokens.
_PIECES = (
    *(" the", " return", "def", "if", "for", "    ", "\n\n", "()", "==", "user", "assistant", "system"),
    "12",  # no text gives it: digits stand alone, and a tokenizer that forgets that shows here
    *("é", "日", "本".encode()[:2], "😀".encode()[:2], "語".encode()[:2]),
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_vocabulary() -> Vocabulary:
    """The vocabulary that all tiny models share: 256 bytes, some longer pieces, 4 special tokens."""
    spelling = _byte_spelling()
    tokens = [spelling[byte] for byte in range(256)]
    merges = []
    for piece in _PIECES:
        spelled = [spelling[byte] for byte in (piece.encode() if isinstance(piece, str) else piece)]
        for length in range(1, len(spelled)):
            left, right = "".join(spelled[:length]), spelled[length]
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    special_id = len(tokens)
    return Vocabulary(
        tokens=[*tokens, *_SPECIAL],
        token_types=[TokenType.NORMAL] * special_id + [TokenType.CONTROL] * len(_SPECIAL),
        merges=merges,
        pre="smollm",
        bos_id=special_id,
        eos_id=special_id + 3,
        pad_id=special_id + 1,
        unknown_id=None,
        chat_template=_CHAT_TEMPLATE,
    )


def make_tiny_tokenizer(folder: Path) -> None:
    """Write the shared vocabulary into `folder` for transformers' AutoTokenizer."""
    write_tokenizer(tiny_vocabulary(), folder)


def make_tiny_gguf(
    path: Path,
    *,
    seed: int,
    layers: int = 2,
    embedding: int = 64,
    heads: int = 4,
    context: int = 2048,
    quantization: Literal["q8_0", "q4_0"] = "q8_0",
) -> None:
    """Write a llama-architecture model with random weights, the same ones for the same arguments.

    Raises ValueError when `embedding` is no multiple of 32 (a quantised row is made of blocks of 32) or of
    2 * heads.
    """
    if embedding % 32 or embedding % (2 * heads):
        raise ValueError(f"embedding is {embedding}; it must be a multiple of 32 and of 2 * heads = {2 * heads}")
    import gguf

    vocabulary = tiny_vocabulary()
    types = gguf.GGMLQuantizationType
    quantized = {"q8_0": types.Q8_0, "q4_0": types.Q4_0}[quantization]
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    _add_shape(writer, layers, embedding, heads, context, len(vocabulary.tokens))
    _add_vocabulary(writer, vocabulary)
    file_types = gguf.LlamaFileType
    writer.add_file_type({"q8_0": file_types.MOSTLY_Q8_0, "q4_0": file_types.MOSTLY_Q4_0}[quantization])
    for name, tensor in _tensors(np.random.default_rng(seed), layers, embedding, heads, len(vocabulary.tokens)):
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def ensure_tiny_models(folder: Path) -> dict[str, Path]:
    """Make in `folder`, where absent, what tests need: two models and their tokenizer.

    Returns "slm" and "llm" (different models; .gguf files) and "tokenizer" (a folder).
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = {"slm": folder / "tiny-slm.gguf", "llm": folder / "tiny-llm.gguf", "tokenizer": folder / "tiny-tokenizer"}
    if not made["slm"].exists():
        make_tiny_gguf(made["slm"], seed=1, layers=1)
    if not made["llm"].exists():
        make_tiny_gguf(made["llm"], seed=2, layers=2)
    if not (made["tokenizer"] / "tokenizer_config.json").exists():
        make_tiny_tokenizer(made["tokenizer"])
    return made


def _byte_spelling() -> dict[int, str]:
    """How GPT-2 spells each byte as a printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _add_shape(writer: Any, layers: int, embedding: int, heads: int, context: int, tokens: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(embedding)
    writer.add_feed_forward_length(2 * embedding)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 2)
    writer.add_rope_dimension_count(embedding // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tokens)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.token_types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.bos_id)
    writer.add_eos_token_id(vocabulary.eos_id)
    writer.add_pad_token_id(vocabulary.pad_id)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(vocabulary.chat_template)


def _tensors(
    draw: np.random.Generator, layers: int, embedding: int, heads: int, tokens: int
) -> Iterator[tuple[str, Array]]:
    """The tensors by name. Their scale makes the output vary from step to step, and its entropy too."""

    def matrix(rows: int, columns: int, gain: float) -> Array:
        return draw.normal(scale=gain / math.sqrt(columns), size=(rows, columns)).astype(np.float32)

    ones = np.ones(embedding, dtype=np.float32)
    kv_rows = embedding // heads * (heads // 2)
    yield "token_embd.weight", matrix(tokens, embedding, gain=math.sqrt(embedding))
    for layer in range(layers):
        yield f"blk.{layer}.attn_norm.weight", ones
        yield f"blk.{layer}.attn_q.weight", matrix(embedding, embedding, gain=2.0)
        yield f"blk.{layer}.attn_k.weight", matrix(kv_rows, embedding, gain=2.0)
        yield f"blk.{layer}.attn_v.weight", matrix(kv_rows, embedding, gain=2.0)
        yield f"blk.{layer}.attn_output.weight", matrix(embedding, embedding, gain=2.0)
        yield f"blk.{layer}.ffn_norm.weight", ones
        yield f"blk.{layer}.ffn_gate.weight", matrix(2 * embedding, embedding, gain=2.0)
        yield f"blk.{layer}.ffn_up.weight", matrix(2 * embedding, embedding, gain=2.0)
        yield f"blk.{layer}.ffn_down.weight", matrix(embedding, 2 * embedding, gain=2.0)
    yield "output_norm.weight", ones
    yield "output.weight", matrix(tokens, embedding, gain=3.0)
