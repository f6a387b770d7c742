# SPDX-License-Identifier: Apache-2.0
"""In which order a router's calls come: those that are under way together may change places."""

from __future__ import annotations

from collections.abc import Iterable

from python_backends.llm.contract import CALL_NUMBERS, CALLS_AT_ONCE

__all__ = ["CallOrder"]


class CallOrder:
    """The numbers of the calls that have come."""

    def __init__(self) -> None:
        self._newest: int | None = None
        self._missing: set[int] = set()  # calls before the newest that have yet to come
        self._freed: set[int] = set()  # sessions freed while a call was missing that may open them

    def came(self, number: int) -> bool:
        """Note a call. Returns whether none before it is missing, nor came after it."""
        newest = self._newest
        if newest is None:
            self._newest = number
            return True
        ahead = (number - newest) % CALL_NUMBERS
        if 0 < ahead < CALL_NUMBERS // 2:
            between = {(newest + i) % CALL_NUMBERS for i in range(1, min(ahead, CALLS_AT_ONCE))}
            # what is further back has been answered, or was lost on its way
            self._missing = {n for n in self._missing | between if (number - n) % CALL_NUMBERS < CALLS_AT_ONCE}
            self._newest = number
            if not self._missing:
                self._freed.clear()
            return not self._missing
        self._missing.discard(number)
        return False

    def freed(self, sessions: Iterable[int]) -> None:
        """The newest call frees these."""
        if self._missing:
            self._freed.update(sessions)

    def over(self, session: int) -> bool:
        """Whether a session that a late call opens has been freed already: its request has ended."""
        return session in self._freed
