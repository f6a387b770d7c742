# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE vocabulary as GGUF metadata holds it, and as a folder for transformers' AutoTokenizer.

transformers can convert a GGUF file too (`gguf_file=`). Measured against llama.cpp with transformers 5.24 it
splits numbers otherwise for SmolLM2 (it ignores `tokenizer.ggml.pre` there) and saves Qwen2 in a form that
gains a normaliser when it's loaded again; and what it writes depends on its version. So the folder is
written here, from the same metadata that llama.cpp reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backends.llm.catalog import WeightsError
from tools.models.extra import from_extra

__all__ = ["PRE_TOKENIZERS", "TokenType", "Vocabulary", "read_vocabulary", "write_tokenizer"]

# llama.cpp's regular expressions (llama-vocab.cpp), applied one after the other, by `tokenizer.ggml.pre`.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "smollm": (
        r"\p{N}",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    ),
    "qwen2": (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


class TokenType:
    """The values of `tokenizer.ggml.token_type` that a byte-level vocabulary has."""

    NORMAL = 1
    CONTROL = 3  # special: found in a text before BPE, left out of decoded text
    USER_DEFINED = 4  # found in a text before BPE, part of decoded text


@dataclass(frozen=True)
class Vocabulary:
    """tokens: GPT-2's spelling of their bytes, by id. merges: "left right", the first one first.

    token_types: `TokenType` by id. pre: a key of `PRE_TOKENIZERS`. The ids may be None.
    """

    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    pre: str
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unknown_id: int | None
    chat_template: str | None

    def spelling(self, token_id: int | None) -> str | None:
        """The token of that id."""
        return None if token_id is None else self.tokens[token_id]


def read_vocabulary(weights: Path) -> Vocabulary:
    """The vocabulary in the metadata of a GGUF file.

    Raises WeightsError when it's not byte-level BPE, or of a kind that `PRE_TOKENIZERS` doesn't have.
    """
    gguf = from_extra("gguf")
    fields = gguf.GGUFReader(str(weights)).fields

    def value(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    model, pre = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise WeightsError(
            f"{weights.name}: its tokenizer is '{model}' of kind '{pre}'; 'gpt2' of kind"
            f" {' or '.join(sorted(PRE_TOKENIZERS))} can be converted"
        )
    return Vocabulary(
        tokens=value("tokenizer.ggml.tokens"),
        token_types=value("tokenizer.ggml.token_type"),
        merges=value("tokenizer.ggml.merges"),
        pre=pre,
        bos_id=value("tokenizer.ggml.bos_token_id"),
        eos_id=value("tokenizer.ggml.eos_token_id"),
        pad_id=value("tokenizer.ggml.padding_token_id"),
        unknown_id=value("tokenizer.ggml.unknown_token_id"),
        chat_template=value("tokenizer.chat_template"),
    )


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Write `vocabulary` into `folder` as AutoTokenizer.from_pretrained reads it, in any transformers >= 4.45.

    It neither normalises a text nor adds tokens to it, as llama.cpp doesn't: decoding what was encoded
    gives the same text back.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(vocabulary.tokens)},
            merges=[(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[vocabulary.pre]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": vocabulary.spelling(vocabulary.bos_id),
        "eos_token": vocabulary.spelling(vocabulary.eos_id),
        "pad_token": vocabulary.spelling(vocabulary.pad_id),
        "unk_token": vocabulary.spelling(vocabulary.unknown_id),
        "chat_template": vocabulary.chat_template,
    }
    given = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
