# SPDX-License-Identifier: Apache-2.0
"""Simulated: p moves from 0.1 to 0.5 and back; `batching: auto` beside every constant B.

Each constant B and `auto` run through the same three phases of the paper's pair (SLM steps of 6.0 ms, LLM steps of
27.9 ms). Prints tokens/s by phase, and how far `auto` is from the best constant B of each phase and of the
whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.threshold.controller import Answer, Question
from python_backends.token_router.threshold.forms import r2r
from python_backends.token_router.threshold.profile import Profile, StepLatency
from python_backends.token_router.threshold.solve import feasible_thresholds
from python_backends.token_router.threshold.worker import answer
from tools.simulator.auto import SimulatedAuto
from tools.simulator.config import Phase, SimulationConfig
from tools.simulator.engine import Simulation
from tools.simulator.observer import Observer
from tools.simulator.requests import SimSession

_RATES = (0.1, 0.5, 0.1)
_LATENCIES_MS = (6.0, 27.9)


@dataclass(frozen=True)
class _Run:
    """tokens_per_s: by phase. changes: of B."""

    tokens_per_s: list[float]
    changes: int = 0

    @property
    def whole(self) -> float:
        return sum(self.tokens_per_s) / len(self.tokens_per_s)


class _PhaseMeter(Observer):
    """Tokens by phase."""

    def __init__(self, phase_s: float) -> None:
        self._phase_ns = phase_s * 1e9
        self.tokens = [0] * len(_RATES)

    def routed(self, now: int, session: SimSession, destination: int, tokens: int) -> None:
        self.tokens[min(int(now / self._phase_ns), len(_RATES) - 1)] += tokens


def main(
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="requests at once; default: 4 and 8")] = None,
    phase_s: Annotated[float, typer.Option(min=1.0, help="simulated seconds of each phase")] = 60.0,
    seed: Annotated[int, typer.Option(help="of all randomness")] = 0,
    output: Annotated[Path | None, typer.Option(help="a JSON file to write")] = None,
) -> None:
    """Simulated: p moves from 0.1 to 0.5 and back; `batching: auto` beside every constant B."""
    results = {str(live): _compare(live, phase_s, seed) for live in concurrency or (4, 8)}
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _compare(live: int, phase_s: float, seed: int) -> dict[str, Any]:
    constant = {b: _run(live, phase_s, seed, b) for b in feasible_thresholds(2, live)}
    auto = _run(live, phase_s, seed, None)
    best = [max(run.tokens_per_s[i] for run in constant.values()) for i in range(len(_RATES))]
    best_whole = max(run.whole for run in constant.values())
    table = Table("B", *(f"p = {p}" for p in _RATES), "whole run", title=f"N = {live}, tokens/s")
    for b, run in sorted(constant.items(), key=lambda item: -item[1].whole)[:5]:
        table.add_row(",".join(map(str, b)), *(f"{x:.1f}" for x in (*run.tokens_per_s, run.whole)))
    table.add_row("auto", *(f"{x:.1f}" for x in (*auto.tokens_per_s, auto.whole)))
    shares = [x / y for x, y in zip(auto.tokens_per_s, best, strict=True)]
    table.add_row("auto / best constant", *(f"{x:.1%}" for x in (*shares, auto.whole / best_whole)))
    Console().print(table, f"auto changed B {auto.changes} times")
    return {
        "constant": {",".join(map(str, b)): [*run.tokens_per_s, run.whole] for b, run in constant.items()},
        "auto": [*auto.tokens_per_s, auto.whole],
        "share_of_best": [*shares, auto.whole / best_whole],
        "changes": auto.changes,
    }


def _run(live: int, phase_s: float, seed: int, b: tuple[int, ...] | None) -> _Run:
    """b: None = auto."""
    form = r2r(_RATES[0])
    profile = Profile(
        models=["slm", "llm"], p=form.p, c=form.c, latency=[StepLatency.constant(ms) for ms in _LATENCIES_MS]
    )
    config = SimulationConfig(
        concurrency=live,
        batching=BatchingConfig(threshold=1 if b is None else list(b)),
        phases=[Phase(duration_s=phase_s, p=r2r(p).p) for p in _RATES],
        duration_s=phase_s * len(_RATES),
        warm_up_s=0.0,
        seed=seed,
    )
    simulation = Simulation(profile, config)
    meter = _PhaseMeter(phase_s)
    simulation.observe(meter)
    auto = SimulatedAuto(simulation, profile.models, live, _solve) if b is None else None
    simulation.run()
    changes = auto.controller.changes if auto is not None else 0
    return _Run([tokens / phase_s for tokens in meter.tokens], changes)


def _solve(question: Question) -> Answer:
    return _solved(question.live, question.profile.model_dump_json(), question.applied)


@cache
def _solved(live: int, profile: str, applied: tuple[int, ...]) -> Answer:
    return answer(Question(live, Profile.model_validate_json(profile), applied))


if __name__ == "__main__":
    typer.run(main)
