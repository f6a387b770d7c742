# SPDX-License-Identifier: Apache-2.0
"""One server, one or more loads on it, and what each of them got."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, computed_field

from perf.runtime.clients import ClientResult, ClientSpec, PhaseSpec
from perf.runtime.errors import standard_error
from python_backends.token_router.config import Transport
from python_backends.token_router.step_clock import overhead_ms
from python_backends.token_router.threshold.forms import r2r
from python_backends.token_router.threshold.profile import Profile, StepLatency
from tools.deployment import ROUTER, Deployment
from tools.supervisor import RunningServer, running_server

__all__ = ["MAX_LIVE", "Measured", "Pair", "measure", "paced_server"]

MAX_LIVE = 64
_WARMUP_S = 1.5
_CLIENTS_END_S = 60.0  # to start, and to end what is under way


class Pair(BaseModel):
    """Two paced models and a router that delegates at random, with R2R's matrices.

    slm_ms, llm_ms: of a step. p: the probability that a token is the LLM's.
    slm_token_ms, llm_token_ms: of each token of a suffix or a prompt beyond one.
    """

    slm_ms: float = 6.0
    llm_ms: float = 27.9
    p: float = 0.35
    slm_token_ms: float = 0.0
    llm_token_ms: float = 0.0

    def profile(self, p: float | None = None) -> Profile:
        """What the Markov model is told: the paper's case."""
        form = r2r(self.p if p is None else p)
        latency = [StepLatency.constant(self.slm_ms), StepLatency.constant(self.llm_ms)]
        return Profile(models=["slm", "llm"], p=form.p, c=form.c, latency=latency)

    def deployment(self, batching: Mapping[str, Any], transport: Transport = "socket") -> Deployment:
        """The pair served on free ports."""
        times = (("slm", self.slm_ms, self.slm_token_ms), ("llm", self.llm_ms, self.llm_token_ms))
        return Deployment.model_validate(
            {
                "models": [
                    {
                        "name": name,
                        "engine": {"type": "paced", "step_ms": ms, "prefill_token_ms": token_ms},
                    }
                    for name, ms, token_ms in times
                ],
                "router": {"name": "random", "params": {"p": self.p}},
                "batching": dict(batching),
                "limits": {"max_live": MAX_LIVE},
                "transport": transport,
                "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
            }
        )


class Measured(BaseModel):
    """What one load got, or several one after the other.

    tokens_per_s: over all phases. phases: of each phase, all as long. by_second: tokens.
    client_cpu, server_cpu: cores in use while tokens were counted, by the clients' process and by each of the server's.
    router_threads: the same of token_router's threads, the busiest first.
    models: for each, from its own report, under this load only: the runtime's part of a step, p50 and p95 (None where
        the model had nothing to do before its calls).
    """

    tokens_per_s: float
    phases: list[float]
    by_second: list[int]
    client_cpu: float
    server_cpu: dict[str, float]
    router_threads: list[float]
    models: dict[str, dict[str, float | None]]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def error(self) -> float:
        """The standard error of tokens_per_s."""
        return standard_error(self.by_second, len(self.phases))

    @property
    def server_cpu_ms(self) -> float:
        """CPU time of the server for each token."""
        return sum(self.server_cpu.values()) * 1000 / self.tokens_per_s

    @classmethod
    def mean(cls, rounds: Sequence[Measured]) -> Measured:
        """Of rounds equally long, of one phase each; the seconds of all of them."""
        models = {
            name: {what: _mean([r.models[name][what] for r in rounds]) for what in rounds[0].models[name]}
            for name in rounds[0].models
        }
        tokens_per_s = sum(r.tokens_per_s for r in rounds) / len(rounds)
        return cls(
            tokens_per_s=tokens_per_s,
            phases=[tokens_per_s],
            by_second=[tokens for r in rounds for tokens in r.by_second],
            client_cpu=sum(r.client_cpu for r in rounds) / len(rounds),
            server_cpu={n: sum(r.server_cpu[n] for r in rounds) / len(rounds) for n in rounds[0].server_cpu},
            router_threads=[sum(x) / len(rounds) for x in zip(*(r.router_threads for r in rounds), strict=False)],
            models=models,
        )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return sum(known) / len(known) if known else None


@contextmanager
def paced_server(pair: Pair, batching: Mapping[str, Any], transport: Transport) -> Iterator[RunningServer]:
    """The pair under these batching settings, serving until the block ends."""
    with running_server(pair.deployment(batching, transport)) as server:
        yield server


def measure(
    server: RunningServer,
    clients: int,
    seconds: int,
    *,
    max_tokens: int = 1000,
    p: Sequence[float] = (),
    seed: int = 1,
) -> Measured:
    """Closed-loop clients for `seconds`, or for `seconds` with each p in turn. seed: two loads with the same one draw
    the same routes."""
    phases = [PhaseSpec(seconds=seconds, router_params={"p": x}) for x in p] or [PhaseSpec(seconds=seconds)]
    spec = ClientSpec(
        url=server.grpc_url,
        clients=clients,
        max_tokens=max_tokens,
        warmup_s=_WARMUP_S,
        phases=phases,
        seed=seed,
        pids={"tritonserver": server.pid, **server.stub_pids()},
    )
    before = server.control.status().models
    done = subprocess.run(
        [sys.executable, "-m", "perf.runtime.clients"],
        input=spec.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=_WARMUP_S + sum(phase.seconds for phase in phases) + _CLIENTS_END_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the clients failed: {done.stderr.strip()[-2000:]}")
    after = server.control.status().models
    result = ClientResult.model_validate_json(done.stdout)
    total_s = sum(phase.seconds for phase in result.phases)
    return Measured(
        tokens_per_s=sum(sum(phase.tokens) for phase in result.phases) / total_s,
        phases=[phase.tokens_per_s for phase in result.phases],
        by_second=[tokens for phase in result.phases for tokens in phase.tokens],
        client_cpu=result.cpu_s / total_s,
        server_cpu={name: cpu_s / total_s for name, cpu_s in result.watched_s.items()},
        router_threads=[cpu_s / total_s for cpu_s in result.threads_s.get(ROUTER, ())],
        models={name: _overhead(before[name], after[name]) for name in after},
    )


def _overhead(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float | None]:
    """The runtime's part of a model's steps between two statuses of it (`StepClock.summary`)."""
    calls = before["overhead_calls"], after["overhead_calls"]
    return {"overhead_ms_p50": overhead_ms(*calls, 0.5), "overhead_ms_p95": overhead_ms(*calls, 0.95)}
