# SPDX-License-Identifier: Apache-2.0
"""Where a statement of an answer ends, and when two of them say the same. For R2R's labels: its paper compares what
follows two choices up to the end of the sentence; of code, this is the line."""

from __future__ import annotations

import io
import re
import tokenize
from itertools import pairwise

__all__ = ["next_statement"]

_WORD = re.compile(r"\w+|[^\w\s]")
_SENTENCE_END = re.compile(r"[.!?](?=\s)|\n")


def next_statement(text: str, code: bool, ended: bool) -> str | None:
    """The first statement of a text that says something, in its plain form; None = the text isn't at its end yet.

    code: a statement is a line, comments and blank lines say nothing, and spaces and the kind of quotes don't count,
    but the indentation does. Else it is a sentence, and spaces and case don't count.
    ended: no more text will come: what is left counts as a statement, an empty one too.
    """
    if code:
        *lines, last = text.split("\n")
        parts = [*lines, last] if ended else lines
        plain = (_plain_code(line) for line in parts)
    else:
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        cuts = [0, *ends, *([len(text)] if ended else [])]
        plain = (" ".join(text[a:b].lower().split()) for a, b in pairwise(cuts))
    return next((part for part in plain if part), "" if ended else None)


def _plain_code(line: str) -> str:
    """A line as its indentation and its tokens, without its comment; empty where there's no code."""
    words = _WORD.findall(_without_comment(line.strip()).replace('"', "'"))
    indent = line.expandtabs()
    return " " * (len(indent) - len(indent.lstrip())) + " ".join(words) if words else ""


def _without_comment(line: str) -> str:
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type == tokenize.COMMENT:
                return line[: token.start[1]]
    except (tokenize.TokenError, SyntaxError):  # a line of a longer statement, or of a docstring
        pass
    return line
