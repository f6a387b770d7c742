# SPDX-License-Identifier: Apache-2.0
"""Locust users of a running TokenRouter server: `locust -f perf/locustfile.py GrpcUser --headless -u 4 -t 60s`.

Run it from the repository's root. docs/load.md says what the options are and how to read what comes out.
Locust comes first: importing it patches the standard library for gevent.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

import gevent  # type: ignore[import-untyped]
from locust import User, events, task
from locust.env import Environment
from locust.runners import LocalRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

# isort: split
from gevent.pool import Group  # type: ignore[import-untyped]
from grpc.experimental import gevent as grpc_gevent  # type: ignore[import-untyped]
from rich.console import Console

from perf.load.options import LoadOptions, add_options
from perf.load.record import Measured, Outcome, Recorder
from perf.load.report import summary_table, write_report
from perf.load.schedule import Request, arrivals, requests
from perf.load.streams import Connection, GrpcConnection, HttpConnection, RequestFailed

grpc_gevent.init_gevent()  # before any channel: without it the first call blocks the whole process

_PAUSE_AFTER_FAILURE_S = 0.1  # of a closed loop, or a server that is down would be asked thousands of times a second
_TABLE_WIDTH = 110


class Load:
    """One Locust process: its options and, of each test that it runs, what was seen."""

    def __init__(self, environment: Environment, options: LoadOptions) -> None:
        self.options = options
        self._environment = environment
        self._recorder = Recorder(time.monotonic())
        self._users: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def begin(self, **_: Any) -> None:
        """A test starts."""
        self._recorder = Recorder(time.monotonic())
        self._users.clear()

    def end(self, **_: Any) -> None:
        """A test has ended, and every user has stopped: its files and its table."""
        self._recorder.ended_at = time.monotonic()
        Console(width=_TABLE_WIDTH).print(summary_table(self._recorder))
        parsed = self._environment.parsed_options
        if parsed is not None and parsed.csv_prefix:
            for path in write_report(self._recorder, parsed.csv_prefix):
                print(f"wrote {path}")
            # Locust writes its own files once in this time and not at the end (its issue 1806).
            gevent.sleep(CSV_STATS_INTERVAL_SEC + 0.1)

    def next_user(self, protocol: str) -> int:
        """The number of a user who starts, from 0 for each protocol."""
        return next(self._users[protocol])

    def sent(self, measured: Measured) -> None:
        """A request that goes out now."""
        self._recorder.requests.append(measured)

    def tokens(self, measured: Measured, received_at: float, count: int) -> None:
        """A response with `count` > 0 tokens."""
        first = measured.first_at is None
        itl_s = self._recorder.tokens(measured, received_at, count)
        if first and measured.ttft_s is not None:
            self._entry(measured.protocol, "TTFT", measured.ttft_s * 1000)
        for _ in range(count if itl_s is not None else 0):
            self._entry(measured.protocol, "ITL", (itl_s or 0.0) * 1000)

    def ended(self, measured: Measured) -> None:
        """The request is over; one that the end of the run cut off is in our own files only."""
        if measured.outcome is Outcome.UNFINISHED:
            return
        if measured.outcome is Outcome.FINISHED and measured.tokens_per_s is not None:
            self._entry(measured.protocol, "tokens/s", measured.tokens_per_s)
        self._environment.events.request.fire(
            request_type=measured.protocol,
            name="cancelled" if measured.outcome is Outcome.CANCELLED else "request",
            response_time=measured.duration_s * 1000,
            response_length=measured.tokens,
            exception=RequestFailed(measured.error) if measured.outcome is Outcome.FAILED else None,
            context={},
        )

    def _entry(self, protocol: str, name: str, value: float) -> None:
        # Not as a request event: those are also counted in Locust's line "Aggregated", which is to be of requests.
        self._environment.stats.get(name, protocol).log(value, 0)  # type: ignore[arg-type]


class _StreamUser(User):
    """Sends requests, one after the other or as they are due, and reads their answers."""

    abstract = True
    protocol: ClassVar[str]
    load: ClassVar[Load]

    def connect(self, options: LoadOptions) -> Connection:
        """The user's way to the server."""
        raise NotImplementedError

    def on_start(self) -> None:
        options = self.load.options
        self._number = self.load.next_user(self.protocol)
        self._requests = requests(options, self._number)
        self._arrivals = arrivals(options, self._number) if options.rate is not None else None
        self._connection = self.connect(options)
        self._under_way = Group()
        self._started_at = time.monotonic()

    @task
    def send(self) -> None:
        """The next request: to its end in a closed loop; sent when it is due, and left to itself, in an open one."""
        request = next(self._requests)
        if self._arrivals is None:
            if self._ask(request, None) is Outcome.FAILED:
                gevent.sleep(_PAUSE_AFTER_FAILURE_S)
            return
        due_at = self._started_at + next(self._arrivals)
        gevent.sleep(max(0.0, due_at - time.monotonic()))
        self._under_way.spawn(self._ask, request, due_at)

    def on_stop(self) -> None:
        """Requests of an open loop may end within Locust's --stop-timeout (0 unless given); then all are cancelled."""
        try:
            self._under_way.join(timeout=self.environment.stop_timeout or 0)
        finally:
            self._under_way.kill()
            self._connection.close()

    def _ask(self, request: Request, due_at: float | None) -> Outcome:
        """Send it and read its answer. When the greenlet is killed meanwhile the stream is cancelled."""
        measured = Measured(self.protocol, self._number, request, sent_at=time.monotonic(), due_at=due_at)
        self.load.sent(measured)
        try:
            with closing(self._connection.stream(request.inputs)) as stream:
                measured.outcome = self._read(stream, measured)
        except RequestFailed as error:
            measured.outcome, measured.error = Outcome.FAILED, str(error)
        finally:
            measured.ended_at = time.monotonic()
            self.load.ended(measured)
        return measured.outcome

    def _read(self, stream: Iterator[Any], measured: Measured) -> Outcome:
        for received_at, count in stream:
            if count:
                self.load.tokens(measured, received_at, count)
            if measured.request.cancel_after is not None and measured.tokens >= measured.request.cancel_after:
                return Outcome.CANCELLED
        return Outcome.FINISHED


class GrpcUser(_StreamUser):
    """Over gRPC."""

    protocol = "grpc"

    def connect(self, options: LoadOptions) -> Connection:
        return GrpcConnection(options.grpc_url, options.model, options.timeout_s)


class HttpUser(_StreamUser):
    """Over HTTP, generate_stream."""

    protocol = "http"

    def connect(self, options: LoadOptions) -> Connection:
        return HttpConnection(options.http_url, options.model, options.timeout_s)


def _interrupt() -> None:
    """Ctrl-C, raised where Locust waits for it. Python raises it in whichever greenlet runs: one that ends there and
    goes unmissed, such as the one that reads gRPC's events, and the run would hang."""
    gevent.get_hub().parent.throw(KeyboardInterrupt)


def _prepare(environment: Environment, **_: Any) -> None:
    """Give the users of this process their options."""
    parsed = environment.parsed_options
    if parsed is None:
        raise RuntimeError("Locust gave no options")
    if parsed.host is not None:
        sys.exit(f"--host: isn't used here; --grpc-url and --http-url name the server, got {parsed.host!r}")
    if not isinstance(environment.runner, LocalRunner):
        sys.exit("--master, --worker, --processes: not supported; what one process has seen would be summed up alone")
    load = Load(environment, LoadOptions.of(parsed))
    for user_class in environment.user_classes:
        if issubclass(user_class, _StreamUser):
            user_class.load = load
    environment.events.test_start.add_listener(load.begin)
    environment.events.test_stop.add_listener(load.end)
    gevent.signal_handler(signal.SIGINT, _interrupt)
    gevent.get_hub().loop.update_now()  # else the time that the imports took would be missing from --run-time


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(_prepare)
