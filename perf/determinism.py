# SPDX-License-Identifier: Apache-2.0
"""What `deterministic: true` of the llama_cpp engine costs: the same steps with it and without, side by side."""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines import build_engine, parse_engine_config
from python_backends.llm.engines.base import Engine

PROMPT_TOKENS = 200
SLOTS = 16
ROUNDS = 15
# name -> the number of new tokens of each session in a step; 0 = the session is pending, its slot stays taken
SHAPES = {
    "1 session": [1],
    "4 sessions": [1] * 4,
    "4 sessions, a pending one after each": [1, 0] * 4,
    "8 sessions": [1] * 8,
    "suffixes of 1, 5, 9, 12": [1, 5, 9, 12],
    "suffixes of 7, 7, 7, 6": [7, 7, 7, 6],
    "suffixes of 1 to 8": list(range(1, 9)),
}


def _engine(weights: str, deterministic: bool) -> Engine:
    config = {
        "type": "llama_cpp", "weights": weights, "context_tokens": 512, "max_sessions": SLOTS,
        "deterministic": deterministic,
    }  # fmt: skip
    engine = build_engine(parse_engine_config(config), "model", hidden_states=False)
    for session in range(SLOTS):
        engine.open(SessionOpen(session, PROMPT_TOKENS, limit=512))
        engine.step([SessionStep(session, 0, [10 + i for i in range(PROMPT_TOKENS)], sample=False)])
    return engine


def _step_ms(engine: Engine, lengths: list[int]) -> float:
    """The time of one step that appends to the sessions behind their prompts; the next one does so again."""
    batch = [SessionStep(s, PROMPT_TOKENS, [50 + s] * n) for s, n in enumerate(lengths) if n]
    began = time.perf_counter()
    output = engine.step(batch)
    took = (time.perf_counter() - began) * 1000
    if output.errors:
        raise RuntimeError(f"a step failed: {output.errors}")
    return took


def main(weights: Annotated[str, typer.Argument(help="of `tokenrouter models list`")] = "smollm2-135m-q4_0") -> None:
    """What `deterministic: true` costs, in ms for each step, on this machine."""
    engines: dict[bool, Any] = {choice: _engine(weights, choice) for choice in (True, False)}
    table = Table(title=f"{weights}: median ms for a step, {PROMPT_TOKENS}-token contexts, 1 thread")
    for column in ("step", "deterministic", "not", "ratio"):
        table.add_column(column)
    for name, lengths in SHAPES.items():
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(ROUNDS):  # in turns, so that the machine's noise meets both
            for choice, engine in engines.items():
                times[choice].append(_step_ms(engine, lengths))
        with_it, without = (statistics.median(times[choice]) for choice in (True, False))
        table.add_row(name, f"{with_it:.1f}", f"{without:.1f}", f"{with_it / without:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
