# SPDX-License-Identifier: Apache-2.0
"""From what the models said to labels, and where a statement ends."""

from __future__ import annotations

import numpy as np
import pytest

from tools.training.labels import citer_labels, co_llm_labels, mismatches, r2r_labels
from tools.training.statements import next_statement

GOLD = np.array([1, 2, 3, 4, 5])
SLM = np.array([1, 9, 3, 8, 7])
LLM = np.array([1, 2, 9, 4, 9])


def test_mismatches_are_where_the_small_model_would_write_something_else() -> None:
    assert mismatches(GOLD, SLM) == [(1, 9), (3, 8), (4, 7)]


def test_r2r_takes_the_judges_word_and_drops_what_has_no_verdict() -> None:
    assert r2r_labels(GOLD, SLM, {1: 1, 3: 0}).tolist() == [0, 1, 0, 0, -1]
    assert r2r_labels(GOLD, SLM, {1: -1, 3: 1, 4: 0}).tolist() == [0, -1, 0, 1, 0]


def test_citer_has_a_shortcut_and_asks_roll_outs_only_where_neither_model_is_right() -> None:
    assert citer_labels(GOLD, SLM, LLM, {}).tolist() == [0, 1, 0, 1, -1]
    assert citer_labels(GOLD, SLM, LLM, {4: True, 1: True}).tolist() == [0, 1, 0, 1, 0]
    assert citer_labels(GOLD, SLM, LLM, {4: False}).tolist() == [0, 1, 0, 1, 1]


def test_co_llm_defers_where_only_the_large_model_is_right() -> None:
    assert co_llm_labels(GOLD, SLM, LLM).tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ("x = 1\n", "x  =  1   # one\n", True),
        ("x = 'a'\n", 'x = "a"\n', True),
        ("# first\n\nx = 1\n", "x = 1\n", True),
        ("    x = 1\n", "x = 1\n", False),
        ("x = 1\n", "x = 2\n", False),
        ("foo(a,\n", "foo( a,\n", True),  # the begin of a longer statement
    ],
)
def test_lines_of_code_are_the_same_but_for_their_form(text: str, other: str, same: bool) -> None:
    assert (next_statement(text, True, False) == next_statement(other, True, False)) is same


def test_a_statement_must_be_complete() -> None:
    assert next_statement("x = 1", True, ended=False) is None
    assert next_statement("x = 1", True, ended=True) == "x = 1"
    assert next_statement("# only a comment\n", True, ended=False) is None
    assert next_statement("", True, ended=True) == ""


def test_sentences_end_at_a_full_stop_before_a_space_or_at_a_line() -> None:
    assert next_statement("It is 3.5 m. Then", False, False) == "it is 3.5 m."
    assert next_statement("So it  IS\nthen", False, False) == "so it is"
    assert next_statement("It is 3.5", False, False) is None
    assert next_statement("It is 3.5", False, True) == "it is 3.5"
