# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter threshold`: what it prints, and what it says to bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from python_backends.token_router.threshold.profile import StepLatency
from tests.unit.threshold.cases import PAPER
from tools.cli import app
from tools.errors import UserError

ISSUE = "--algorithm r2r --p 0.35 --latency-ms 6.0 27.9 --concurrency 4 --json"
R2R = "--algorithm r2r --p 0.35 --latency-ms 6.0 27.9"
FIGURE_10 = {"1,1": 187.2, "1,2": 195.4, "1,3": 207.9, "1,4": 190.7}


def run(*arguments: str) -> str:
    """What the command prints. Raises UserError as the command does."""
    result = CliRunner().invoke(app, ["threshold", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(line: str, *more: str) -> Any:
    return json.loads(run(*line.split(), *more))


def test_the_line_of_the_issue() -> None:
    out = run_json(ISSUE)
    assert out["best"] == [1, 3]
    assert {b: out["throughput"][b] for b in FIGURE_10} == pytest.approx(FIGURE_10, abs=0.2)
    assert len(out["throughput"]) == 10
    assert set(out["method"].values()) == {"exact"}
    assert set(out["error"].values()) == {0}
    assert out["concurrency"] == 4
    steady = out["steady"]
    assert steady["throughput"] == out["throughput"]["1,3"]
    assert steady["mean_batch"] == pytest.approx([1.959, 3.188], abs=1e-3)
    assert steady["admission_delay_ms"] == pytest.approx([0.10, 9.63], abs=0.01)


def test_several_n_are_an_object_by_n() -> None:
    out = run_json(ISSUE.replace("--concurrency 4", "--concurrency 2 3"))
    assert {n: out[n]["best"] for n in out} == {"2": [1, 2], "3": [1, 2]}


def test_the_table_marks_the_best() -> None:
    lines = run(*R2R.split()).splitlines()
    (marked,) = [line for line in lines if "│ * │" in line]
    assert "1,3" in marked
    assert "208.0" in marked
    assert "+11.1 %" in marked
    assert "* best: B = 1,3, 208.0 tokens/s (14 states, exact)" in lines
    assert any(line.startswith("  llm: 3.19 requests a batch, waits 9.6 ms for it") for line in lines)


def test_a_long_table_shows_the_highest_and_b_1() -> None:
    out = run(*R2R.split(), "--concurrency", "7")
    assert "│ 1,1 " in out
    assert "and 15 lower ones (--json has all)" in out or "and 16 lower ones (--json has all)" in out


def test_what_is_sampled_has_its_error() -> None:
    out = run(*R2R.split(), "--method", "sampled", "--seed", "3")
    assert " ± " in out
    assert "transitions, sampled)" in out


def test_matrices_are_the_algorithms() -> None:
    matrices = ["--matrix-p", "[[0.65, 0.35], [1, 0]]", "--matrix-c", "[[1, 0], [1, 0]]"]
    out = run_json("--latency-ms 6.0 27.9 --json", *matrices)
    assert out == run_json(ISSUE)


def test_a_profiles_file(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    growing = StepLatency(batch_ms={1: 6.0, 4: 9.0}, token_ms=0.1)
    file.write_text(PAPER.model_copy(update={"latency": [growing, growing]}).model_dump_json())
    assert run_json("--json --concurrency 2", str(file))["best"] != [1, 3]
    file.write_text(PAPER.model_dump_json())
    assert run_json("--json", str(file)) == run_json(ISSUE)


def test_an_ensemble_of_three() -> None:
    out = run_json("--algorithm me --weights .5 .3 .2 --latency-ms 6 10 28 --json")
    assert out["best"] == [1, 1, 1]


def test_a_grid_that_changes_step_times_by_more_than_a_percent_is_told() -> None:
    short = "--algorithm r2r --p 0.35 --latency-ms 2.5 12.44"
    warning = "the grid of 2 ms changes a step time by up to 20.0%: T(B) may be as far off"
    assert f"  {warning}\n" in run(*f"{short} --delta-ms 2".split())
    out = run_json(f"{short} --delta-ms 2 --json")
    assert (out["warning"], out["steady"]["rounding"]) == (warning, pytest.approx(0.2))
    assert "the grid" not in run(*short.split())
    out = run_json(f"{short} --json")
    assert (out["warning"], out["steady"]["rounding"]) == (None, pytest.approx(0.04 / 12.44))


def test_the_grid_follows_the_step_times_unless_it_is_given() -> None:
    short = "--algorithm r2r --p 0.35 --latency-ms 0.14 0.9 --json"
    out = run_json(short)
    assert (out["best"], out["steady"]["delta_ms"]) == ([1, 3], 0.02)
    assert out["throughput"]["1,3"] == pytest.approx(7204.0, abs=0.1)
    out = run_json(f"{short} --delta-ms 0.1")
    assert (out["best"], out["steady"]["delta_ms"]) == ([1, 4], 0.1)


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'perf'")
    file = tmp_path / "t.png"
    run(*R2R.split(), "--concurrency", "2", "3", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="--plot: needs matplotlib"):
        run(*R2R.split(), "--plot", str(tmp_path / "t.png"))


P, C = "--matrix-p [[0.65,0.35],[1,0]]", "--matrix-c [[1,0],[1,0]]"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "give a profile's file, or --algorithm"),
        ("--algorithm r3r", "--algorithm: 'r3r' must be one of bild, citer,"),
        ("--algorithm r2r --p 1.5 --latency-ms 6 28", "--p: 1.5 must be from 0 to 1"),
        ("--algorithm r2r --latency-ms 6 28", "--p: not given"),
        ("--algorithm r2r --p 0.3 --latency-ms 6", r"--latency-ms: got \[6.0\]; must be 2 numbers above 0"),
        ("--algorithm r2r --p 0.3 --latency-ms 6 -1", r"--latency-ms: got \[6.0, -1.0\]; must be 2 numbers above 0"),
        (f"{R2R} --concurrency 0", "--concurrency: got 0; allowed: 1 to 1024"),
        (f"{R2R} --concurrency 4 4", r"--concurrency: got \[4, 4\]; must be different"),
        (f"{R2R} --delta-ms 0", "--delta-ms: got 0; must be from 1e-06 to the shortest step, 6"),
        (f"{R2R} --delta-ms nan", "--delta-ms: got nan; must be from 1e-06 to the shortest step, 6"),
        (f"{R2R} --delta-ms 6.1", "--delta-ms: got 6.1; must be from 1e-06 to the shortest step, 6"),
        ("--algorithm r2r --p 0.3 --latency-ms 1 1e300", "delta_ms: 0.1 is too fine a grid for a step of 1e.300 ms"),
        (
            "--algorithm me --weights 1 1 1 1 1 1 1 1 1 --latency-ms 1 1 1 1 1 1 1 1 1",
            "models: 9 of them; the Markov model takes at most 8",
        ),
        (
            "--algorithm me --weights 1 1 1 --latency-ms 1 2 3 --concurrency 1024 --method exact",
            "--method: exact at --concurrency 1024: there are 179481600 feasible B",
        ),
        (f"{R2R} --method guess", "--method: got 'guess'; allowed: auto, exact, sampled"),
        (f"{R2R} --seed -1", "--seed: got -1; must be 0 or more"),
        (f"{R2R} --plot /nowhere/t.png", "--plot: /nowhere/t.png: can't be written"),
        (f"{R2R} --plot /nowhere/t.docx", r"--plot: got /nowhere/t.docx; must end with one of .*\.png"),
        (f"{R2R} --plot /tmp", "--plot: got /tmp; must end with one of"),
        (f"{R2R} {P} {C}", "--algorithm r2r: given beside --matrix-p; allowed: one of them"),
        (f"no-such-file.json {P} {C}", "given beside the profile no-such-file.json; allowed: one of them"),
        ("--server auto --matrix-c [[1]]", "--server: given beside another profile"),
        (f"{P} --latency-ms 6 28", "--matrix-c: not given"),
        (f"{C} --latency-ms 6 28", "--matrix-p: not given"),
        (f"{P} {C} --latency-ms 6", r"--latency-ms: got \[6.0\]; must be 2 numbers above 0"),
        (f"{P} {C} --latency-ms 6 0", r"--latency-ms: got \[6.0, 0.0\]; must be 2 numbers above 0"),
        (f"--matrix-p [[1 {C} --latency-ms 6", r"--matrix-p: got '\[\[1'; must be a JSON list of rows of numbers"),
        (f'--matrix-p [["a"]] {C} --latency-ms 6', "--matrix-p: got .*; must be a JSON list of rows"),
        (f"{P} --matrix-c [] --latency-ms 6 28", r"--matrix-c: got '\[\]'; must be a JSON list of rows"),
        (
            f"--matrix-p [[0.6,0.35],[1,0]] {C} --latency-ms 6 28",
            r"--matrix-p\[0\]: \[0.6, 0.35\] must be probabilities that sum to 1",
        ),
        (f"{P} --matrix-c [[1,0]] --latency-ms 6 28", "--matrix-c: must be 2 x 2"),
        ("no-such-file.json", "no-such-file.json: can't be read"),
    ],
)
def test_bad_input_is_told_with_what_is_allowed(line: str, says: str) -> None:
    if "--plot" in line:
        pytest.importorskip("matplotlib", reason="the extra 'perf'")
    with pytest.raises(UserError, match=says):
        run(*line.split())


def test_a_profile_that_makes_no_tokens_is_compared_with_nothing() -> None:
    out = run(*P.split(), "--matrix-c", "[[0,0],[0,0]]", "--latency-ms", "6", "28", "--concurrency", "2")
    assert "* best: B = 1,1, 0.0 tokens/s" in out
    assert "%" not in out.partition("* best")[0]


def test_a_profile_with_an_error_is_told_where(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(PAPER.model_dump_json().replace('"batch_ms":{"1":6.0}', '"batch_ms":{"1":-6.0}'))
    with pytest.raises(UserError, match=r"latency\[0\]\.batch_ms.*-6.0"):
        run(str(file))
