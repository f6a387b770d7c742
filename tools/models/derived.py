# SPDX-License-Identifier: Apache-2.0
"""What is made on this machine from official files: derived weights, and the tokenizer of a family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from python_backends.llm.catalog import (
    FAMILIES,
    Derived,
    WeightsError,
    derived_record,
    record_path,
    tokenizer_path,
    tokenizer_record,
    weights_path,
)
from tools.models.llama import llama_tokenizer, requantize
from tools.models.vocabulary import read_vocabulary, write_tokenizer

__all__ = ["check_tokenizer", "make_tokenizer", "make_weights"]

# Where tokenizers differ: numbers, runs of white space, contractions, scripts, marks, special tokens.
_PROBES = (
    "def area(r):\n\treturn 3.14159 * r ** 2  # 1234567890\r\n\r\n\n",
    "I'll say we've DON'T 'S   trailing   ",
    "naïve café e\u0301\u0323 日本語と中文 한국어 العربية हिन्दी \u00a0\u3000",
    "😀 👩‍👩‍👧 🇩🇪 ½ ² ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> x<|im_end|>",
    "foo_bar__Baz $%^&*()[]{};:'\",.<>/?`~\\ \x00\x7f",
)


def make_weights(entry: Derived) -> None:
    """Make the file of `entry` from its source, which must be there. Raises WeightsError."""
    target = weights_path(entry.name)
    unfinished = target.with_suffix(".unfinished")
    requantize(weights_path(entry.source), unfinished, entry.recipe)
    # In this order no crash leaves a record beside a file that it doesn't describe.
    target.unlink(missing_ok=True)
    _write_record(target, derived_record(entry))
    unfinished.rename(target)


def make_tokenizer(family: str) -> None:
    """Make the tokenizer folder of `family` from an official file, which must be there. Raises WeightsError."""
    weights = weights_path(FAMILIES[family].tokenizer_source)
    folder = tokenizer_path(family)
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    write_tokenizer(read_vocabulary(weights), unfinished)
    check_tokenizer(unfinished, weights)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    _write_record(folder, tokenizer_record(family))


def check_tokenizer(folder: Path, weights: Path) -> None:
    """Raises WeightsError when the tokenizer in `folder` doesn't do what llama.cpp does with `weights`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with llama_tokenizer(weights) as llama_ids:
        for text in _PROBES:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if ids != llama_ids(text) or tokenizer.decode(ids, skip_special_tokens=False) != text:
                raise WeightsError(f"the tokenizer made from {weights.name} differs from llama.cpp's on {text!r}")


def _write_record(path: Path, record: dict[str, object]) -> None:
    record_path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
