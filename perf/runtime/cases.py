# SPDX-License-Identifier: Apache-2.0
"""What is measured. Servers that are compared stand side by side and are loaded in turn, N by N."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from pydantic import BaseModel

from perf.runtime.measure import Measured, Pair, measure, paced_server
from python_backends.token_router.threshold.solve import evaluate, solve

__all__ = ["Row", "ablation", "many", "moving", "newer", "shares"]

Told = Callable[[str], None]

PAPER_N = (1, 2, 4, 8, 16)
_STARTING_AT_ONCE = 2
_NO_CAP = {"max_wait_ms": 60_000.0}  # the Markov model has none

# a Qwen3-32B and a 0.6B prefill on two A100s and one, at about half of their peak: 2 FLOP per weight and token
_PREFILL = Pair(slm_token_ms=0.01, llm_token_ms=0.2)
_ABLATION_TOKENS = 300  # of an answer: what a request without resume prefills again, and again
# paper, appendix E: tokens/s on A100s, by N
_PAPER_ABLATION = {
    "delayed batching": {4: 210.61, 8: 372.48},
    "eager": {4: 161.26, 8: 296.86},
    "step-sync": {4: 143.88, 8: 230.79},
}


class Row(BaseModel):
    """One measurement. name: of the setting; live: N; threshold: B for that N; theory: T(B*) where it is compared;
    predicted: T of this row's own B; paper: the paper's figure."""

    name: str
    live: int
    threshold: list[int] | None = None
    theory: float | None = None
    predicted: float | None = None
    paper: float | None = None
    measured: Measured

    @property
    def share(self) -> float | None:
        """Of the theory's T(B*)."""
        return None if self.theory is None else self.measured.tokens_per_s / self.theory


class Best(BaseModel):
    """B* and T(B*) for N live requests."""

    threshold: tuple[int, ...]
    throughput: float

    @classmethod
    def of(cls, pair: Pair, live: int) -> Best:
        solution = solve(pair.profile(), live)
        return cls(threshold=solution.best, throughput=solution.throughput[solution.best].throughput)


def _compare(
    pair: Pair,
    settings: Mapping[str, Mapping[str, Any]],
    runs: list[tuple[int, str]],
    seconds: int,
    told: Told,
    **load: Any,
) -> dict[tuple[int, str], Measured]:
    """Servers for all settings at once; then the runs (N, setting) in their order."""
    with ExitStack() as stack:
        told(f"starting {len(settings)} servers")
        with ThreadPoolExecutor(_STARTING_AT_ONCE) as pool:
            started = pool.map(lambda batching: stack.enter_context(paced_server(pair, batching)), settings.values())
            servers = dict(zip(settings, started, strict=True))
        done = {}
        for live, name in runs:
            told(f"N = {live}, {name}")
            done[live, name] = measure(servers[name], live, seconds, **load)
        return done


def _at_best(
    pair: Pair, counts: tuple[int, ...], ways: Mapping[str, Mapping[str, Any]], seconds: int, told: Told
) -> list[Row]:
    """Each way of running at B*, for each N of `counts`."""
    best = {n: Best.of(pair, n) for n in counts}
    delayed = {"threshold": {n: list(b.threshold) for n, b in best.items()}, **_NO_CAP}
    settings = {name: {**delayed, **way} for name, way in ways.items()}
    done = _compare(pair, settings, [(n, name) for n in counts for name in settings], seconds, told)
    return [
        Row(name=name, live=n, threshold=list(best[n].threshold), theory=best[n].throughput, measured=measured)
        for (n, name), measured in done.items()
    ]


def shares(seconds: int, told: Told) -> list[Row]:
    """The share of T(B*) for each N, the Bs around B*, and what foresight does for it."""
    pair = Pair()
    best = {n: Best.of(pair, n) for n in PAPER_N}
    offsets = {"B* - 1": -1, "B*": 0, "B* + 1": 1}
    tables: dict[str, dict[int, list[int]]] = {"eager": {n: [1, 1] for n in PAPER_N if n > 1}}
    for name, offset in offsets.items():
        around = {n: [b.threshold[0], b.threshold[1] + offset] for n, b in best.items()}
        tables[name] = {n: b for n, b in around.items() if b[1] >= 1 and sum(x - 1 for x in b) < n}
    settings = {name: {"threshold": table, **_NO_CAP} for name, table in tables.items()}
    ways = {"B*, nothing sent ahead": {"send_ahead": False}, "B*, hold": {"hold": True}}
    for name, way in ways.items():
        settings[name] = {**settings["B*"], **way}
        tables[name] = tables["B*"]
    runs = []
    for n in PAPER_N:
        seen: list[list[int]] = []
        for name, table in tables.items():
            apart = name in ways and n > 2  # with one or two at once the ways differ by less than the noise
            if n in table and (apart or table[n] not in seen):
                seen.append(table[n])
                runs.append((n, name))
    done = _compare(pair, settings, runs, seconds, told)
    return [
        Row(
            name=name,
            live=n,
            threshold=tables[name][n],
            theory=best[n].throughput,
            predicted=evaluate(pair.profile(), n, tables[name][n]).throughput,
            measured=measured,
        )
        for (n, name), measured in done.items()
    ]


def ablation(seconds: int, told: Told) -> list[Row]:
    """The policies of the paper on models that also charge for prefilling."""
    best = {n: list(Best.of(Pair(), n).threshold) for n in (4, 8)}
    delayed = {"threshold": best, **_NO_CAP}
    settings: dict[str, Mapping[str, Any]] = {
        "no resume": {"threshold": 1, "resume": False},
        "model-sync": {"policy": "model_sync"},
        "step-sync": {"policy": "step_sync"},
        "eager": {"threshold": 1},
        "delayed batching": delayed,
    }
    runs = [(n, name) for n in best for name in settings]
    done = _compare(_PREFILL, settings, runs, seconds, told, max_tokens=_ABLATION_TOKENS)
    return [
        Row(name=name, live=n, paper=_PAPER_ABLATION.get(name, {}).get(n), measured=measured)
        for (n, name), measured in done.items()
    ]


def moving(seconds: int, told: Told, live: int = 4) -> list[Row]:
    """p = 0.1, 0.5, 0.1: `auto` beside every constant B of the LLM."""
    pair = Pair()
    constants = {f"B = 1,{b}": [1, b] for b in range(1, live + 1)}
    settings: dict[str, Mapping[str, Any]] = {name: {"threshold": b, **_NO_CAP} for name, b in constants.items()}
    settings["auto"] = {"threshold": "auto", **_NO_CAP}
    runs = [(live, name) for name in settings]
    done = _compare(pair, settings, runs, seconds, told, p=(0.1, 0.5, 0.1), max_tokens=400)
    return [
        Row(name=name, live=n, threshold=constants.get(name), measured=measured) for (n, name), measured in done.items()
    ]


def newer(seconds: int, told: Told) -> list[Row]:
    """Steps of 2 and 12 ms: what the runtime costs there, and what run-ahead and holding buy."""
    ways = {"B*": {}, "B*, run-ahead 8": {"run_ahead": 8}, "B*, hold, run-ahead 8": {"hold": True, "run_ahead": 8}}
    return _at_best(Pair(slm_ms=2.0, llm_ms=12.0), (4, 16), ways, seconds, told)


def many(seconds: int, told: Told) -> list[Row]:
    """Many requests at once: the paper's pair at N = 64, and models that cost nothing, from 4 to 64."""
    rows = _at_best(Pair(), (64,), {"B*": {}, "B*, hold": {"hold": True}}, seconds, told)
    free = Pair(slm_ms=0.0, llm_ms=0.0)
    costless = _compare(free, {"engines of 0 ms": {}}, [(n, "engines of 0 ms") for n in (4, 16, 64)], seconds, told)
    return rows + [Row(name=name, live=n, measured=measured) for (n, name), measured in costless.items()]
