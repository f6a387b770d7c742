# SPDX-License-Identifier: Apache-2.0
"""What is measured. Servers that are compared stand side by side and are loaded in turn, N by N.

A measurement of twenty seconds or more is several rounds, each with a seed of its own. For each N, round after round,
every setting is loaded with the round's seed: settings draw the same routes at about the same time, so their
difference is surer than either of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from pydantic import BaseModel

from perf.runtime.measure import Measured, Pair, measure, paced_server
from python_backends.token_router.config import Transport
from python_backends.token_router.threshold.solve import evaluate, feasible_thresholds, solve
from tools.supervisor import RunningServer

__all__ = ["BEST", "MOVING_P", "NEWER", "Row", "ablation", "constants", "many", "moving", "newer", "shares"]

Told = Callable[[str], None]

BEST = "B*"
PAPER_N = (1, 2, 4, 8, 16)
MOVING_P = (0.1, 0.5, 0.1)
NEWER = Pair(slm_ms=2.0, llm_ms=12.0)  # on a newer GPU than the paper's
_OTHER_FIRST = 8  # from this N on, B of the first model is varied too
_ROUND_S = 10
_STARTING_AT_ONCE = 2
_NO_CAP = {"max_wait_ms": 60_000.0}  # the Markov model has none
_COLD = {"send_ahead": False}
_BY_BLS = "B*, steps by BLS"
_BY_BLS_N = (1, 8)

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
    """One measurement. name: of the setting; live: N; against: the setting it is compared with, second by second;
    threshold: B for that N; theory: T(B*) where it is compared; predicted: T of this row's own B; paper: the paper's
    figure."""

    name: str
    live: int
    against: str | None = None
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
    by_bls: Collection[str] = (),
    **load: Any,
) -> dict[tuple[int, str], Measured]:
    """Servers for all settings (of batching) at once; then the runs (N, setting) in their order, for each N in rounds.
    by_bls: the settings whose steps go by BLS."""
    with ExitStack() as stack:

        def start(name: str) -> RunningServer:
            transport: Transport = "bls" if name in by_bls else "socket"
            return stack.enter_context(paced_server(pair, settings[name], transport))

        told(f"starting {len(settings)} servers")
        with ThreadPoolExecutor(_STARTING_AT_ONCE) as pool:
            servers = dict(zip(settings, pool.map(start, settings), strict=True))
        done: dict[tuple[int, str], list[Measured]] = {run: [] for run in runs}
        rounds = 1 if "p" in load else max(1, seconds // _ROUND_S)
        for live in dict.fromkeys(n for n, _ in runs):
            for seed in range(1, rounds + 1):
                for name in (name for n, name in runs if n == live):
                    told(f"N = {live}, {name}, round {seed} of {rounds}")
                    measured = measure(servers[name], live, seconds // rounds, seed=seed, **load)
                    done[live, name].append(measured)
        return {run: parts[0] if rounds == 1 else Measured.mean(parts) for run, parts in done.items()}


def _at_best(
    pair: Pair, counts: tuple[int, ...], ways: Mapping[str, Mapping[str, Any]], seconds: int, told: Told
) -> list[Row]:
    """Each way of running at B*, for each N of `counts`."""
    best = {n: Best.of(pair, n) for n in counts}
    delayed = {"threshold": {n: list(b.threshold) for n, b in best.items()}, **_NO_CAP}
    settings = {name: {**delayed, **way} for name, way in ways.items()}
    done = _compare(pair, settings, [(n, name) for n in counts for name in settings], seconds, told)
    return [
        Row(
            name=name,
            live=n,
            against=None if name == BEST else BEST,
            threshold=list(best[n].threshold),
            theory=best[n].throughput,
            measured=measured,
        )
        for (n, name), measured in done.items()
    ]


def _around(pair: Pair, best: Mapping[int, Best]) -> dict[str, dict[int, list[int]]]:
    """For each N of `best`, B* and the B to compare it with, by name: B = 1 everywhere, what is feasible of B* - 1 and
    B* + 1 (of the LLM), and the best of those with a B of the SLM that is one away."""
    tables: dict[str, dict[int, list[int]]] = {"eager": {n: [1, 1] for n in best if n > 1}}
    for name, offset in {"B* - 1": -1, BEST: 0, "B* + 1": 1}.items():
        around = {n: [b.threshold[0], b.threshold[1] + offset] for n, b in best.items()}
        tables[name] = {n: b for n, b in around.items() if b[1] >= 1 and sum(x - 1 for x in b) < n}
    others = {}
    for n in (n for n in best if n >= _OTHER_FIRST):
        apart = [b for b in feasible_thresholds(2, n) if abs(b[0] - best[n].threshold[0]) == 1]
        others[n] = list(solve(pair.profile(), n, candidates=apart).best)
    tables["another B of the SLM"] = others
    return tables


def shares(seconds: int, told: Told) -> list[Row]:
    """The share of T(B*) for each N, the Bs around B*, and what foresight and the socket do for it."""
    pair = Pair()
    best = {n: Best.of(pair, n) for n in PAPER_N}
    tables = _around(pair, best)
    settings: dict[str, dict[str, Any]] = {name: {"threshold": table, **_NO_CAP} for name, table in tables.items()}
    ways: dict[str, dict[str, Any]] = {"B*, nothing sent ahead": _COLD, "B*, hold": {"hold": True}, _BY_BLS: {}}
    for name, way in ways.items():
        settings[name] = {**settings[BEST], **way}
        tables[name] = tables[BEST]
    runs = []
    for n in PAPER_N:
        seen: list[list[int]] = []
        for name, table in tables.items():
            # with one or two at once, most ways differ by less than the noise
            apart = n in _BY_BLS_N if name == _BY_BLS else name in ways and n > 2
            if n in table and (apart or table[n] not in seen):
                seen.append(table[n])
                runs.append((n, name))
    done = _compare(pair, settings, runs, seconds, told, by_bls=[_BY_BLS])
    return [
        Row(
            name=name,
            live=n,
            against=None if name == BEST else BEST,
            threshold=tables[name][n],
            theory=best[n].throughput,
            predicted=evaluate(pair.profile(), n, tables[name][n]).throughput,
            measured=measured,
        )
        for (n, name), measured in done.items()
    ]


def ablation(seconds: int, told: Told) -> list[Row]:
    """The policies of the paper on models that also charge for prefilling. Only `async` sends calls ahead: eager and
    delayed run without that too, to be compared with the synchronous ones."""
    best = {n: list(Best.of(Pair(), n).threshold) for n in (4, 8)}
    eager, delayed = {"threshold": 1}, {"threshold": best, **_NO_CAP}
    cold = "eager, nothing sent ahead"
    ways: dict[str, tuple[Mapping[str, Any], str | None]] = {
        "no resume": ({**eager, "resume": False}, "eager"),
        "step-sync": ({"policy": "step_sync"}, cold),
        "model-sync": ({"policy": "model_sync"}, cold),
        cold: ({**eager, **_COLD}, None),
        "delayed batching, nothing sent ahead": ({**delayed, **_COLD}, cold),
        "eager": (eager, None),
        "delayed batching": (delayed, "eager"),
    }
    settings = {name: batching for name, (batching, _) in ways.items()}
    done = _compare(
        _PREFILL, settings, [(n, name) for n in best for name in ways], seconds, told, max_tokens=_ABLATION_TOKENS
    )
    return [
        Row(name=name, live=n, against=ways[name][1], paper=_PAPER_ABLATION.get(name, {}).get(n), measured=measured)
        for (n, name), measured in done.items()
    ]


def moving(seconds: int, told: Told, live: int = 4) -> list[Row]:
    """p = 0.1, 0.5, 0.1: `auto` beside the constant B that the model says are the best of a phase, and of the whole."""
    pair = Pair()
    by_phase = [{b: t.throughput for b, t in solve(pair.profile(p), live).throughput.items()} for p in MOVING_P]
    whole = {b: sum(phase[b] for phase in by_phase) for b in by_phase[0]}
    return _moving(pair, sorted({max(t, key=t.__getitem__) for t in (*by_phase, whole)}), seconds, told, live)


def constants(seconds: int, told: Told, live: int = 4) -> list[Row]:
    """The same beside every feasible constant B."""
    return _moving(Pair(), feasible_thresholds(2, live), seconds, told, live)


def _moving(pair: Pair, constant: list[tuple[int, ...]], seconds: int, told: Told, live: int) -> list[Row]:
    names = {f"B = {','.join(map(str, b))}": list(b) for b in constant}
    settings: dict[str, Mapping[str, Any]] = {name: {"threshold": b, **_NO_CAP} for name, b in names.items()}
    settings["auto"] = {"threshold": "auto", **_NO_CAP}
    done = _compare(pair, settings, [(live, name) for name in settings], seconds, told, p=MOVING_P, max_tokens=400)
    return [
        Row(
            name=name,
            live=n,
            against=None if name == "auto" else "auto",
            threshold=names.get(name),
            measured=measured,
        )
        for (n, name), measured in done.items()
    ]


def newer(seconds: int, told: Told) -> list[Row]:
    """Steps of 2 and 12 ms: what the runtime costs there, and what run-ahead and holding buy, alone and together."""
    ways: dict[str, Mapping[str, Any]] = {
        BEST: {},
        "B*, run-ahead 8": {"run_ahead": 8},
        "B*, hold": {"hold": True},
        "B*, hold, run-ahead 8": {"hold": True, "run_ahead": 8},
    }
    return _at_best(NEWER, (4, 16), ways, seconds, told)


def many(seconds: int, told: Told) -> list[Row]:
    """Many requests at once: the paper's pair at N = 64, and models that cost nothing, from 4 to 64."""
    rows = _at_best(Pair(), (64,), {BEST: {}, "B*, hold": {"hold": True}}, seconds, told)
    free = Pair(slm_ms=0.0, llm_ms=0.0)
    costless = _compare(free, {"engines of 0 ms": {}}, [(n, "engines of 0 ms") for n in (4, 16, 64)], seconds, told)
    return rows + [Row(name=name, live=n, measured=measured) for (n, name), measured in costless.items()]
