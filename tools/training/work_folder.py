# SPDX-License-Identifier: Apache-2.0
"""The folder that a training run works in: what is finished in it is never done again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tools.alone import alone
from tools.errors import UserError

__all__ = ["Checkpoint", "Records", "WorkFolder"]

_OPTIONS = "options.json"
_MINUTES = "minutes.json"
_KEPT_EVERY_S = 10.0  # so much of a sitting that is killed isn't counted, at most


class Records:
    """One JSONL file: a record, a JSON object, for each key. Written line by line; a line that an interruption cut off
    is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, dict[str, Any]] = {}
        sound = 0
        with suppress(FileNotFoundError), path.open("rb") as file:
            for line in file:
                with suppress(ValueError, LookupError, TypeError):
                    if line.endswith(b"\n"):
                        record = json.loads(line)
                        self._records[record["key"]] = record
                        sound += len(line)
                        continue
                break
        if path.exists() and sound < path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(sound)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._records[key]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Write the record of a key that has none yet."""
        whole = {"key": key, **record}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole, ensure_ascii=False) + "\n")
        self._records[key] = whole


class Checkpoint:
    """The state of a fit between two epochs, in one file. depends_on: a state saved with others is not taken up."""

    def __init__(self, path: Path, depends_on: Mapping[str, Any]) -> None:
        self._path = path
        self._depends_on = json.dumps(depends_on, sort_keys=True)

    def load(self) -> dict[str, Any] | None:
        """What was saved last; None = nothing."""
        if not self._path.exists():
            return None
        found: dict[str, Any] = torch.load(self._path, weights_only=True)
        return found if found["depends_on"] == self._depends_on else None

    def save(self, state: Mapping[str, Any]) -> None:
        part = self._path.with_suffix(".part")
        torch.save({**state, "depends_on": self._depends_on}, part)
        part.replace(self._path)


class WorkFolder:
    """See the module. options: what everything in the folder depends on; a folder of other options is refused.

    Raises UserError naming the first option that differs, or when the folder can't be used.
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        wanted: dict[str, Any] = json.loads(json.dumps(options))
        try:
            path.mkdir(parents=True, exist_ok=True)
            found = json.loads((path / _OPTIONS).read_text(encoding="utf-8")) if (path / _OPTIONS).exists() else None
            if found is None:
                if any(path.iterdir()):
                    raise UserError(f"--work: {path} is no folder of `tokenrouter train`, and isn't empty")
                (path / _OPTIONS).write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
                (path / _MINUTES).write_text("{}\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"--work: {path} can't be used: {error}") from error
        if found is not None and found != wanted:
            name = next(n for n in [*wanted, *found] if wanted.get(n) != found.get(n))
            raise UserError(
                f"--work: {path} was begun with {name} = {found.get(name)!r}, not {wanted.get(name)!r}; give those"
                " options, or another folder"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While it is worked in. Raises UserError when another process does so."""
        refused = f"--work: another `tokenrouter train` works in {self.path}; wait for its end"
        with alone(self.path / _OPTIONS, refused):
            yield

    @contextmanager
    def sitting(self, name: str) -> Iterator[Callable[[], float]]:
        """While something of that name is worked at. Gives what says how many minutes that has taken so far, in this
        sitting and all before it, however they ended. Raises UserError when those before it can't be read."""
        path = self.path / _MINUTES
        try:
            earlier: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"--work: {path} can't be read: {error}") from error
        began, over = monotonic(), threading.Event()

        def minutes() -> float:
            return earlier.get(name, 0.0) + (monotonic() - began) / 60

        def keep() -> None:
            with suppress(OSError):  # a full disk is told where the work is written
                part = path.with_suffix(".part")
                part.write_text(json.dumps({**earlier, name: minutes()}) + "\n", encoding="utf-8")
                part.replace(path)

        def keep_now_and_then() -> None:
            while not over.wait(_KEPT_EVERY_S):
                keep()

        keeper = threading.Thread(target=keep_now_and_then, daemon=True)
        keeper.start()
        try:
            yield minutes
        finally:
            over.set()
            keeper.join()
            keep()

    def records(self, name: str) -> Records:
        """The records of a stage."""
        return Records(self.path / f"{name}.jsonl")

    def write_json(self, name: str, value: Any) -> None:
        (self.path / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    def checkpoint(self, name: str, depends_on: Mapping[str, Any]) -> Checkpoint:
        """Of the fit of that name."""
        return Checkpoint(self.path / f"fit-{name}.pt", depends_on)

    def has_arrays(self, stage: str, key: str) -> bool:
        return self._arrays(stage, key).exists()

    def save_arrays(self, stage: str, key: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the arrays of a key of a stage; an interruption leaves no half of it."""
        path = self._arrays(stage, key)
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.replace(path)

    def load_arrays(self, stage: str, key: str) -> dict[str, NDArray[Any]]:
        with np.load(self._arrays(stage, key)) as arrays:
            return dict(arrays)

    def _arrays(self, stage: str, key: str) -> Path:
        return self.path / stage / f"{key.replace(':', '-').replace('/', '-')}.npz"
