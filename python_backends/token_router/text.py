# SPDX-License-Identifier: Apache-2.0
"""Committed tokens to text: a character never broken, a stop string never leaked."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["TextStream"]


class TextStream:
    """The text of one request as it grows.

    pieces: the bytes of every token id (empty for special tokens); None = the deployment has no tokenizer.
    stop: strings that end the text; the text ends before the first of them.
    """

    def __init__(self, pieces: Sequence[bytes] | None, stop: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._stop = tuple(stop)
        self._longest = max((len(s) for s in stop), default=0)
        # the decoder keeps the bytes of an unfinished character
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # decoded, but may turn out to begin a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token completes; sets `stopped` when it completes a stop string."""
        if self._pieces is None or self.stopped:
            return ""
        piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
        text = self._decoder.decode(piece)
        return self._release(text) if self._stop else text

    def flush(self) -> str:
        """What is still held, at the end of the request; an unfinished character becomes U+FFFD."""
        if self._pieces is None or self.stopped:
            return ""
        text = self._decoder.decode(b"", final=True)
        text = self._release(text) if self._stop else text
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        held = self._held + text
        found = [(at, s) for s in self._stop if (at := held.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return held[: min(found)[0]]
        keep = self._possible_prefix(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _possible_prefix(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop):
                return size
        return 0
