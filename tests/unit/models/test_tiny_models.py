# SPDX-License-Identifier: Apache-2.0
"""The tiny models do what tests need of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import llama_cpp
import numpy as np
import pytest
from transformers import AutoTokenizer

from tools.models.llama import llama_tokenizer
from tools.tiny_models import ensure_tiny_models, make_tiny_gguf, tiny_vocabulary

TEXTS = (
    "def area(the):\n    return 3.12 == 159  # é 日本語 😀\n\n",
    "<|im_start|>user\nI'll <|im_end|>\n",
    "\x00\x7f\u00a0 e\u0301 ½²",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return ensure_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("model", ["slm", "llm"])
def test_llama_cpp_and_transformers_tokenise_alike(tiny: dict[str, Path], model: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny["tokenizer"])
    ids = tokenizer.encode(text)
    with llama_tokenizer(tiny[model]) as llama_ids:
        assert llama_ids(text) == ids
    assert tokenizer.decode(ids) == text


def test_the_vocabulary_splits_characters_and_has_its_special_tokens(tiny: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny["tokenizer"])
    assert len(tokenizer.encode("é")) == 1
    assert len(tokenizer.encode("本")) == 2
    assert len(tokenizer.encode("😀")) == 3
    assert len(tokenizer) == len(tiny_vocabulary().tokens)
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(prompt), skip_special_tokens=True) == "user\nhi\nassistant\n"


@pytest.mark.parametrize("quantization", ["q8_0", "q4_0"])
def test_greedy_output_varies_and_depends_on_the_seed(tmp_path: Path, quantization: Literal["q8_0", "q4_0"]) -> None:
    """An output of few tokens, or one alike for all seeds, would hide lost and doubled tokens in tests."""
    outputs = []
    for seed in (1, 2):
        path = tmp_path / f"{seed}.gguf"
        make_tiny_gguf(path, seed=seed, quantization=quantization)
        model = llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, logits_all=True, verbose=False)
        model.eval(model.tokenize(b"def f(x):", special=True))
        output, entropies = [], []
        for _ in range(48):
            logits = model.scores[model.n_tokens - 1].astype(np.float64)
            probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            entropies.append(-(probabilities * np.log(probabilities + 1e-30)).sum() / np.log(len(logits)))
            output.append(int(logits.argmax()))
            model.eval(output[-1:])
        model.close()
        assert len(set(output)) > 24
        assert np.quantile(entropies, 0.9) - np.quantile(entropies, 0.1) > 0.1
        outputs.append(output)
    assert outputs[0] != outputs[1]


def test_the_same_arguments_make_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_tiny_gguf(tmp_path / f"{name}.gguf", seed=3)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize(("embedding", "heads"), [(48, 4), (96, 5)])
def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, embedding: int, heads: int) -> None:
    with pytest.raises(ValueError, match=f"embedding is {embedding}; it must be a multiple of 32 and of"):
        make_tiny_gguf(tmp_path / "a.gguf", seed=1, embedding=embedding, heads=heads)
