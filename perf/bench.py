# SPDX-License-Identifier: Apache-2.0
"""`make bench`: what the runtime costs beside the engine, and what routing gains on real models.

Everything comes from one run, side by side. The runtime's part is measured on `paced` models, whose steps
take a known time; the client is a process of its own, as a user's would be, on the same cores.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from python_backends.llm.catalog import WeightsError
from tools.client import Answer, TokenRouterClient
from tools.deployment import Deployment
from tools.errors import UserError
from tools.own_server import own_server
from tools.supervisor import RunningServer, running_server

STEP_MS = 10.0
SESSIONS = 8
QUESTIONS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python function that checks whether a string is a palindrome, ignoring case and spaces.",
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a Python function that counts the vowels in a string.",
]
console = Console()


def _paced(step_ms: float, run_ahead: int = 1, **engine: Any) -> Deployment:
    """One paced model, no routing: what is left besides the engine is the runtime."""
    return Deployment.model_validate(
        {
            "models": [{"name": "slm", "engine": {"type": "paced", "step_ms": step_ms, **engine}}],
            "router": {"name": "single"},
            "batching": {"run_ahead": run_ahead},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        }
    )


def _together(url: str, count: int, **request: Any) -> list[list[tuple[float, int]]]:
    """`count` requests at once: for each the arrival (seconds) and the size (tokens) of every chunk."""
    start = threading.Barrier(count)

    def one(_: int) -> list[tuple[float, int]]:
        with TokenRouterClient(url) as client:
            start.wait()
            generation = client.generate(input_ids=[5, 6, 7], ignore_eos=True, **request)
            return [(generation.sent_at, 0), *((c.received_at, len(c.ids)) for c in generation)]

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def _processes(server: RunningServer) -> list[psutil.Process]:
    triton = psutil.Process(server.pid)
    return [triton, *triton.children(recursive=True)]


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def _step_cost_ms(step_ms: float, run_ahead: int = 1, stream: bool = True) -> dict[str, float]:
    """What a decoding step of 8 sessions takes beside the engine, as token_router measures it: from the end of one
    call to the end of the next less the engine's own time, for each step of the call."""
    with running_server(_paced(step_ms, run_ahead)) as server:
        _together(server.grpc_url, SESSIONS, max_tokens=1000, stream=stream)
        model = server.control.status().models["slm"]
    return {"p50": model["overhead_ms_p50"], "p95": model["overhead_ms_p95"]}


def _inter_token_cost_ms() -> dict[str, float]:
    """The time between two streamed tokens beyond the engine's step, as each of 8 clients sees it."""
    with running_server(_paced(STEP_MS)) as server:
        _together(server.grpc_url, SESSIONS, max_tokens=50)
        streams = _together(server.grpc_url, SESSIONS, max_tokens=400)
    gaps: list[float] = []
    for stream in streams:
        arrivals = stream[len(stream) // 4 :]  # all eight are running by then
        gaps += [(b - a) * 1000 / n - STEP_MS for (a, _), (b, n) in itertools.pairwise(arrivals) if n]
    return _quantiles(gaps)


def _streaming_cost() -> dict[str, float]:
    """What a token costs where the engine costs nothing: throughput, and CPU time of all server processes."""
    out: dict[str, float] = {}
    with running_server(_paced(0.0)) as server:
        _together(server.grpc_url, SESSIONS, max_tokens=50)
        processes = _processes(server)
        for name, stream in (("streamed", True), ("whole", False)):
            cpu, began = _cpu_s(processes), time.monotonic()
            chunks = _together(server.grpc_url, SESSIONS, max_tokens=500, stream=stream)
            tokens = sum(n for c in chunks for _, n in c)
            out[f"{name}_tokens_per_s"] = tokens / (time.monotonic() - began)
            out[f"{name}_cpu_ms_per_token"] = (_cpu_s(processes) - cpu) * 1000 / tokens
    return out


def _first_token_and_idle(idle_s: float) -> dict[str, Any]:
    """TTFT above the engine's own time on an idle server, and what the idle server costs."""
    above = []
    with running_server(_paced(STEP_MS)) as server, TokenRouterClient(server.grpc_url) as client:
        for _ in range(60):
            before = server.control.status().models["slm"]["engine_ms"]
            answer = Answer.of(client.generate(input_ids=[5] * 100, max_tokens=1))
            engine_ms = server.control.status().models["slm"]["engine_ms"] - before
            if answer.ttft_s is not None:
                above.append(answer.ttft_s * 1000 - engine_ms)
        processes = _processes(server)
        cpu = _cpu_s(processes)
        time.sleep(idle_s)
        idle = (_cpu_s(processes) - cpu) / idle_s * 100
    return {"ttft_above_prefill_ms": _quantiles(above[10:]), "idle_cpu_percent": idle}


def _quantiles(values: list[float]) -> dict[str, float]:
    return {"p50": statistics.median(values), "p95": statistics.quantiles(values, n=20)[-1], "samples": len(values)}


def runtime_cost(idle_s: float) -> dict[str, Any]:
    """The runtime's own cost, on paced models."""
    return {
        "sessions": SESSIONS,
        "step_cost_ms": [
            {
                "engine_ms": engine_ms,
                "streamed": streamed,
                "step": _step_cost_ms(engine_ms, stream=streamed),
                "step_of_run_ahead_4": _step_cost_ms(engine_ms, run_ahead=4, stream=streamed),
            }
            for engine_ms in (0.0, STEP_MS)
            for streamed in (False, True)
        ],
        "inter_token_cost_ms": _inter_token_cost_ms(),
        **_streaming_cost(),
        **_first_token_and_idle(idle_s),
    }


@dataclass(frozen=True)
class _Setting:
    """How one server answers in three ways: R-Stitch's threshold alone decides who writes."""

    name: str
    tau: float


SETTINGS = [_Setting("SLM alone", 1.0), _Setting("routed", 0.05), _Setting("LLM alone", 0.0)]


def routed_gain(config: Path | None, max_tokens: int) -> list[dict[str, Any]]:
    """Tokens/s of routing beside each model alone: same server, same run, 1 and 4 requests at once.

    "Alone" is said of the writing: either way both models prefill every prompt, as this deployment has it.
    """
    with own_server(config, console) as server:
        _routed_row(server.grpc_url, SETTINGS[1], 4, max_tokens=8)  # warm-up
        return [
            _routed_row(server.grpc_url, setting, at_once, max_tokens) for at_once in (1, 4) for setting in SETTINGS
        ]


def _routed_row(url: str, setting: _Setting, at_once: int, max_tokens: int) -> dict[str, Any]:
    def ask(question: str) -> Answer:
        with TokenRouterClient(url) as client:
            return Answer.of(
                client.generate(
                    messages=[{"role": "user", "content": question}],
                    max_tokens=max_tokens,
                    router_params={"tau": setting.tau},
                )
            )

    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(ask, QUESTIONS))
    wall_s = time.monotonic() - began
    tokens = sum(len(a.ids) for a in answers)
    by_model: dict[str, int] = {}
    for answer in answers:
        for name, count in answer.usage["completion_tokens_by_model"].items():
            by_model[name] = by_model.get(name, 0) + count
    return {
        "setting": setting.name,
        "tau": setting.tau,
        "at_once": at_once,
        "tokens": tokens,
        "tokens_per_s": tokens / wall_s,
        "tokens_by_model": by_model,
        "handoffs": sum(a.usage["handoffs"] for a in answers),
        "ttft_s": statistics.median(a.ttft_s or 0.0 for a in answers),
    }


def _show_runtime(result: dict[str, Any]) -> None:
    table = Table(title=f"The runtime's cost beside the engine ({SESSIONS} sessions, paced models)")
    for column in ("what", "p50 / value", "p95", "aim"):
        table.add_column(column)
    for case in result["step_cost_ms"]:
        how = f"engine {case['engine_ms']:g} ms, {'streamed' if case['streamed'] else 'not streamed'}"
        step, ahead = case["step"], case["step_of_run_ahead_4"]
        table.add_row(f"decoding step, {how}, ms", f"{step['p50']:.2f}", f"{step['p95']:.2f}", "0.6")
        quarter = f"{step['p50'] / 4:.2f}, a quarter"
        table.add_row("  with run-ahead 4", f"{ahead['p50']:.2f}", f"{ahead['p95']:.2f}", quarter)
    for what, key, aim in (
        (f"between streamed tokens, engine {STEP_MS:g} ms, ms", "inter_token_cost_ms", ""),
        ("TTFT above the engine's prefill, ms", "ttft_above_prefill_ms", "5"),
    ):
        table.add_row(what, f"{result[key]['p50']:.2f}", f"{result[key]['p95']:.2f}", aim)
    table.add_row("server CPU per streamed token, ms", f"{result['streamed_cpu_ms_per_token']:.2f}", "", "")
    table.add_row("server CPU per token, not streamed, ms", f"{result['whole_cpu_ms_per_token']:.2f}", "", "")
    table.add_row("tokens/s, engine 0 ms, streamed", f"{result['streamed_tokens_per_s']:.0f}", "", "")
    table.add_row("tokens/s, engine 0 ms, not streamed", f"{result['whole_tokens_per_s']:.0f}", "", "")
    table.add_row("idle CPU, % of a core", f"{result['idle_cpu_percent']:.2f}", "", "1")
    console.print(table)


def _show_routed(rows: list[dict[str, Any]]) -> None:
    table = Table(title="R-Stitch beside each model alone (same server, same run)")
    for column in ("requests at once", "setting", "tokens/s", "of LLM alone", "tokens by model", "handoffs", "TTFT s"):
        table.add_column(column)
    for row in rows:
        alone = next(r for r in rows if r["at_once"] == row["at_once"] and r["setting"] == "LLM alone")
        table.add_row(
            str(row["at_once"]),
            row["setting"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s'] / alone['tokens_per_s']:.2f}x",
            ", ".join(f"{k} {v}" for k, v in row["tokens_by_model"].items()),
            str(row["handoffs"]),
            f"{row['ttft_s']:.2f}",
        )
    console.print(table)


def main(
    config: Annotated[Path | None, typer.Option(help="deployment of the routed part; default: the shipped one")] = None,
    real: Annotated[bool, typer.Option(help="run the part on real models")] = True,
    max_tokens: Annotated[int, typer.Option(help="of each answer of the routed part")] = 128,
    idle_s: Annotated[float, typer.Option(help="how long the idle server is watched")] = 10.0,
    output: Annotated[Path, typer.Option(help="where the figures go, as JSON")] = Path("perf/results/bench.json"),
) -> None:
    """What the runtime costs beside the engine, and what routing gains on real models."""
    result: dict[str, Any] = {"runtime": runtime_cost(idle_s)}
    _show_runtime(result["runtime"])
    _write(result, output)
    if real:
        try:
            result["routed"] = routed_gain(config, max_tokens)
        except (UserError, WeightsError) as error:
            console.print(f"the part on real models was not run: {error}", style="red")
            raise typer.Exit(1) from None
        _show_routed(result["routed"])
        _write(result, output)
    console.print(f"figures: {output}")


def _write(result: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
