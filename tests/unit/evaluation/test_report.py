# SPDX-License-Identifier: Apache-2.0
"""What a sweep writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.unit.evaluation.made import answered
from tools.errors import UserError
from tools.evaluation.query_level import QueryPoint
from tools.evaluation.report import LLM_ONLY, RANDOM, SLM_ONLY, SweepResult, markdown, write_report
from tools.evaluation.summary import PointResult


def point(label: str, group: str, passed: int, share: float) -> PointResult:
    llm = round(share * 100)
    answers = [answered(n, n < passed, slm=100 - llm, llm=llm) for n in range(10)]
    return PointResult.of(answers, {}, ["slm", "llm"], label=label, group=group, router="r", router_params={})


@pytest.fixture
def result() -> SweepResult:
    return SweepResult(
        settings={"task": "humaneval", "questions": 10},
        models=["slm", "llm"],
        points=[
            point(SLM_ONLY, SLM_ONLY, 4, 0),
            point(LLM_ONLY, LLM_ONLY, 8, 1),
            point("rstitch tau=0.1", "rstitch", 7, 0.1),
            point("random p=0.1", RANDOM, 5, 0.1),
        ],
        controls={"rstitch tau=0.1": "random p=0.1"},
        query_entropy=[QueryPoint(to_llm=n, accuracy=0.4 + 0.4 * n, llm_share=float(n)) for n in (0, 1)],
        query_random=[QueryPoint(to_llm=n, accuracy=0.4 + 0.4 * n, llm_share=float(n)) for n in (0, 1)],
    )


def test_a_point_stands_beside_what_it_must_beat(result: SweepResult) -> None:
    (row,) = [line for line in markdown(result).splitlines() if line.startswith("| rstitch")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["rstitch tau=0.1", "7/10", "70.0% (39.7% to 89.2%)", "10.0%"]
    assert cells[5:7] == ["50.0% at 10.0%", "44.0%"]


@pytest.mark.parametrize(("controls", "cell"), [({}, ""), ({"rstitch tau=0.1": None}, "none: one model's tokens only")])
def test_a_point_without_a_control_says_why(result: SweepResult, controls: dict[str, str | None], cell: str) -> None:
    text = markdown(result.model_copy(update={"controls": controls}))
    (row,) = [line for line in text.splitlines() if line.startswith("| rstitch")]
    assert row.split("|")[6].strip() == cell


def test_a_speed_that_is_not_reported_is_an_empty_cell(result: SweepResult) -> None:
    result.points[2].tokens_per_s = None
    (row,) = [line for line in markdown(result).splitlines() if line.startswith("| rstitch")]
    assert row.split("|")[-3].strip() == ""


def test_everything_is_written(result: SweepResult, tmp_path: Path) -> None:
    paths = write_report(result, tmp_path)
    assert [path.name for path in paths] == ["results.json", "results.csv", "results.md", "frontier.png"]
    assert SweepResult.model_validate(json.loads(paths[0].read_text())) == result
    rows = list(csv.DictReader(paths[1].read_text(encoding="utf-8").splitlines()))
    assert [row["label"] for row in rows] == [p.label for p in result.points]
    assert rows[2]["accuracy"] == "0.7"
    assert paths[3].read_bytes().startswith(b"\x89PNG")


def test_one_point_has_no_picture(result: SweepResult, tmp_path: Path) -> None:
    write_report(result.model_copy(update={"points": result.points[:1]}), tmp_path)
    assert not (tmp_path / "frontier.png").exists()


def test_a_picture_that_cannot_be_written_names_the_flag(result: SweepResult, tmp_path: Path) -> None:
    (tmp_path / "frontier.png").mkdir()
    with pytest.raises(UserError, match=r"^--output: .*frontier\.png: can't be written: Is a directory"):
        write_report(result, tmp_path)
