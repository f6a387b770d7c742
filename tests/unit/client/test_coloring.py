# SPDX-License-Identifier: Apache-2.0
"""How an answer looks in a terminal and in a file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tools.client import Chunk
from tools.coloring import Painter

MODELS = ("slm", "llm")


def chunk(text: str, model: str | None) -> Chunk:
    return Chunk(text, (1,) if model else (), (model,) if model else (), (), "", {}, 0.0)


def painted(chunks: list[Chunk], terminal: bool, color: bool = True) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, color_system="standard", no_color=not color, width=20, _environ={}
    )
    painter = Painter(console, MODELS)
    for each in chunks:
        painter.write(each)
    painter.end()
    return out.getvalue()


ANSWER = [chunk("def ", "slm"), chunk("fib", "llm"), chunk("(n)", "llm"), chunk(":\n\treturn", "slm")]


@pytest.mark.parametrize(("terminal", "color"), [(False, True), (True, False)])
def test_without_colour_the_second_models_runs_stand_between_marks(terminal: bool, color: bool) -> None:
    assert painted(ANSWER, terminal, color) == "def «fib(n)»:\n\treturn\n"


def test_a_mark_left_open_is_closed_at_the_end() -> None:
    assert painted(ANSWER[:2], terminal=False) == "def «fib»\n"


def test_on_a_terminal_each_model_has_its_colour() -> None:
    text = painted(ANSWER[:2], terminal=True)
    assert text == "\x1b[32mdef \x1b[0m\x1b[1;35mfib\x1b[0m\n"


def test_text_without_tokens_belongs_to_the_model_before_it() -> None:
    assert painted([chunk("a", "llm"), chunk("é", None)], terminal=False) == "«aé»\n"


def test_control_characters_of_a_model_never_reach_the_terminal() -> None:
    assert painted([chunk("a\x1b[2J\x07\x9bb\r", "slm")], terminal=False) == "a[2Jb\n"


def test_long_lines_and_markup_stay_as_they_are() -> None:
    text = "x[bold] :smile: " * 5
    assert painted([chunk(text, "slm")], terminal=False) == text + "\n"
