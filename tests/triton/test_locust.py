# SPDX-License-Identifier: Apache-2.0
"""`locust -f perf/locustfile.py` as a person starts it, on a real server."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.triton.servers import assert_clean_and_serving, paced_deployment, wait_until
from tools.supervisor import RunningServer, running_server

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[2]
LOCUST = Path(sys.executable).with_name("locust")
PNG = b"\x89PNG\r\n\x1a\n"
END_S = 30.0
FILES = {
    *("stats", "stats_history", "failures", "exceptions"),  # Locust's
    *("summary", "timeline", "requests", "load"),  # ours
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(paced_deployment((1.0, 3.0), limits={"max_live": 64, "max_queue": 256})) as server:
        yield server


def locust(server: RunningServer, *arguments: str | Path) -> subprocess.Popen[str]:
    urls = ("--grpc-url", server.grpc_url, "--http-url", server.http_url)
    return subprocess.Popen(
        [LOCUST, "-f", "perf/locustfile.py", "--headless", "--only-summary", *urls, *arguments],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def output(process: subprocess.Popen[str], code: int) -> str:
    """What it printed, once it has ended with `code`."""
    with process:
        try:
            shown, _ = process.communicate(timeout=END_S)
        finally:
            process.kill()
    assert process.returncode == code, shown
    assert "Traceback" not in shown, shown
    return shown


@dataclass(frozen=True)
class Results:
    """The files of a run."""

    folder: Path

    @property
    def prefix(self) -> Path:
        return self.folder / "run"

    def table(self, name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((self.folder / f"run_{name}.csv").read_text(encoding="utf-8").splitlines()))

    def stats(self, protocol: str) -> dict[str, tuple[int, int]]:
        """Locust's entry -> (requests, failures)."""
        rows = [row for row in self.table("stats") if row["Type"] in (protocol, "")]
        return {row["Name"]: (int(row["Request Count"]), int(row["Failure Count"])) for row in rows}

    def counts(self, protocol: str) -> dict[str, int]:
        """Metric of the summary -> count."""
        return {row["metric"]: int(row["count"]) for row in self.table("summary") if row["protocol"] == protocol}

    def sent(self) -> dict[tuple[str, str, str], tuple[str, str]]:
        """What each user sent: (protocol, user, number) -> (request, cancelled after)."""
        rows = self.table("requests")
        return {(r["protocol"], r["user"], r["number"]): (r["request"], r["cancel_after"]) for r in rows}

    def check(self, protocol: str) -> None:
        """Without failures, all that the files say of one protocol agrees."""
        assert {path.stem.removeprefix("run_") for path in self.folder.iterdir()} == FILES
        assert (self.folder / "run_load.png").read_bytes().startswith(PNG)
        stats, counts, requests = self.stats(protocol), self.counts(protocol), self.table("requests")
        assert set(stats) == {"request", "cancelled", "TTFT", "ITL", "tokens/s", "Aggregated"}
        assert all(count > 0 and failures == 0 for count, failures in stats.values())
        assert self.table("failures") == []
        outcomes = [row["outcome"] for row in requests]
        assert counts["finished"] == stats["request"][0] == outcomes.count("finished")
        assert counts["cancelled"] == stats["cancelled"][0] == outcomes.count("cancelled")
        assert counts["unfinished"] == outcomes.count("unfinished") and counts["failed"] == 0
        assert stats["Aggregated"][0] == counts["finished"] + counts["cancelled"]
        assert counts["TTFT"] == stats["TTFT"][0] == sum(row["ttft_ms"] != "" for row in requests)
        assert counts["ITL"] == stats["ITL"][0]
        assert counts["throughput"] == sum(int(row["tokens"]) for row in requests)
        assert counts["finished"] < counts["ITL"] <= counts["throughput"] - counts["TTFT"]
        for row in requests:
            if row["outcome"] == "finished":
                assert row["tokens"] == row["max_tokens"]
            if row["outcome"] == "cancelled":
                assert int(row["cancel_after"]) <= int(row["tokens"]) and row["error"] == ""
        timeline = self.table("timeline")
        assert len(timeline) >= 2 and sum(int(row["sent"]) for row in timeline) == len(requests)


MIXED = ("--max-tokens", "8:32", "--cancel-share", "0.3")


@pytest.fixture(scope="module")
def closed(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Three gRPC users in a closed loop, seed 0."""
    results = Results(tmp_path_factory.mktemp("closed"))
    shown = output(
        locust(server, "GrpcUser", "-u", "3", "-r", "3", "-t", "2s", *MIXED, "--csv", results.prefix), code=0
    )
    assert f"wrote {results.prefix}_summary.csv" in shown and "TTFT, ms" in shown
    return results


def test_grpc_in_a_closed_loop(closed: Results, server: RunningServer) -> None:
    closed.check("grpc")
    requests = closed.table("requests")
    assert {row["user"] for row in requests} == {"0", "1", "2"} and {row["due_s"] for row in requests} == {""}
    for user in "012":  # one after the other
        own = [row for row in requests if row["user"] == user]
        assert [int(row["number"]) for row in own] == list(range(len(own)))
        ends = [float(row["sent_s"]) + float(row["duration_ms"]) / 1000 for row in own]
        assert all(float(row["sent_s"]) >= end - 1e-5 for row, end in zip(own[1:], ends[:-1], strict=True))
    assert_clean_and_serving(server)


def test_http_in_an_open_loop_sends_the_same_when_it_is_due(
    closed: Results, server: RunningServer, tmp_path: Path
) -> None:
    results = Results(tmp_path)
    arguments = ("HttpUser", "-u", "2", "-r", "2", "-t", "2s", "--rate", "12", *MIXED, "--csv", results.prefix)
    output(locust(server, *arguments), code=0)
    results.check("http")
    assert results.counts("http")["lag"] == len(results.table("requests")) > 20
    assert all(float(row["sent_s"]) >= float(row["due_s"]) for row in results.table("requests"))
    over_grpc = {key[1:]: value for key, value in closed.sent().items()}
    both = [(value, over_grpc[key[1:]]) for key, value in results.sent().items() if key[1:] in over_grpc]
    assert len(both) > 10 and all(a == b for a, b in both)
    assert_clean_and_serving(server)


def test_the_same_seed_sends_the_same_and_another_one_does_not(
    closed: Results, server: RunningServer, tmp_path: Path
) -> None:
    same, other = Results(tmp_path / "same"), Results(tmp_path / "other")
    users = ("GrpcUser", "-u", "3", "-r", "3", "-t", "1s", *MIXED)
    runs = [locust(server, *users, "--seed", s, "--csv", r.prefix) for s, r in (("0", same), ("1", other))]
    for run in runs:
        output(run, code=0)
    before, again = closed.sent(), same.sent()
    common = before.keys() & again.keys()
    assert len(common) >= 3 and all(before[key] == again[key] for key in common)
    assert not set(other.sent().values()) & set(before.values())


def test_text_prompts_with_time_to_finish(tiny_server: RunningServer, tmp_path: Path) -> None:
    """Of a file, over both protocols, in an open loop whose requests may end after the run."""
    prompts, results = tmp_path / "prompts.jsonl", Results(tmp_path / "results")
    prompts.write_text(
        '{"messages": [{"role": "user", "content": "Name a \u00fcber-colour."}], "stop_words": ["\\n\\n\\n"]}\n'
        '{"text_input": "Once upon a time", "temperature": 0.5, "router_params": {"tau": 0.3}}\n',
        encoding="utf-8",
    )
    asked = ("--prompts", prompts, "--rate", "4", "--max-tokens", "6", "--ignore-eos")
    output(locust(tiny_server, "-u", "2", "-r", "2", "-t", "2s", "-s", "20", *asked, "--csv", results.prefix), code=0)
    rows = results.table("requests")
    assert {row["protocol"] for row in rows} == {"grpc", "http"}
    assert {row["outcome"] for row in rows} == {"finished"} and {row["tokens"] for row in rows} == {"6"}
    assert_clean_and_serving(tiny_server, text="Hello", max_tokens=2)


@pytest.mark.parametrize(("number", "loop"), [(signal.SIGINT, ("--rate", "15")), (signal.SIGTERM, ())])
def test_a_signal_ends_it_and_every_open_stream(
    number: signal.Signals, loop: tuple[str, ...], server: RunningServer, tmp_path: Path
) -> None:
    results = Results(tmp_path)
    process = locust(server, "-u", "4", "-r", "4", "--max-tokens", "4000", *loop, "--csv", results.prefix)
    wait_until("requests of all users", lambda: server.control.status().live >= 4, END_S)
    time.sleep(0.5)  # amid their tokens
    process.send_signal(number)
    output(process, code=0)
    assert {row["outcome"] for row in results.table("requests")} == {"unfinished"}
    assert {row["protocol"] for row in results.table("requests")} == {"grpc", "http"}
    assert all(results.counts(protocol)["throughput"] > 0 for protocol in ("grpc", "http"))
    assert_clean_and_serving(server)


def test_what_the_server_refuses_is_a_failure_with_its_message(server: RunningServer, tmp_path: Path) -> None:
    results = Results(tmp_path)
    refused = ("--prompts", "ids:9", "--max-tokens", "5000")
    output(locust(server, "-u", "2", "-r", "2", "-t", "1s", *refused, "--csv", results.prefix), code=1)
    message = "max_tokens: 5000 with a prompt of 9 tokens is more than the context of 4096; allowed: 1 to 4087"
    failures = {(row["Method"], row["Name"]): row["Error"] for row in results.table("failures")}
    assert failures == {
        ("grpc", "request"): f"RequestFailed('INVALID_ARGUMENT: {message}')",
        ("http", "request"): f"RequestFailed('HTTP 400: {message}')",
    }
    errors = {row["error"] for row in results.table("requests") if row["outcome"] == "failed"}
    assert errors == {f"INVALID_ARGUMENT: {message}", f"HTTP 400: {message}"}
    assert all(results.counts(protocol)["failed"] > 0 for protocol in ("grpc", "http"))


@pytest.mark.parametrize(
    ("option", "value", "code", "message"),
    [
        ("--rate", "0", 2, "argument --rate: Input should be greater than 0, got '0'"),
        ("--host", "http://a", 1, "--host: isn't used here; --grpc-url and --http-url name the server"),
    ],
)
def test_a_bad_option_ends_it_before_it_begins(
    option: str, value: str, code: int, message: str, server: RunningServer
) -> None:
    shown = output(locust(server, "-t", "9s", option, value), code)
    assert message in shown and "Ramping" not in shown
