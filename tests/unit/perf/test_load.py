# SPDX-License-Identifier: Apache-2.0
"""The parts of the load test that need neither Locust nor a server of ours: prompts, schedules, figures, HTTP.

Nothing here may import Locust, which patches the standard library of the whole test run.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import random
import statistics
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from perf.load.options import LoadOptions, add_options
from perf.load.prompts import BUILT_IN, IntRange, RandomIds, prompt_set
from perf.load.record import Measured, Outcome, Recorder
from perf.load.report import summary_table, write_report
from perf.load.schedule import Request, arrivals, requests
from perf.load.streams import GrpcConnection, HttpConnection, RequestFailed
from perf.load.summary import SummaryRow, summary, timeline
from python_backends.token_router.params import GenerateParams

REQUEST = Request(0, {"input_ids": [1], "max_tokens": 8}, None)
PAGE = Path(__file__).parents[3] / "docs" / "load.md"


def parsed(*arguments: str) -> LoadOptions:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return LoadOptions.of(parser.parse_args(arguments))


def first(count: int, user: int = 0, *arguments: str) -> list[Request]:
    return list(itertools.islice(requests(parsed(*arguments), user), count))


class TestOptions:
    def test_defaults_are_those_of_the_model(self) -> None:
        assert parsed() == LoadOptions()
        assert parsed().rate is None and parsed().prompts is BUILT_IN["ids"]

    def test_values(self) -> None:
        options = parsed("--rate", "2.5", "--prompts", "ids:3:5", "--max-tokens", "7", "--ignore-eos", "--seed", "9")
        assert (options.rate, options.seed, options.ignore_eos) == (2.5, 9, True)
        assert options.prompts == RandomIds(IntRange(3, 5)) and options.max_tokens == IntRange(7, 7)
        assert parsed("--grpc-url", "[::1]:8001").grpc_url == "[::1]:8001"

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--rate", "0", "greater than 0, got '0'"),
            ("--rate", "inf", "finite number, got 'inf'"),
            ("--rate", "often", "valid number"),
            ("--cancel-share", "1.5", "less than or equal to 1, got '1.5'"),
            ("--max-tokens", "0", "1 <= N <= M; got '0'"),
            ("--max-tokens", "9:8", "1 <= N <= M; got '9:8'"),
            ("--max-tokens", "9:", "whole numbers; got '9:'"),
            ("--max-tokens", ":9", "whole numbers; got ':9'"),
            ("--seed", "-1", "greater than or equal to 0"),
            ("--timeout-s", "0", "greater than 0"),
            ("--grpc-url", "http://a:1", "must be host:port, as in 127.0.0.1:8001; got 'http://a:1'"),
            ("--http-url", "a", "must be host:port"),
            ("--http-url", "a:65536", "must be host:port"),
            ("--http-url", "a:0", "must be host:port"),
            ("--prompts", "none", "neither a file nor one of ids, code, chat, text, ids:N, ids:N:M; got 'none'"),
            ("--prompts", "ids:x", "length in tokens must be N or N:M"),
        ],
    )
    def test_a_bad_value_is_named(
        self, option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            parsed(option, value)
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert f"argument {option}: " in error and message in error

    def test_the_page_names_every_option(self) -> None:
        page = PAGE.read_text(encoding="utf-8")
        assert [n for n in LoadOptions.model_fields if f"`--{n.replace('_', '-')}`" not in page] == []
        assert [n for n in BUILT_IN if f"`{n}`" not in page] == []


class TestPrompts:
    def test_random_ids_are_of_the_wanted_lengths(self) -> None:
        rng = random.Random(1)
        prompts = [RandomIds(IntRange(2, 4)).draw(rng)["input_ids"] for _ in range(200)]
        assert {len(p) for p in prompts} == {2, 3, 4}
        assert all(1 <= i <= 255 for p in prompts for i in p)

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_a_built_in_prompt_is_a_request(self, name: str) -> None:
        rng = random.Random(1)
        drawn = [BUILT_IN[name].draw(rng) for _ in range(50)]
        assert len({str(GenerateParams.parse(d)) for d in drawn}) > 4

    def test_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_text(
            '{"text_input": "a", "max_tokens": 3, "seed": null}\n\n'
            '{"messages": [{"role": "user", "content": "ü"}], "router_params": {"tau": 0.1}, "beam_width": 1}\n'
        )
        options = ("--prompts", str(file), "--max-tokens", "50")
        by_kind = {"text_input" in r.inputs: dict(r.inputs) for r in first(20, 0, *options)}
        for inputs in by_kind.values():
            assert isinstance(inputs.pop("seed"), int)
        assert by_kind == {
            True: {"text_input": "a", "max_tokens": 3},
            False: {
                "messages": [{"role": "user", "content": "ü"}], "router_params": {"tau": 0.1}, "max_tokens": 50,
            },
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "has no prompts"),
            ("{", "file:1: is not JSON"),
            ("\n[1]", "file:2: must be a JSON object"),
            ('{"max_tokens": 3}', "file:1: exactly one of text_input, messages and input_ids"),
            ('{"text_input": "a", "max_tokns": 3}', "file:1: max_tokns"),
            ('{"text_input": "a", "max_tokens": 0}', "file:1: max_tokens"),
            ('{"text_input": "a", "stream": true}', "file:1: stream: can't be set"),
        ],
    )
    def test_a_bad_file(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text(text)
        with pytest.raises(ValueError, match=message):
            prompt_set(str(tmp_path / "file"))


class TestSchedule:
    OPTIONS = ("--max-tokens", "4:40", "--cancel-share", "0.4")

    def test_a_seed_gives_each_user_its_requests_again(self) -> None:
        assert first(50, 3, *self.OPTIONS) == first(50, 3, *self.OPTIONS)
        assert first(50, 3, *self.OPTIONS) == first(50, 3, *self.OPTIONS, "--rate", "5")
        digests = [
            tuple(r.digest for r in made)
            for made in (first(5), first(5, 1), first(5, 0, "--seed", "1"), first(5, 0, "--ignore-eos"))
        ]
        assert len(set(itertools.chain(*digests))) == 20

    def test_what_is_drawn(self) -> None:
        made = first(2000, 0, *self.OPTIONS)
        assert [r.number for r in made] == list(range(2000))
        assert {r.inputs["max_tokens"] for r in made} == set(range(4, 41))
        cancels = [r for r in made if r.cancel_after is not None]
        assert 0.36 < len(cancels) / len(made) < 0.44
        assert all(1 <= (r.cancel_after or 0) < r.inputs["max_tokens"] for r in cancels)
        assert all("ignore_eos" not in r.inputs for r in made)
        assert first(1, 0, "--ignore-eos")[0].inputs["ignore_eos"] is True

    def test_who_cancels_changes_nothing_else(self) -> None:
        never, always = first(20, 0, "--cancel-share", "0"), first(20, 0, "--cancel-share", "1")
        assert [r.inputs for r in never] == [r.inputs for r in always]
        assert all(r.cancel_after is None for r in never) and all(r.cancel_after for r in always)

    def test_arrivals_are_a_poisson_process(self) -> None:
        def at(user: int, *arguments: str) -> list[float]:
            return list(itertools.islice(arrivals(parsed("--rate", "5", *arguments), user), 4000))

        assert at(0) == at(0) and at(0) != at(1) and at(0) != at(0, "--seed", "1")
        gaps = [b - a for a, b in itertools.pairwise([0.0, *at(0)])]
        assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.06)
        assert statistics.stdev(gaps) == pytest.approx(1 / 5, rel=0.06)  # as large as the mean: exponential
        in_a_second = [sum(s <= t < s + 1 for t in at(0)) for s in range(300)]
        assert statistics.variance(in_a_second) == pytest.approx(statistics.mean(in_a_second), rel=0.25)

    def test_a_closed_loop_has_none(self) -> None:
        with pytest.raises(ValueError, match="rate"):
            next(arrivals(LoadOptions(), 0))


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def recorded(duration_s: float = 4.0) -> Recorder:
    """From 100 s on: a finished request, a cancelled one, a failed one and one that the end cut off."""
    recorder = Recorder(100.0)
    for user, (sent_at, chunks, ended_at, outcome) in enumerate(
        [
            (100.0, [(100.5, 2), (100.6, 1), (101.2, 3)], 101.3, Outcome.FINISHED),
            (100.25, [(101.25, 1), (101.35, 1)], 101.35, Outcome.CANCELLED),
            (101.0, [], 101.1, Outcome.FAILED),
            (102.0, [(102.25, 1)], 104.0, Outcome.UNFINISHED),
        ]
    ):
        measured = Measured("grpc", user, REQUEST, sent_at, outcome=outcome, ended_at=ended_at)
        recorder.requests.append(measured)
        for received_at, count in chunks:
            recorder.tokens(measured, received_at, count)
    recorder.ended_at = 100.0 + duration_s
    return recorder


class TestFigures:
    def test_inter_token_latency_is_of_each_token(self) -> None:
        measured = Measured("grpc", 0, REQUEST, sent_at=1.0)
        assert measured.ttft_s is None and measured.tokens_per_s is None
        assert measured.add(1.5, 2) is None
        assert measured.tokens_per_s is None
        assert measured.add(1.6, 1) == pytest.approx(0.1)
        assert measured.add(2.2, 3) == pytest.approx(0.2)
        assert measured.ttft_s == pytest.approx(0.5)
        assert (measured.tokens, measured.tokens_per_s) == (6, pytest.approx(4 / 0.7))

    def test_lag(self) -> None:
        assert Measured("http", 0, REQUEST, sent_at=1.0).lag_s is None
        assert Measured("http", 0, REQUEST, sent_at=1.0, due_at=0.75).lag_s == 0.25

    def test_summary(self) -> None:
        rows = {row.metric: row for row in summary(recorded())}
        assert {n: (r.unit, r.count, round(r.mean, 3)) for n, r in rows.items() if r.count} == {
            "TTFT": ("ms", 3, 583.333),
            "ITL": ("ms", 5, 160.0),  # 100, then 3 times 200, then 100 of the cancelled one
            "tokens/s": ("tokens/s", 1, 5.714),
            "finished": ("ms", 1, 1300.0),
            "cancelled": ("ms", 1, 1100.0),
            "failed": ("ms", 1, 100.0),
            "unfinished": ("ms", 1, 2000.0),
            "throughput": ("tokens/s", 9, 2.25),
        }
        assert "lag" not in rows
        itl = rows["ITL"]
        assert [round(v, 6) for v in (itl.p50, itl.p90, itl.max)] == [200.0, 200.0, 200.0]
        assert rows["TTFT"].p50 == pytest.approx(500) and rows["TTFT"].max == pytest.approx(1000)

    def test_each_protocol_has_its_own_rows(self) -> None:
        recorder = recorded()
        recorder.requests.append(Measured("http", 0, REQUEST, 101.0, due_at=100.9, ended_at=102.0))
        rows = [(row.protocol, row.metric) for row in summary(recorder)]
        assert rows.count(("http", "TTFT")) == rows.count(("grpc", "TTFT")) == 1
        assert ("http", "lag") in rows and ("grpc", "lag") not in rows

    def test_timeline(self) -> None:
        slots = timeline(recorded())
        assert [(s.start_s, s.width_s, s.sent, s.tokens_per_s) for s in slots] == [
            (0, 1, 2, 3), (1, 1, 1, 5), (2, 1, 1, 1), (3, 1, 0, 0),
        ]  # fmt: skip
        assert [s.ttft_p50_ms for s in slots[:3]] == pytest.approx([500, 1000, 250])
        assert slots[1].itl_p50_ms == pytest.approx(200) and math.isnan(slots[2].itl_p50_ms)
        assert math.isnan(slots[3].ttft_p99_ms)

    @pytest.mark.parametrize(
        ("duration_s", "widths"), [(4.25, [1, 1, 1, 1.25]), (4.75, [1, 1, 1, 1, 0.75]), (0.4, [0.4]), (0.0, [])]
    )
    def test_the_last_slot_is_as_long_as_the_run(self, duration_s: float, widths: list[float]) -> None:
        slots = timeline(recorded(duration_s))
        assert [s.width_s for s in slots] == pytest.approx(widths)
        if slots:
            assert sum(s.tokens_per_s * s.width_s for s in slots) == pytest.approx(9)

    def test_a_long_run_has_longer_slots(self) -> None:
        assert {s.width_s for s in timeline(recorded(900.0))} == {3.0}

    def test_the_report(self, tmp_path: Path) -> None:
        paths = write_report(recorded(), str(tmp_path / "run"))
        assert [p.name for p in paths] == ["run_summary.csv", "run_timeline.csv", "run_requests.csv", "run_load.png"]
        assert paths[3].read_bytes().startswith(b"\x89PNG\r\n")
        tables = [table(path) for path in paths[:3]]
        assert list(tables[0][0]) == list(SummaryRow.__dataclass_fields__)
        throughput = tables[0][-1]
        assert (throughput["metric"], throughput["mean"], throughput["p50"]) == ("throughput", "2.25", "")
        assert len(tables[1]) == 4 and tables[1][3]["itl_p50_ms"] == ""
        assert [(r["sent_s"], r["outcome"], r["ttft_ms"]) for r in tables[2]] == [
            ("0.0", "finished", "500.0"), ("0.25", "cancelled", "1000.0"), ("1.0", "failed", ""),
            ("2.0", "unfinished", "250.0"),
        ]  # fmt: skip
        assert summary_table(recorded()).row_count == len(tables[0])

    def test_a_run_that_sent_nothing(self, tmp_path: Path) -> None:
        recorder = Recorder(1.0)
        recorder.ended_at = 3.0
        paths = write_report(recorder, str(tmp_path / "run"))
        assert [table(path) for path in paths[:3]] == [[], [], []]
        assert paths[3].exists()


class _Canned(BaseHTTPRequestHandler):
    """Answers every request with what the server was given."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def canned() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Canned) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class TestHttp:
    TWO = b'data: {"num_output_tokens":2,"finish_reason":""}\n\n'
    END = b'data: {"num_output_tokens":1,"finish_reason":"length"}\n\n'

    def read(self, canned: ThreadingHTTPServer, status: int, body: bytes) -> list[int]:
        canned.answer = (status, body)  # type: ignore[attr-defined]
        connection = HttpConnection(f"127.0.0.1:{canned.server_port}", "token_router", timeout_s=5)
        try:
            return [tokens.new for tokens in connection.stream({"input_ids": [1]})]
        finally:
            connection.close()

    def test_tokens(self, canned: ThreadingHTTPServer) -> None:
        assert self.read(canned, 200, self.TWO + self.TWO + self.END) == [2, 2, 1]

    @pytest.mark.parametrize(
        ("status", "body", "message"),
        [
            (400, b'data: {"error":"max_tokens: no"}\n\n', "HTTP 400: max_tokens: no"),
            (404, b'{"error":"unknown model"}', "HTTP 404: unknown model"),
            (502, b"Bad gateway", "HTTP 502: Bad gateway"),
            (200, TWO + b'data: {"error":"broke"}\n\n', "HTTP 200: broke"),
            (200, TWO, "HTTP 200: the stream ended without a final response"),
            (503, b"", "HTTP 503: the stream ended"),
        ],
    )
    def test_failures_have_the_servers_message(
        self, canned: ThreadingHTTPServer, status: int, body: bytes, message: str
    ) -> None:
        with pytest.raises(RequestFailed, match=message):
            self.read(canned, status, body)

    def test_no_server(self) -> None:
        with pytest.raises(RequestFailed, match="ConnectionError"):
            next(HttpConnection("127.0.0.1:1", "token_router", timeout_s=5).stream({"input_ids": [1]}))


def test_an_input_that_grpc_cannot_carry_is_a_failed_request() -> None:
    connection = GrpcConnection("127.0.0.1:1", "token_router", timeout_s=5)
    with pytest.raises(RequestFailed, match="max_tokens"):
        next(connection.stream({"input_ids": [1], "max_tokens": 2**40}))
    connection.close()
