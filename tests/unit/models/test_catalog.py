# SPDX-License-Identifier: Apache-2.0
"""Where weights are looked for, and what is said when they are not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from python_backends.llm.catalog import (
    CATALOG,
    FAMILIES,
    Derived,
    Official,
    WeightsError,
    cache_root,
    locate_tokenizer,
    locate_weights,
    weights_path,
)


def test_the_catalogue_is_closed() -> None:
    """Every name that an entry refers to leads somewhere, and within its family."""
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert entry.family in FAMILIES
        if isinstance(entry, Derived):
            source = CATALOG[entry.source]
            assert isinstance(source, Official)
            assert source.family == entry.family
        else:
            assert re.fullmatch("[0-9a-f]{64}", entry.sha256)
    for family in FAMILIES.values():
        assert CATALOG[family.tokenizer_source].family == family.name


@pytest.mark.parametrize(
    ("locate", "name", "message"),
    [
        (locate_weights, "smollm2-135m-q4_0", "run `tokenrouter models fetch smollm2-135m-q4_0`"),
        (locate_weights, "smollm3", "neither a .gguf file nor one of: qwen2.5-coder-0.5b-q4_0, "),
        (locate_weights, "/no/such/file.gguf", "'/no/such/file.gguf': no such file"),
        (locate_tokenizer, "smollm2", "run `tokenrouter models fetch smollm2`"),
        (locate_tokenizer, "smollm2-135m-q8_0", "run `tokenrouter models fetch smollm2`"),
        (locate_tokenizer, "gpt2", "neither a folder nor one of: qwen2.5-coder, "),
        (locate_tokenizer, "/", "the folder has no tokenizer_config.json"),
    ],
)
def test_what_is_not_there_is_one_line_that_helps(
    cache: Path, locate: Callable[[str], Path], name: str, message: str
) -> None:
    with pytest.raises(WeightsError) as caught:
        locate(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_lead_to_themselves(tmp_path: Path) -> None:
    weights = tmp_path / "mine.gguf"
    weights.touch()
    (tmp_path / "tokenizer_config.json").touch()
    assert locate_weights(str(weights)) == weights
    assert locate_tokenizer(str(tmp_path)) == tmp_path


def test_an_official_file_cut_short_is_not_there(cache: Path) -> None:
    cache.mkdir(parents=True)
    weights_path("smollm2-135m-q4_1").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match="not on this machine"):
        locate_weights("smollm2-135m-q4_1")


@pytest.mark.parametrize(("xdg", "expected"), [("/x", "/x"), ("", "/home/someone/.cache")])
def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, xdg: str, expected: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == Path(expected) / "tokenrouter" / "models"
