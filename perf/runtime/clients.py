# SPDX-License-Identifier: Apache-2.0
"""Closed-loop clients in a process of their own, so that what they cost is known and not the server's.

`python -m perf.runtime.clients` reads a `ClientSpec` as JSON from its input and prints `ClientResult` as JSON.
Each client sends its next request when the former has ended. Request k of client i has the same seed in every
run, so two runs draw the same routes for the same tokens.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
import threading
import time
from collections import Counter

from pydantic import BaseModel

from tools.client import GenerationError, TokenRouterClient

__all__ = ["ClientResult", "ClientSpec", "PhaseResult", "PhaseSpec", "drive"]

_SEEDS_PER_CLIENT = 100_000


class PhaseSpec(BaseModel):
    """seconds: of the phase, whole. router_params: of its requests; those of the phase before are cancelled."""

    seconds: int
    router_params: dict[str, float] = {}


class ClientSpec(BaseModel):
    """url: of gRPC. clients: how many at once. warmup_s: before the first phase, not counted."""

    url: str
    clients: int
    max_tokens: int
    warmup_s: float
    phases: list[PhaseSpec]
    seed: int = 1


class PhaseResult(BaseModel):
    """seconds: of the phase, whole. tokens: received in each of them."""

    seconds: int
    tokens: list[int]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.seconds

    @property
    def error(self) -> float:
        """The standard error of tokens_per_s, from the spread of the seconds."""
        if len(self.tokens) < 2:
            return 0.0
        return statistics.stdev(self.tokens) / math.sqrt(len(self.tokens))


class ClientResult(BaseModel):
    """cpu_s: of this process, over all phases. requests: ended."""

    phases: list[PhaseResult]
    cpu_s: float
    requests: int


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
    began = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(max(0.0, clients.bounds[-1] - time.monotonic()))
    ended = resource.getrusage(resource.RUSAGE_SELF)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    cpu_s = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    phases = [
        PhaseResult(seconds=phase.seconds, tokens=[counts[s] for s in range(int(phase.seconds))])
        for phase, counts in zip(spec.phases, clients.tokens, strict=True)
    ]
    return ClientResult(phases=phases, cpu_s=cpu_s, requests=clients.requests)


if __name__ == "__main__":
    print(drive(ClientSpec.model_validate_json(sys.stdin.read())).model_dump_json())
