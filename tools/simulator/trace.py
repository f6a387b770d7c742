# SPDX-License-Identifier: Apache-2.0
"""A run as a trace in the trace-event format (JSON), for https://ui.perfetto.dev.

One process. A track for each model with a slice for each batch; a track for each session (a request on a
model) with slices for its states; a counter of who waits for each model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.simulator.engine import Simulation
from tools.simulator.events import nanoseconds
from tools.simulator.observer import Observer
from tools.simulator.requests import SimRequest, SimSession

__all__ = ["ChromeTrace"]

_PROCESS = 1
_US = 1000  # ns


class ChromeTrace(Observer):
    """What happens between start_s and end_s (simulated). Attach it with `Simulation.observe`, before the run."""

    def __init__(self, simulation: Simulation, start_s: float, end_s: float) -> None:
        self._simulation = simulation
        self._models = simulation.profile.models
        self._start, self._end = nanoseconds(start_s * 1000), nanoseconds(end_s * 1000)
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[int, str] = {1 + i: f"model {name}" for i, name in enumerate(self._models)}
        self._batches: dict[int, tuple[int, dict[str, Any]]] = {}
        self._states: dict[SimSession, tuple[int, str]] = {}
        self._waiting = [0] * len(self._models)

    def waits(self, now: int, session: SimSession) -> None:
        self._enter(now, session, "waiting")
        self._count(now, session.model, 1)

    def launched(self, now: int, model: int, batch: Sequence[SimSession]) -> None:
        live, thresholds = self._simulation.live, self._simulation.thresholds
        rids = [session.request.rid for session in batch]
        self._batches[model] = now, {"sessions": len(batch), "N": live, "B": thresholds[model], "rids": rids}
        self._count(now, model, -len(batch))
        for session in batch:
            self._enter(now, session, "running")

    def stepped(self, now: int, model: int, sessions: int, more_tokens: int, took: int) -> None:
        since, args = self._batches.pop(model)
        args["tokens"] = sessions + more_tokens
        self._slice(1 + model, f"batch of {sessions}", since, now, args)

    def pending(self, now: int, session: SimSession) -> None:
        self._enter(now, session, "pending")

    def ended(self, now: int, request: SimRequest) -> None:
        for session in request.sessions:
            state = self._leave(now, session)
            if state == "waiting":
                self._count(now, session.model, -1)

    def write(self, path: Path) -> None:
        """All of it, once the run is over. Raises OSError."""
        path.write_text(json.dumps(self.document(), separators=(",", ":")) + "\n", encoding="utf-8")

    def document(self) -> dict[str, Any]:
        """The JSON object. What still goes on ends where the trace does."""
        now = min(self._end, self._simulation.now)
        for model, (since, args) in self._batches.items():
            self._slice(1 + model, f"batch of {args['sessions']}", since, now, args)
        for session in list(self._states):
            self._leave(now, session)
        self._batches.clear()
        names = [_meta("process_name", 0, name="tokenrouter simulate")]
        for track, name in self._tracks.items():
            names += [_meta("thread_name", track, name=name), _meta("thread_sort_index", track, sort_index=track)]
        return {"displayTimeUnit": "ms", "traceEvents": names + sorted(self._events, key=lambda event: event["ts"])}

    def _enter(self, now: int, session: SimSession, state: str) -> None:
        self._leave(now, session)
        self._states[session] = now, state

    def _leave(self, now: int, session: SimSession) -> str | None:
        """The state that the session leaves."""
        since, state = self._states.pop(session, (now, None))
        if state is not None:
            track = 1 + len(self._models) * (1 + session.request.rid) + session.model
            self._slice(track, state, since, now, {})
            self._tracks.setdefault(track, f"request {session.request.rid} on {self._models[session.model]}")
        return state

    def _slice(self, track: int, name: str, since: int, until: int, args: dict[str, Any]) -> None:
        # Whole µs: Perfetto cuts what a fraction isn't exactly, and leaves out a slice that overlaps the one before.
        since, until = max(since, self._start) // _US, min(until, self._end) // _US
        if until > since:
            event = {"ph": "X", "name": name, "pid": _PROCESS, "tid": track}
            self._events.append(event | {"ts": since, "dur": until - since, "args": args})

    def _count(self, now: int, model: int, more: int) -> None:
        self._waiting[model] += more
        if self._start <= now < self._end:
            name = f"waiting for {self._models[model]}"
            event = {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": now // _US}
            self._events.append(event | {"args": {"requests": self._waiting[model]}})


def _meta(kind: str, track: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "ts": 0, "args": args}
