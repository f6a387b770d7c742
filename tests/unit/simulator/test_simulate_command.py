# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from python_backends.token_router.threshold.profile import StepLatency
from tests.unit.simulator.profiles import r2r
from tools.cli import main
from tools.commands.profile_options import ProfileOptions, load_profile
from tools.commands.variadic import spread
from tools.errors import UserError

R2R = ("--algorithm", "r2r", "--p", "0.35", "--latency-ms", "6.0", "27.9")
SHORT = (*R2R, "--duration", "20")


def simulate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status."""
    monkeypatch.setattr(sys, "argv", ["tokenrouter", "simulate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert simulate(monkeypatch, *arguments, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_all_policies_beside_the_markov_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = as_json(monkeypatch, capsys, *R2R, "--concurrency", "4", "--duration", "200")
    assert result["models"] == ["slm", "llm"]
    runs = {run["policy"]: run for run in result["runs"]}
    assert list(runs) == ["step-sync", "model-sync", "eager", "delayed"]
    assert runs["eager"]["threshold"] == [1, 1]
    assert runs["eager"]["markov"] == pytest.approx(187.2, abs=0.2)
    assert runs["delayed"]["threshold"] == [1, 3]  # the Markov model's best
    assert runs["delayed"]["markov"] == pytest.approx(207.9, abs=0.2)
    assert runs["step-sync"]["markov"] is None
    for run in runs.values():
        assert run["markov"] is None or run["throughput"] == pytest.approx(run["markov"], rel=0.03)
        assert 0 < run["half_width_95"] < 0.05 * run["throughput"]
        assert run["request_speed"] == pytest.approx(run["throughput"] / 4)
        assert set(run["models"]) == {"slm", "llm"}
    assert runs["delayed"]["throughput"] > max(runs[name]["throughput"] for name in ("step-sync", "eager"))


def test_the_table_names_every_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert simulate(monkeypatch, *SHORT, "--concurrency", "4") == 0
    out = capsys.readouterr().out
    assert "N = 4, 20 s simulated" in out
    assert all(word in out for word in ("step-sync", "model-sync", "eager", "delayed", "1,3", "slm", "llm"))
    assert "…" not in out


def test_one_policy_with_thresholds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*SHORT, "--concurrency", "4", "--policy", "async", "--threshold", "1", "2")
    (run,) = as_json(monkeypatch, capsys, *arguments)["runs"]
    assert (run["policy"], run["threshold"]) == ("delayed", [1, 2])


def test_a_poisson_stream_has_no_n_and_so_no_markov_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (*SHORT, "--rate", "4", "--tokens", "10", "--threshold", "1", "2")
    runs = as_json(monkeypatch, capsys, *arguments)["runs"]
    assert [run["policy"] for run in runs] == ["step-sync", "model-sync", "eager", "delayed"]
    assert all(run["markov"] is None and run["finished"] > 0 and run["latency_s"] > 0 for run in runs)


def test_trace_and_plot_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    trace, plot = tmp_path / "trace.json", tmp_path / "plot.png"
    assert simulate(monkeypatch, *SHORT, "--trace", str(trace), "--plot", str(plot)) == 0
    assert "trace of delayed" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_profile_that_makes_no_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    silent = ("--matrix-p", "[[1]]", "--matrix-c", "[[0]]", "--latency-ms", "5", "--duration", "2")
    assert simulate(monkeypatch, *silent, "--concurrency", "1") == 0
    assert "0.0" in capsys.readouterr().out


@pytest.mark.parametrize("options", [(), ("--no-resume",), ("--prompt-tokens", "9")])
@pytest.mark.parametrize(
    ("token_ms", "free"),
    [((0, 0), "slm and llm have"), ((0, 0.2), "slm has"), ((0.2, 0), "llm has"), ((0.1, 0.2), None)],
)
def test_that_prefill_costs_nothing_is_said(
    token_ms: tuple[float, float],
    free: str | None,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "profile.json"
    latency = [StepLatency(batch_ms={1: ms}, token_ms=t) for ms, t in zip((6.0, 27.9), token_ms, strict=True)]
    path.write_text(r2r(0.35, latency=latency).model_dump_json())
    arguments = (str(path), "--duration", "2", "--policy", "step_sync", *options)
    said = f"{free} no token_ms: there prefill, of prompts and without resume, is free"
    wanted = [said] if free and options else []
    assert as_json(monkeypatch, capsys, *arguments)["notes"] == wanted
    assert simulate(monkeypatch, *arguments) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "prefill" in line] == wanted


def test_short_steps_have_a_markov_value_that_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("--algorithm", "r2r", "--p", "0.35", "--latency-ms", "0.14", "0.9", "--duration", "5")
    result = as_json(monkeypatch, capsys, *short, "--policy", "async")
    (delayed,) = result["runs"]
    assert delayed["threshold"] == [1, 3]  # the Markov model's best
    assert delayed["markov"] == pytest.approx(delayed["throughput"], rel=0.02)
    assert result["notes"] == []


def test_a_grid_that_can_be_no_finer_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    far_apart = ("--algorithm", "r2r", "--p", "0", "--latency-ms", "1.5e-4", "3e8", "--duration", "0.002")
    notes = as_json(monkeypatch, capsys, *far_apart, "--policy", "async", "--threshold", "1", "2")["notes"]
    assert len(notes) == 1
    assert notes[0].startswith("the grid of 0.0005 ms changes a step time by up to 233.3%: T(B)")


def test_a_profiles_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(r2r(0.35).model_dump_json())
    assert load_profile(path) == r2r(0.35)
    by_file = as_json(monkeypatch, capsys, str(path), "--duration", "20")
    assert by_file == as_json(monkeypatch, capsys, *SHORT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a profile's file, or --algorithm, one of bild, citer"),
        (("nowhere.json",), "nowhere.json: can't be read: No such file"),
        (("nowhere.json", "--p", "0.1"), "--p 0.1: given beside the profile nowhere.json"),
        (("--algorithm", "r3r", "--latency-ms", "1", "2"), "--algorithm: 'r3r' must be one of bild, citer"),
        (("--algorithm", "r2r", "--latency-ms", "1", "2"), "--p: not given; r2r needs p"),
        (("--algorithm", "r2r", "--p", "2", "--latency-ms", "1", "2"), "--p: 2.0 must be from 0 to 1"),
        (
            ("--algorithm", "r2r", "--p", ".5", "--latency-ms", "1"),
            "--latency-ms: got [1.0]; must be 2 numbers above 0",
        ),
        (("--algorithm", "r2r", "--p", ".5", "--latency-ms", "1", "0"), "--latency-ms: got [1.0, 0.0]; must be 2"),
        ((*R2R, "--policy", "sync"), "--policy: got 'sync'; allowed: all, async, step_sync, model_sync"),
        (
            (*R2R, "--policy", "step_sync", "--threshold", "1", "1"),
            "--threshold: has no meaning with --policy step_sync",
        ),
        (
            (*R2R, "--policy", "step_sync", "--max-wait-ms", "1"),
            "--max-wait-ms: has no meaning with --policy step_sync",
        ),
        (
            (*R2R, "--policy", "model_sync", "--max-wait-ms", "1"),
            "--max-wait-ms: has no meaning with --policy model_sync; allowed with async and all",
        ),
        ((*R2R, "--threshold", "3"), "--threshold: got [3]; must be 2 numbers of 1 or more"),
        ((*R2R, "--threshold", "3", "3"), "--threshold: [3, 3] must be from 1 to N = 4 each, and the sum of (B - 1)"),
        ((*R2R, "--concurrency", "0"), "--concurrency: got 0; input should be greater than 0"),
        ((*R2R, "--concurrency", "2", "--rate", "1"), "--rate: 1.0 given beside --concurrency 2"),
        ((*R2R, "--rate", "1"), "--tokens: not given"),
        ((*R2R, "--rate", "0", "--tokens", "9"), "--rate: got 0.0; input should be greater than 0"),
        ((*R2R, "--tokens", "0.5"), "--tokens: got 0.5; input should be greater than or equal to 1"),
        ((*R2R, "--duration", "nan"), "--duration: got nan; input should be a finite number"),
        ((*R2R, "--max-wait-ms", "-1"), "--max-wait-ms: got -1.0; input should be greater than 0"),
        ((*R2R, "--concurrency", "0", "--threshold", "1", "1"), "--concurrency: got 0; input should be greater than 0"),
        ((*R2R, "--max-live", "-1", "--threshold", "1", "1"), "--max-live: got -1; input should be greater than 0"),
        ((*R2R, "--concurrency", "5000"), "--concurrency: got 5000; the Markov model's best B is known for 1 to 1024"),
        ((*R2R, "--duration", "1e-8"), "--duration: got 1e-08; must be at least 0.001 more than warm_up_s"),
        ((*R2R, "--duration", "inf"), "--duration: got inf; input should be a finite number"),
        ((*R2R, "--duration", "-1"), "--duration: got -1.0; input should be greater than 0"),
        ((*R2R, "--plot", "p.docx"), "--plot: got p.docx; must end with one of"),
        ((*R2R, "--trace", "/tmp"), "--trace: /tmp: can't be written: it is a folder"),
        ((*R2R, "--trace", "/nowhere/t.json"), "--trace: /nowhere/t.json: can't be written: /nowhere is not a folder"),
        ((*R2R, "--plot", "/nowhere/p.png"), "--plot: /nowhere/p.png: can't be written: /nowhere is not a folder"),
    ],
)
def test_what_is_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert simulate(monkeypatch, *arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"tokenrouter: {message}")
    assert err.count("\n") == 1


def test_a_profile_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_profile(path)
    path.write_text('{"models": ["a"], "p": [[0.5]], "c": [[1]], "latency": [{"batch_ms": {"1": -1}}]}')
    with pytest.raises(UserError, match=r"latency\[0\].batch_ms.1: got -1; input should be greater than 0"):
        load_profile(path)


def test_models_are_named_by_number_when_there_are_more_than_two() -> None:
    profile = ProfileOptions(algorithm="me", weights=[5, 3, 2], latency_ms=[1, 2, 3]).profile()
    assert profile.models == ["model0", "model1", "model2"]
    assert profile.p[0] == pytest.approx([0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--l 1 2 --n 3", "--l 1 --l 2 --n 3"),
        ("--l 1 2 file.json", "--l 1 --l 2 file.json"),
        ("file.json --l 1 -2 1e3 --l 4", "file.json --l 1 --l -2 --l 1e3 --l 4"),
        ("--l --l 1 2", "--l --l 1 --l 2"),
        ("--l=1 2 3", "--l=1 --l 2 --l 3"),
        ("--l=1 file.json 2", "--l=1 file.json 2"),
        ("--n 1 2", "--n 1 2"),
    ],
)
def test_numbers_after_a_list_option_are_its_own(given: str, meant: str) -> None:
    assert list(spread(given.split(), {"--l"})) == meant.split()
