# SPDX-License-Identifier: Apache-2.0
"""What an interruption leaves in the work folder is taken up, and nothing is mixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.errors import UserError
from tools.training.work_folder import WorkFolder

OPTIONS = {"models": ("a", "b"), "seed": 0}


def test_records_come_back(tmp_path: Path) -> None:
    kept = WorkFolder(tmp_path, OPTIONS).records("answers")
    kept.add("one", {"token_ids": [1, 2]})
    kept.add("two", {"token_ids": []})
    again = WorkFolder(tmp_path, OPTIONS).records("answers")
    assert list(again) == ["one", "two"]
    assert again["one"]["token_ids"] == [1, 2] and "three" not in again


@pytest.mark.parametrize("torn", ['{"key": "two", "tok', '{"key": "two"}', "\x00\x00\n", '{"no": "key"}\n', "[1]\n"])
def test_a_line_that_was_cut_off_is_dropped_and_the_next_one_written_in_its_place(tmp_path: Path, torn: str) -> None:
    WorkFolder(tmp_path, OPTIONS).records("answers").add("one", {"n": 1})
    path = tmp_path / "answers.jsonl"
    whole = path.read_text()
    path.write_text(whole + torn)
    kept = WorkFolder(tmp_path, OPTIONS).records("answers")
    assert list(kept) == ["one"]
    kept.add("two", {"n": 2})
    assert list(WorkFolder(tmp_path, OPTIONS).records("answers")) == ["one", "two"]


def test_arrays_come_back_and_half_of_them_do_not_count(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path, OPTIONS)
    folder.save_arrays("slm-answers", "a.b:c/d", {"x": np.arange(3)})
    assert folder.has_arrays("slm-answers", "a.b:c/d")
    assert folder.load_arrays("slm-answers", "a.b:c/d")["x"].tolist() == [0, 1, 2]
    (tmp_path / "slm-answers" / "other.part").write_bytes(b"half")
    assert not folder.has_arrays("slm-answers", "other")


def test_other_options_are_refused_by_name(tmp_path: Path) -> None:
    WorkFolder(tmp_path, OPTIONS)
    with pytest.raises(UserError, match=r"was begun with seed = 0, not 1"):
        WorkFolder(tmp_path, {**OPTIONS, "seed": 1})
    WorkFolder(tmp_path, OPTIONS)


def test_one_training_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with (
            WorkFolder(tmp_path, OPTIONS).alone(),
            pytest.raises(UserError, match=r"--work: another .* works in"),
            WorkFolder(tmp_path, OPTIONS).alone(),
        ):
            pass


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="isn't empty"):
        WorkFolder(tmp_path, OPTIONS)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match=r"--work: .*can't be used"):
        WorkFolder(tmp_path / "thesis.tex", OPTIONS)
