# SPDX-License-Identifier: Apache-2.0
"""Profiles and short runs for the simulator's tests."""

from __future__ import annotations

from typing import Any

from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.threshold.profile import Profile, StepLatency
from tools.simulator.config import SimulationConfig
from tools.simulator.engine import Simulation
from tools.simulator.results import SimulationResult

__all__ = ["ALWAYS", "r2r", "run", "simulation"]

# Every token is one step of the SLM, whose token is dropped, and one of the LLM: no chance in it.
ALWAYS = 1.0


def r2r(p: float, slm_ms: float = 6.0, llm_ms: float = 27.9, **profile: Any) -> Profile:
    """The paper's example pair (appendix D)."""
    return Profile.model_validate(
        {
            "models": ["slm", "llm"],
            "p": [[1 - p, p], [1, 0]],
            "c": [[1, 0], [1, 0]],
            "latency": [StepLatency.constant(slm_ms), StepLatency.constant(llm_ms)],
        }
        | profile
    )


def simulation(profile: Profile, batching: dict[str, Any] | None = None, **config: Any) -> Simulation:
    """Ready to run."""
    return Simulation(profile, SimulationConfig(batching=BatchingConfig(**batching or {}), **config))


def run(profile: Profile, batching: dict[str, Any] | None = None, **config: Any) -> SimulationResult:
    """Run."""
    return simulation(profile, batching, **config).run()
