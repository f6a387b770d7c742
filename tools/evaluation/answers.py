# SPDX-License-Identifier: Apache-2.0
"""The answers of one setting on disk: a JSON line for each, added as they come, so that a run can be taken up again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tools.errors import UserError

__all__ = ["AnswerFile", "Answered", "Traffic"]

_FORMAT = 2


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Answered(_Line):
    """One answer. ids: its tokens. by_model: how many each model made. handoffs: from model to model.

    sitting: of the run, counted from 0: a run that is taken up again has several. sent_s, ended_s: from the begin of
    the sitting.
    """

    id: str
    passed: bool
    verdict: str
    detail: str
    text: str
    ids: list[int]
    by_model: dict[str, int]
    last_model: str
    handoffs: int
    finish_reason: str
    sitting: int
    sent_s: float
    ended_s: float


class Traffic(_Line):
    """What the server has counted since a sitting began, from -> to: steps by where they led, and the tokens that they
    committed.

    given: P as the server would have given it to the Markov model, read whenever an answer came; the mean so far, each
    reading by the steps since the one before it. None where the server had too little traffic at each of them.
    """

    sitting: int
    outcomes: list[list[int]]
    tokens: list[list[int]]
    given: list[list[float]] | None


class AnswerFile:
    """The file of one setting.

    settings: what the answers depend on. A file that is there already goes on, if it is of the same settings; a last
    line that was cut off by a crash is dropped. Raises UserError when it is of other settings or no such file.
    answers: by question. traffic: by sitting, the last that was written of it: one that was interrupted has what had
    been counted by its last answer.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._lock = Lock()
        self.answers: dict[str, Answered] = {}
        self.traffic: dict[int, Traffic] = {}
        settings = json.loads(json.dumps({"format": _FORMAT, **settings}))
        try:
            if path.exists() and path.stat().st_size:
                self._read(settings)
            else:
                path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: can't be read or written: {error.strerror}") from error
        self.sitting = 1 + max([*(a.sitting for a in self.answers.values()), *self.traffic], default=-1)

    def add(self, line: Answered | Traffic) -> None:
        """On disk before it returns. Any thread may call it. Raises UserError."""
        with self._lock:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    kind = "answer" if isinstance(line, Answered) else "traffic"
                    file.write(json.dumps({kind: line.model_dump()}) + "\n")
            except OSError as error:
                raise UserError(f"{self._path}: can't be written: {error.strerror}") from error
            self._take(line)

    def of(self, ids: Sequence[str]) -> list[Answered]:
        """The answers to these questions, in their order, as far as they are there."""
        return [self.answers[i] for i in ids if i in self.answers]

    def _take(self, line: Answered | Traffic) -> None:
        if isinstance(line, Answered):
            self.answers[line.id] = line
        else:
            self.traffic[line.sitting] = line

    def _read(self, settings: Mapping[str, Any]) -> None:
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            first, *lines = [json.loads(line) for line in whole.splitlines()]
            found = dict(first["settings"])
            if (has := found["format"]) == _FORMAT:
                for line in lines:
                    self._take(Answered(**line["answer"]) if "answer" in line else Traffic(**line["traffic"]))
        except (ValueError, KeyError, TypeError, ValidationError):
            raise UserError(f"{self._path}: is there, and holds no answers of tokenrouter eval") from None
        if has != _FORMAT:
            why = "; it has the server's counts of whole sittings only, and what was given at their end" * (has == 1)
            raise UserError(
                f"{self._path}: is of format {has!r}, by another version of tokenrouter{why}; this version reads format"
                f" {_FORMAT}: give another --output, or remove the file"
            )
        for key in {**settings, **found}:
            if settings.get(key) != found.get(key):
                raise UserError(
                    f"{self._path}: holds answers with {key} = {found.get(key)!r}, now it is {settings.get(key)!r};"
                    " give another --output, or remove the file"
                )
        if len(whole) < len(data):
            self._path.write_bytes(whole)
