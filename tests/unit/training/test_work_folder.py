# SPDX-License-Identifier: Apache-2.0
"""What an interruption leaves in the work folder is taken up, and nothing is mixed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from time import sleep

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


def test_minutes_add_up_by_name_however_a_sitting_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr("tools.training.work_folder.monotonic", lambda: now[0])

    def sit(name: str, minutes: int) -> float | None:
        with WorkFolder(tmp_path, OPTIONS).sitting(name) as so_far:
            now[0] += 60 * minutes
            return so_far()

    assert (sit("r2r", 2), sit("citer", 5), sit("r2r", 1)) == (2, 5, 3)
    with pytest.raises(KeyboardInterrupt), WorkFolder(tmp_path, OPTIONS).sitting("r2r"):
        now[0] += 60
        raise KeyboardInterrupt
    assert sit("r2r", 0) == 4


def test_a_sitting_that_is_killed_counts_up_to_what_it_last_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tools.training.work_folder.monotonic", lambda: now[0])
    monkeypatch.setattr("tools.training.work_folder._KEPT_EVERY_S", 0.005)
    killed = tmp_path / "killed"
    with WorkFolder(tmp_path / "work", OPTIONS).sitting("r2r"):
        now[0] = 180
        while json.loads((tmp_path / "work" / "minutes.json").read_text()) != {"r2r": 3}:
            sleep(0.005)
        shutil.copytree(tmp_path / "work", killed, ignore=shutil.ignore_patterns("*.part"))
    with WorkFolder(killed, OPTIONS).sitting("r2r") as so_far:
        assert so_far() == 3


def test_minutes_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    WorkFolder(tmp_path, OPTIONS)
    (tmp_path / "minutes.json").write_text("{")
    with (
        pytest.raises(UserError, match=r"--work: .*minutes.json can't be read"),
        WorkFolder(tmp_path, OPTIONS).sitting("r2r"),
    ):
        pass


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="isn't empty"):
        WorkFolder(tmp_path, OPTIONS)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match=r"--work: .*can't be used"):
        WorkFolder(tmp_path / "thesis.tex", OPTIONS)
