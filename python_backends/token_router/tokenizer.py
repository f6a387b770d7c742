# SPDX-License-Identifier: Apache-2.0
"""The models' common tokenizer: text and conversations to token ids, token ids to bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from routers.registry import cut

__all__ = ["Tokenizer"]


class Tokenizer:
    """A byte-level BPE tokenizer (GPT-2's scheme: Qwen, SmolLM, Llama 3, ...), as transformers loads it.

    pieces: the bytes of every token id; empty for special tokens, which are no text.
    longest_piece: of a token as it is written, a special one's too, in bytes: n tokens never stand for a text of more
        than n times as many.

    Raises ValueError when the folder holds none, or one of another scheme.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"tokenizer: {folder} can't be loaded: {error}") from error
        self.pieces = _pieces(self._hf)
        written = (added.content.encode() for added in self._hf.added_tokens_decoder.values())
        self.longest_piece = max(map(len, (*self.pieces, *written)))

    def encode(self, text: str, rendered: bool = False) -> list[int]:
        """The token ids of a prompt; special tokens written in it count as such. rendered: by `render_chat`, so that
        none is added."""
        ids: list[int] = self._hf(text, add_special_tokens=not rendered)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[dict[str, Any]], begun: str = "") -> list[int]:
        """The token ids of a conversation, and of `begun`, the answer's own beginning. Raises as `render_chat`."""
        return self.encode(self.render_chat(messages) + begun, rendered=True)

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of a conversation under the chat template, up to where the answer begins.

        Raises ValueError when there is no template or it refuses the messages.
        """
        if not self._hf.chat_template:
            raise ValueError("messages: this tokenizer has no chat template; send text_input")
        try:
            text: str = self._hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja raises what the template's author wrote
            raise ValueError(f"messages: the chat template refuses them: {cut(str(error))}") from error
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, special ones left out."""
        return b"".join(self.pieces[i] for i in token_ids if i < len(self.pieces)).decode("utf-8", errors="replace")


def _pieces(tokenizer: Any) -> list[bytes]:
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    kinds = {d["type"] for d in decoder.get("decoders", [decoder]) if "type" in d}
    if "ByteLevel" not in kinds:
        raise ValueError(f"tokenizer: its decoder is {sorted(kinds)}; only byte-level BPE tokenizers are supported")
    byte_of = _byte_of_character()
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        if all(c in byte_of for c in token):
            pieces[i] = bytes(byte_of[c] for c in token)
    for i, added in tokenizer.added_tokens_decoder.items():
        pieces[i] = b"" if added.special else added.content.encode()
    return pieces


def _byte_of_character() -> dict[str, int]:
    """GPT-2's map: bytes that are printable stand for themselves, the others for U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(0x100 + i): b for i, b in enumerate(others)}}
