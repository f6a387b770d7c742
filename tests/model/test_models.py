# SPDX-License-Identifier: Apache-2.0
"""The real SmolLM2 family: fetched if absent, then checked against llama.cpp."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from python_backends.llm.catalog import CATALOG, Official, locate_tokenizer, locate_weights
from tools.models import fetch
from tools.models.llama import llama_tokenizer

pytestmark = pytest.mark.model

TEXTS = (
    "",
    "def mean(xs: list[float]) -> float:\n\treturn sum(xs) / len(xs)  # 1234567890\r\n",
    "   leading, trailing   \n\n\n  ",
    "I'll we've DON'T it's 'S",
    "naïve café e\u0301\u0323 \u00a0\u3000 ﬁ",
    "日本語と中文 한국어 العربية हिन्दी",
    "😀👩‍👩‍👧 🇩🇪 ½ ² ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "foo_bar__Baz $%^&*()[]{};:'\",.<>/?`~\\ \x00\x7f",
)


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    fetch("smollm2")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(locate_tokenizer("smollm2"))


def test_the_official_file_is_itself() -> None:
    entry = CATALOG["smollm2-135m-q4_1"]
    assert isinstance(entry, Official)
    assert hashlib.sha256(locate_weights(entry.name).read_bytes()).hexdigest() == entry.sha256


@pytest.mark.parametrize("name", ["smollm2-135m-q4_0", "smollm2-135m-q8_0"])
def test_the_tokenizer_is_llama_cpps(tokenizer: Any, name: str) -> None:
    with llama_tokenizer(locate_weights(name)) as llama_ids:
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert ids == llama_ids(text)
            assert tokenizer.decode(ids) == text


def test_the_chat_template_renders(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token_id == tokenizer.encode("<|im_end|>")[0]


def test_derived_weights_have_the_types_of_their_recipe() -> None:
    sizes = {name: Path(locate_weights(name)).stat().st_size for name in ("smollm2-135m-q4_0", "smollm2-135m-q8_0")}
    assert sizes["smollm2-135m-q8_0"] / sizes["smollm2-135m-q4_0"] == pytest.approx(8.5 / 4.5, rel=0.02)
