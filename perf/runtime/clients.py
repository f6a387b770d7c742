# SPDX-License-Identifier: Apache-2.0
"""Closed-loop clients in a process of their own, so that what they cost is known and not the server's.

`python -m perf.runtime.clients` reads a `ClientSpec` as JSON from its input and prints `ClientResult` as JSON.
Each client sends its next request when the former has ended. Request k of client i has the same seed in every
run, so two runs draw the same routes for the same tokens.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
from pydantic import BaseModel

from tools.client import GenerationError, TokenRouterClient

__all__ = ["ClientResult", "ClientSpec", "PhaseResult", "PhaseSpec", "drive"]

_SEEDS_PER_CLIENT = 100_000


class PhaseSpec(BaseModel):
    """seconds: of the phase, whole. router_params: of its requests; those of the phase before are cancelled."""

    seconds: int
    router_params: dict[str, float] = {}


class ClientSpec(BaseModel):
    """url: of gRPC. clients: how many at once. warmup_s: before the first phase, not counted. pids: of the processes
    whose CPU time is read when the first phase begins and when the last one ends, by name."""

    url: str
    clients: int
    max_tokens: int
    warmup_s: float
    phases: list[PhaseSpec]
    seed: int = 1
    pids: dict[str, int] = {}


class PhaseResult(BaseModel):
    """seconds: of the phase, whole. tokens: received in each of them."""

    seconds: int
    tokens: list[int]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.seconds


class ClientResult(BaseModel):
    """CPU seconds over all phases, without the warm-up. cpu_s: of this process; watched_s: of each in
    `ClientSpec.pids`; threads_s: of the threads of each, the busiest first. requests: ended."""

    phases: list[PhaseResult]
    cpu_s: float
    requests: int
    watched_s: dict[str, float] = {}
    threads_s: dict[str, list[float]] = {}


@dataclass(frozen=True)
class _CPU:
    """CPU seconds so far. threads: of each process watched, by thread id."""

    own: float
    watched: dict[str, float]
    threads: dict[str, dict[int, float]]

    @classmethod
    def now(cls, pids: Mapping[str, int]) -> _CPU:
        own = resource.getrusage(resource.RUSAGE_SELF)
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        return cls(
            own=own.ru_utime + own.ru_stime,
            watched={name: sum(process.cpu_times()[:2]) for name, process in processes.items()},
            threads={
                name: {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
                for name, process in processes.items()
            },
        )

    def watched_since(self, before: _CPU) -> dict[str, float]:
        return {name: now - before.watched[name] for name, now in self.watched.items()}

    def threads_since(self, before: _CPU) -> dict[str, list[float]]:
        """The busiest first; those that have ended are left out."""
        return {
            name: sorted((now - before.threads[name].get(tid, 0.0) for tid, now in threads.items()), reverse=True)
            for name, threads in self.threads.items()
        }


class _Clients:
    """The clients of one spec and the phases that they go through together."""

    def __init__(self, spec: ClientSpec) -> None:
        self._spec = spec
        begin = time.monotonic() + spec.warmup_s
        self.bounds = [begin]
        for phase in spec.phases:
            self.bounds.append(self.bounds[-1] + phase.seconds)
        self.tokens = [Counter[int]() for _ in spec.phases]
        self.requests = 0
        self._lock = threading.Lock()

    def run(self, number: int) -> None:
        """One client, until the last phase is over."""
        with TokenRouterClient(self._spec.url) as client:
            request = 0
            while (now := time.monotonic()) < self.bounds[-1]:
                phase = max(0, sum(now >= b for b in self.bounds) - 1)
                self._ask(client, number, request, phase)
                request += 1

    def _ask(self, client: TokenRouterClient, number: int, request: int, phase: int) -> None:
        seen: Counter[tuple[int, int]] = Counter()
        generation = client.generate(
            input_ids=[5],
            ignore_eos=True,
            max_tokens=self._spec.max_tokens,
            seed=self._spec.seed * 10**9 + number * _SEEDS_PER_CLIENT + request,
            router_params=self._spec.phases[phase].router_params or None,
        )
        for chunk in generation:
            if chunk.received_at >= self.bounds[phase + 1]:
                generation.cancel()
                break
            if chunk.received_at >= self.bounds[phase]:
                seen[phase, int(chunk.received_at - self.bounds[phase])] += len(chunk.ids)
        with self._lock:
            self.requests += 1
            for (at, second), count in seen.items():
                self.tokens[at][second] += count


def drive(spec: ClientSpec) -> ClientResult:
    """Run the clients. Raises GenerationError when a request fails."""
    clients = _Clients(spec)
    failures: list[GenerationError] = []

    def run(number: int) -> None:
        try:
            clients.run(number)
        except GenerationError as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(spec.clients)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, clients.bounds[0] - time.monotonic()))
    began = _CPU.now(spec.pids)
    time.sleep(max(0.0, clients.bounds[-1] - time.monotonic()))
    ended = _CPU.now(spec.pids)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    phases = [
        PhaseResult(seconds=phase.seconds, tokens=[counts[s] for s in range(int(phase.seconds))])
        for phase, counts in zip(spec.phases, clients.tokens, strict=True)
    ]
    return ClientResult(
        phases=phases,
        cpu_s=ended.own - began.own,
        requests=clients.requests,
        watched_s=ended.watched_since(began),
        threads_s=ended.threads_since(began),
    )


if __name__ == "__main__":
    print(drive(ClientSpec.model_validate_json(sys.stdin.read())).model_dump_json())
