# SPDX-License-Identifier: Apache-2.0
"""The trace follows the documented trace-event format, as Perfetto reads it, and says what happened.

Perfetto's own parser isn't run: its Python package downloads it. What it refuses or drops is checked instead.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.simulator.profiles import ALWAYS, r2r, simulation
from tools.simulator.trace import ChromeTrace

Event = dict[str, Any]
PREFILLS = [{"batch_ms": {1: 6}, "token_ms": 0.1}, {"batch_ms": {1: 27}, "token_ms": 0.2}]


def trace(tmp_path: Path, start_s: float = 0.0, end_s: float = 2.0, **config: Any) -> list[Event]:
    """The events of a run of 3 s, read back from the file."""
    batching = {"threshold": [1, 2]}
    more = {"latency": config.pop("latency")} if "latency" in config else {}
    sim = simulation(r2r(config.pop("p", 0.35), **more), batching, **{"warm_up_s": 0.0, "duration_s": 3.0} | config)
    chrome = ChromeTrace(sim, start_s, end_s)
    sim.observe(chrome)
    sim.run()
    path = tmp_path / "trace.json"
    chrome.write(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    assert isinstance(events, list)
    return events


def names(events: list[Event]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def _ns(us: Any) -> int:
    """A time as Perfetto's importer reads it: µs, times 1000, cut to whole ns."""
    assert isinstance(us, (int, float)) and not isinstance(us, bool) and us >= 0
    return int(us * 1000)


def _dropped(slices: list[tuple[int, int]]) -> int:
    """How many slices (from, until) of one track Perfetto leaves out: those that neither follow the ones before nor lie
    within them."""
    dropped = 0
    around: list[int] = []
    for since, until in sorted(slices, key=lambda s: (s[0], -s[1])):
        while around and around[-1] <= since:
            around.pop()
        if around and until > around[-1]:
            dropped += 1
        else:
            around.append(until)
    return dropped


def test_what_perfetto_would_drop() -> None:
    assert _dropped([(0, 10), (10, 20), (12, 15), (20, 30)]) == 0
    assert _dropped([(0, 10), (9, 20), (20, 30)]) == 1


CONFIGS = pytest.mark.parametrize(
    "config",
    [
        {"concurrency": 4},
        {"concurrency": 3, "lengths": {"kind": "geometric", "mean": 5}},
        {"rate_per_s": 10, "lengths": {"kind": "constant", "mean": 20}, "max_live": 4},
        {"concurrency": 2, "start_s": 0.5, "end_s": 0.8},
        {"concurrency": 3, "lengths": {"kind": "constant", "mean": 4}, "prompt_tokens": 600, "latency": PREFILLS},
        {"concurrency": 8, "latency": [{"batch_ms": {1: 6.0123457}}, {"batch_ms": {1: 27.8999999}}]},
    ],
)


@CONFIGS
def test_perfetto_reads_all_of_it(tmp_path: Path, config: dict[str, Any]) -> None:
    """Names, and times of the kind that each phase needs; and no slice that would be left out."""
    events = trace(tmp_path, **config)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        assert event["ph"] in ("M", "X", "C")
        assert isinstance(event["name"], str) and event["name"]
        assert all(isinstance(event[key], int) and 0 <= event[key] < 2**32 for key in ("pid", "tid"))
        assert isinstance(event["args"], dict)
        begin = _ns(event["ts"])
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((begin, begin + _ns(event["dur"])))
        elif event["ph"] == "C":
            assert all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in event["args"].values())
        elif event["name"] in ("process_name", "thread_name"):
            assert isinstance(event["args"]["name"], str) and event["args"]["name"]
    assert sum(_dropped(slices) for slices in tracks.values()) == 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) <= named


@CONFIGS
def test_structure(tmp_path: Path, config: dict[str, Any]) -> None:
    events = trace(tmp_path, **config)
    start, end = config.get("start_s", 0.0) * 1e6, config.get("end_s", 2.0) * 1e6
    named = names(events)
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in ("M", "X", "C")
        assert isinstance(event["name"], str) and event["pid"] == 1 and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["tid"] in named and event["dur"] > 0
            assert start <= event["ts"] and event["ts"] + event["dur"] <= end + 1e-3
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert start <= event["ts"] < end and event["args"]["requests"] >= 0
    assert len(set(named.values())) == len(named)
    for slices in tracks.values():
        slices.sort()
        assert all(begins >= ended - 1e-3 for (_, ended), (begins, _) in itertools.pairwise(slices))


def test_contents(tmp_path: Path) -> None:
    """Two requests, always delegated: 6 ms at the SLM, 27.9 at the LLM."""
    events = trace(tmp_path, concurrency=2, end_s=0.04, p=ALWAYS)
    named = names(events)
    slices = [(named[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert [s for s in slices if s[0].startswith("model")] == [
        ("model slm", "batch of 2", 0, 6000),
        ("model llm", "batch of 2", 6000, 27900),
        ("model slm", "batch of 2", 33900, 6000),
        ("model llm", "batch of 2", 39900, 100),
    ]
    assert [s[1:] for s in slices if s[0] == "request 1 on slm"] == [
        ("running", 0, 6000),
        ("pending", 6000, 27900),
        ("running", 33900, 6000),
        ("pending", 39900, 100),
    ]
    batches = [e["args"] for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert batches[0] == {"sessions": 2, "N": 2, "B": 1, "rids": [0, 1], "tokens": 2}
    assert [e["args"]["B"] for e in events if e["ph"] == "X" and e["tid"] == 2] == [2, 2]
    waiting = [(e["name"], e["ts"], e["args"]["requests"]) for e in events if e["ph"] == "C"]
    assert waiting[:3] == [("waiting for slm", 0, 1), ("waiting for slm", 0, 2), ("waiting for slm", 0, 0)]


def test_nobody_waits_in_the_end_whose_request_has_ended(tmp_path: Path) -> None:
    """A request makes its one token while the LLM is still at prompts of former ones: its own no longer waits there."""
    latency = [{"batch_ms": {1: 1}, "token_ms": 0.5}, {"batch_ms": {1: 10}, "token_ms": 20}]
    ends = {"kind": "constant", "mean": 1}
    events = trace(tmp_path, concurrency=1, p=0.0, prompt_tokens=3, lengths=ends, latency=latency)
    waiting = [e["args"]["requests"] for e in events if e["ph"] == "C" and e["name"] == "waiting for llm"]
    assert set(waiting) == {0, 1}
