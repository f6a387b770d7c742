# SPDX-License-Identifier: Apache-2.0
"""The file of answers: it goes on where it was, and never mixes settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.evaluation.made import answered
from tools.errors import UserError
from tools.evaluation.answers import AnswerFile, Traffic

SETTINGS = {"router": "rstitch", "params": {"tau": 0.05}}
TRAFFIC = Traffic(sitting=0, outcomes=[[9, 1], [1, 0]], tokens=[[9, 0], [1, 0]], given=None)


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first = AnswerFile(path, SETTINGS)
    first.add(answered(1, slm=3))
    first.add(TRAFFIC)
    again = AnswerFile(path, SETTINGS)
    assert again.answers == {"q/1": answered(1, slm=3)}
    assert again.traffic == {0: TRAFFIC}
    assert (first.sitting, again.sitting) == (0, 1)
    again.add(answered(0, slm=2, sitting=1))
    assert [a.id for a in AnswerFile(path, SETTINGS).of(["q/0", "q/1", "q/2"])] == ["q/0", "q/1"]


def test_the_last_counts_of_each_sitting_stand(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    last = TRAFFIC.model_copy(update={"outcomes": [[19, 1], [1, 0]]})
    second = TRAFFIC.model_copy(update={"sitting": 1})
    for sitting in ([TRAFFIC, last], [second]):
        file = AnswerFile(path, SETTINGS)
        assert file.sitting == sitting[0].sitting  # one whose questions all failed was one, too
        for line in sitting:
            file.add(line)
    assert file.traffic == AnswerFile(path, SETTINGS).traffic == {0: last, 1: second}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            1,
            r"is of format 1, by another version .*counts of whole sittings only.*; this version reads format 2",
        ),
        (3, r"a.jsonl: is of format 3, by another version of tokenrouter; this version reads format 2: give another"),
    ],
)
def test_a_file_of_another_format_is_told_as_that(tmp_path: Path, form: int, message: str) -> None:
    path = tmp_path / "a.jsonl"
    content = json.dumps({"settings": {"format": form, **SETTINGS}}) + '\n{"answer": {"of": "another"}}\n'
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        AnswerFile(path, SETTINGS)
    assert path.read_text() == content


def test_a_line_that_a_crash_cut_off_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = AnswerFile(path, SETTINGS)
    file.add(answered(1))
    whole = path.read_bytes()
    file.add(answered(2))
    path.write_bytes(path.read_bytes()[:-20])
    again = AnswerFile(path, SETTINGS)
    assert set(again.answers) == {"q/1"}
    assert path.read_bytes() == whole
    again.add(answered(3))
    assert set(AnswerFile(path, SETTINGS).answers) == {"q/1", "q/3"}


def test_answers_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    AnswerFile(path, SETTINGS)
    with pytest.raises(UserError, match=r"holds answers with params = \{'tau': 0.05\}, now it is \{'tau': 0.1\}"):
        AnswerFile(path, {**SETTINGS, "params": {"tau": 0.1}})
    with pytest.raises(UserError, match=r"seed = None, now it is 1"):
        AnswerFile(path, {**SETTINGS, "seed": 1})


@pytest.mark.parametrize(
    "content",
    [
        "notes\n",
        "{}\n",
        '{"settings": 3}\n',
        "[1]",
        '{"settings": {}}\n',
        '{"settings": {"format": 2}}\n{"answer": {"id": "x"}}\n',
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="holds no answers of tokenrouter eval"):
        AnswerFile(path, {})
    assert path.read_text() == content


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read or written"):
        AnswerFile(tmp_path / "missing" / "a.jsonl", SETTINGS)
