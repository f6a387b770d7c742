# SPDX-License-Identifier: Apache-2.0
"""How far the answers to one setting have come, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tools.evaluation.answers import Answered

__all__ = ["Bar"]


class Bar:
    """One setting. so_far: answers that an earlier run has left."""

    def __init__(self, console: Console, label: str, total: int, so_far: Sequence[Answered]) -> None:
        self._console = console
        self._label = label
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(label, total=total, completed=len(so_far))
        self._done = len(so_far)
        self._passed = sum(a.passed for a in so_far)
        self._judged = bool(so_far)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()
        if self._judged:
            self._console.print(f"{self._label}: {self._passed} of {self._done} solved", markup=False)

    def answered(self, answer: Answered) -> None:
        """One more."""
        self._judged = True
        self._done += 1
        self._passed += answer.passed
        self._progress.update(self._task, completed=self._done, description=f"{self._label}: {self._passed} solved")

    def advance(self) -> None:
        """One more, of something that isn't judged."""
        self._done += 1
        self._progress.update(self._task, completed=self._done)
