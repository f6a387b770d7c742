# SPDX-License-Identifier: Apache-2.0
"""An answer in the terminal, each token in the colour of the model that made it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from tools.client import Answer, Chunk, Generation

__all__ = ["Painter"]

_STYLES = ("green", "bold magenta", "bold yellow", "bold cyan")
_MARKS = (("", ""), ("«", "»"), ("⟦", "⟧"), ("⟨", "⟩"))
# What a model writes is text for people; a terminal must not obey control characters in it.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Painter:
    """Writes answers to a console.

    models: the deployment's, in its order. Where there is no colour (no terminal, or NO_COLOR is set), the
    tokens of every model but the first stand between marks; further models than there are styles share
    the last one.
    """

    def __init__(self, console: Console, models: Sequence[str]) -> None:
        self.console = console
        self.models = tuple(models)
        self._colored = console.is_terminal and console.color_system is not None and not console.no_color
        self._index = {name: min(i, len(_STYLES) - 1) for i, name in enumerate(models)}
        self._open = 0  # the model whose mark stands open; the first one has none

    def legend(self) -> None:
        """One line that names every model as its tokens will look."""
        self._out("each token is shown by the model that made it: ")
        for name, index in self._index.items():
            before, after = ("", "") if self._colored else _MARKS[index]
            self._out(f"{before}{name}{after}", index)
            self._out("  ")
        self._out("\n")

    def show(self, generation: Generation, answer: Answer) -> None:
        """Writes an answer while it comes and adds it up in `answer`; what breaks it off cancels it.

        Raises GenerationError as iterating over `generation` does.
        """
        try:
            for chunk in generation:
                answer.add(chunk)
                self.write(chunk)
        except BaseException:
            generation.cancel()
            raise
        finally:
            self.end()

    def write(self, chunk: Chunk) -> None:
        """The text of one chunk, whose tokens one model made (the stream has one model a response)."""
        text = chunk.text.translate(_CONTROLS)
        if not text:
            return
        index = self._index.get(chunk.models[0], 0) if chunk.models else self._open
        if not self._colored and index != self._open:
            text = f"{_MARKS[self._open][1]}{_MARKS[index][0]}{text}"
        self._open = index
        self._out(text, index)

    def end(self) -> None:
        """The end of an answer, whole or not."""
        closing = "" if self._colored else _MARKS[self._open][1]
        self._open = 0
        self._out(f"{closing}\n")

    def _out(self, text: str, index: int | None = None) -> None:
        style = Style.parse(_STYLES[index]) if self._colored and index is not None else None
        # as a segment: a Text would have its tabs expanded, from where it begins and not from the line's start
        self.console.print(Segments([Segment(text, style)]), soft_wrap=True)
