# SPDX-License-Identifier: Apache-2.0
"""One server, one or more loads on it, and what each of them got."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
from pydantic import BaseModel

from perf.runtime.clients import ClientResult, ClientSpec, PhaseSpec
from python_backends.token_router.step_clock import overhead_ms
from python_backends.token_router.threshold.forms import r2r
from python_backends.token_router.threshold.profile import Profile, StepLatency
from tools.deployment import Deployment
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

    def deployment(self, batching: Mapping[str, Any]) -> Deployment:
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
                "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
            }
        )


class Measured(BaseModel):
    """What one load got.

    tokens_per_s, error: over all phases, with its standard error. phases: of each phase. by_second: tokens.
    client_cpu, server_cpu: cores in use, by the clients' process and by each of the server's.
    models: for each, from its own report, under this load only: steps/s and the runtime's part of a step, p50 and p95
        (None where the model had nothing to do before its calls).
    """

    tokens_per_s: float
    error: float
    phases: list[float]
    by_second: list[int]
    client_cpu: float
    server_cpu: dict[str, float]
    models: dict[str, dict[str, float | None]]

    @property
    def server_cpu_ms(self) -> float:
        """CPU time of the server for each token."""
        return sum(self.server_cpu.values()) * 1000 / self.tokens_per_s


@contextmanager
def paced_server(pair: Pair, batching: Mapping[str, Any]) -> Iterator[RunningServer]:
    """The pair under these batching settings, serving until the block ends."""
    with running_server(pair.deployment(batching)) as server:
        yield server


def measure(
    server: RunningServer, clients: int, seconds: int, *, max_tokens: int = 1000, p: Sequence[float] = ()
) -> Measured:
    """Closed-loop clients for `seconds`, or for `seconds` with each p in turn."""
    phases = [PhaseSpec(seconds=seconds, router_params={"p": x}) for x in p] or [PhaseSpec(seconds=seconds)]
    spec = ClientSpec(url=server.grpc_url, clients=clients, max_tokens=max_tokens, warmup_s=_WARMUP_S, phases=phases)
    pids = {"tritonserver": server.pid, **server.stub_pids()}
    before, cpu_s = server.control.status().models, _cpu_s(pids)
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
    after, cpu_after_s = server.control.status().models, _cpu_s(pids)
    result = ClientResult.model_validate_json(done.stdout)
    total_s = sum(phase.seconds for phase in result.phases)
    return Measured(
        tokens_per_s=sum(sum(phase.tokens) for phase in result.phases) / total_s,
        error=sum((phase.error * phase.seconds) ** 2 for phase in result.phases) ** 0.5 / total_s,
        phases=[phase.tokens_per_s for phase in result.phases],
        by_second=[tokens for phase in result.phases for tokens in phase.tokens],
        client_cpu=result.cpu_s / total_s,
        server_cpu={name: (cpu_after_s[name] - cpu_s[name]) / (total_s + _WARMUP_S) for name in pids},
        models={name: _steps(before[name], after[name], total_s + _WARMUP_S) for name in after},
    )


def _steps(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> dict[str, float | None]:
    """What a model did in these seconds, by its status (`StepClock.summary`) before and after."""
    calls = before["overhead_calls"], after["overhead_calls"]
    return {
        "steps_per_s": (after["steps"] - before["steps"]) / seconds,
        "overhead_ms_p50": overhead_ms(*calls, 0.5),
        "overhead_ms_p95": overhead_ms(*calls, 0.95),
    }


def _cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
