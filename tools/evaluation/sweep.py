# SPDX-License-Identifier: Apache-2.0
"""A sweep: every point of every router on the same questions, one server for each router, and what to compare with."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from python_backends.llm.catalog import CATALOG, locate_tokenizer
from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.token_router.tokenizer import Tokenizer
from routers import RouterConfig
from routers.neural import NeuralParams
from routers.weights import locate_router
from tools.alone import alone
from tools.commands.outputs import new_figure
from tools.control import ControlClient
from tools.deployment import Deployment
from tools.errors import UserError
from tools.evaluation.answers import Answered, AnswerFile
from tools.evaluation.asking import Asking, ask_all
from tools.evaluation.progress import Bar
from tools.evaluation.query_level import entropies, frontier, random_line
from tools.evaluation.report import LLM_ONLY, RANDOM, SLM_ONLY, SweepResult, write_report
from tools.evaluation.spec import Point, SweepSpec, points_of
from tools.evaluation.summary import PointResult, way_up
from tools.evaluation.tasks import digest, questions, selected
from tools.models import fetch
from tools.own_server import own_server_of
from tools.validate import check

__all__ = ["Bench", "sweep"]

_RANDOM = RouterConfig(name="random")
_LOCK = ".lock"

# of an engine's configuration: how much it holds, in which memory, and how long things take
_NEVER_MATTERS = frozenset(
    {
        "calls_at_once",
        "cancellation_check_period_ms",
        "context_tokens",
        "free_memory_fraction",
        "host_cache_bytes",
        "kv_cache_free_gpu_mem_fraction",
        "kv_cache_host_memory_bytes",
        "kv_tokens",
        "max_queue_delay_microseconds",
        "max_queue_size",
        "max_sessions",
        "max_tokens",
        "prefill_token_ms",
        "retention_ms",
        "retention_priority",
        "step_ms",
    }
)


class Bench:
    """The questions, the folder with the answers, and the deployment that is asked. Raises UserError."""

    def __init__(self, spec: SweepSpec, deployment: Deployment, folder: Path, console: Console) -> None:
        if deployment.tokenizer is None:
            raise UserError("tokenizer: is null; questions in words need one")
        everything = questions(spec.task)
        self.spec = spec
        self.deployment = deployment
        self.console = console
        self.questions = selected(everything, spec.problems)
        self.tokenizer = Tokenizer(locate_tokenizer(deployment.tokenizer))
        self._digest = digest(everything)
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output: {folder}: can't be made: {error.strerror}") from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While the folder is worked in. Raises UserError when another process does so."""
        refused = f"--output: another `tokenrouter eval` works in {self._folder}; wait for its end, or give another"
        with ExitStack() as held:
            try:
                held.enter_context(alone(self._folder / _LOCK, refused))
            except OSError as error:
                raise UserError(f"--output: {self._folder}: can't be written: {error.strerror}") from error
            yield

    def file(self, point: Point) -> AnswerFile:
        """The answers to a point so far."""
        return AnswerFile(self._folder / _file_name(point), self._settings(point))

    def missing(self, point: Point) -> int:
        """How many questions it has not answered."""
        return len(self.questions) - len(self.answers(point))

    def answers(self, point: Point) -> list[Answered]:
        return self.file(point).of([q.id for q in self.questions])

    def ask(self, point: Point, grpc_url: str, control: ControlClient | None) -> None:
        """What is missing of a point, from a server that was started with its router."""
        file = self.file(point)
        asking = Asking(
            max_tokens=self.spec.max_tokens,
            router_params=point.overrides,
            temperature=self.spec.temperature if point.samples else 0.0,
            seed=self.spec.seed,
            concurrency=self.spec.concurrency,
        )
        with Bar(self.console, point.label, len(self.questions), file.of([q.id for q in self.questions])) as bar:
            ask_all(grpc_url, control, self.tokenizer, self.questions, asking, file, bar.answered)

    def result(self, point: Point) -> PointResult:
        """The figures of a point that has answers."""
        file = self.file(point)
        result = PointResult.of(
            file.of([q.id for q in self.questions]),
            file.traffic,
            self.deployment.model_names,
            label=point.label,
            group=point.group,
            value=point.value,
            router=point.router.name,
            router_params=_shown({**point.router.params, **point.overrides}),
        )
        if not self.spec.speed:
            result.tokens_per_s = None
        return result

    def _settings(self, point: Point) -> dict[str, Any]:
        """What the answers depend on."""
        params = {**point.router.params, **point.overrides}
        return {
            "task": self.spec.task.model_dump(),
            "questions": self._digest,
            "models": {m.name: _engine(m.engine.model_dump()) for m in self.deployment.models},
            "tokenizer": Path(self.deployment.tokenizer or "").name,
            "router": point.router.name,
            "params": _shown(params),
            "router_weights": _digest_of_weights(point.router, params),
            "max_tokens": self.spec.max_tokens,
            "temperature": self.spec.temperature if point.samples else 0.0,
            "seed": self.spec.seed,
        }


def sweep(spec: SweepSpec, deployment: Deployment, folder: Path, console: Console) -> SweepResult:
    """Measures what is missing in `folder` and writes the report there, again after each router.

    Raises UserError, GenerationError, ControlError, SandboxError; run again, it goes on where it was.
    """
    new_figure(1, 1, "eval sweep", "eval")  # what it lacks is told before the work, not after it
    models = deployment.model_names
    if len(models) < 2:
        raise UserError(f"a sweep needs a small and a large model; the deployment has {', '.join(models)}")
    if len(models) > 2 and spec.controls:
        raise UserError(f"controls: true is for two models; the deployment has {', '.join(models)}; allowed: false")
    models_alone = [_alone(SLM_ONLY, 0), _alone(LLM_ONLY, len(models) - 1)]
    points = [point for router in spec.routers for point in points_of(router, models)]
    _check_files([*models_alone, *points])
    bench = Bench(spec, deployment, folder, console)
    with bench.alone():
        return _swept(bench, models_alone, points, folder)


def _swept(bench: Bench, models_alone: Sequence[Point], points: Sequence[Point], folder: Path) -> SweepResult:
    spec = bench.spec
    for point in [*models_alone, *points]:
        bench.file(point)  # settings that don't fit are told before the first hour of work
    groups = _groups([*models_alone, *points])
    _check_served(bench, groups)
    measured: list[Point] = []
    for group in groups:
        _measure(bench, group)
        measured += group
        report(bench, measured, {}, folder)
    controls = _controls(bench, points) if spec.controls else {}
    own = {point.label for point in measured}  # a random point that the spec asks for may be a control too
    added = {c.label: c for c in controls.values() if c is not None and c.label not in own}
    _measure(bench, list(added.values()))
    beside = {label: None if control is None else control.label for label, control in controls.items()}
    return report(bench, [*measured, *added.values()], beside, folder, query_level=spec.query_level)


def report(
    bench: Bench,
    measured: Sequence[Point],
    controls: dict[str, str | None],
    folder: Path,
    *,
    query_level: bool = False,
) -> SweepResult:
    """Writes the report on these points into the folder. Raises UserError."""
    spec = bench.spec
    results = [bench.result(point) for point in measured]
    by_label = {point.label: bench.answers(point) for point in measured}
    slm, llm = by_label.get(SLM_ONLY, []), by_label.get(LLM_ONLY, [])
    for result in results:
        if result.group not in (SLM_ONLY, LLM_ONLY) and (way := way_up(by_label[result.label], slm, llm)) is not None:
            result.way, result.way_low, result.way_high = way
    found = SweepResult(
        settings={
            "task": spec.task.type,
            "questions": len(bench.questions),
            "concurrency": spec.concurrency,
            "max_tokens": spec.max_tokens,
            "first_tokens": spec.first_tokens,
            "seed": spec.seed,
        },
        models=bench.deployment.model_names,
        points=results,
        controls=controls,
    )
    if query_level and slm and llm:
        with Bar(bench.console, "entropy of the SLM's first tokens", len(slm), []) as bar:
            entropy = entropies(
                bench.deployment.models[0],
                bench.tokenizer,
                bench.questions,
                slm,
                spec.first_tokens,
                folder / f"entropy-{spec.first_tokens}.jsonl",
                bar.advance,
            )
        found.query_entropy, found.query_random = frontier(slm, llm, entropy), random_line(slm, llm)
    try:
        write_report(found, folder)
    except OSError as error:
        raise UserError(f"--output: {folder}: can't be written: {error.strerror}") from error
    return found


def _measure(bench: Bench, group: Sequence[Point]) -> None:
    """Points of one server, which is started if one of them misses answers."""
    if not any(bench.missing(point) for point in group):
        return
    with own_server_of(_served_for(bench, group), bench.console) as server:
        for point in group:
            bench.ask(point, server.grpc_url, server.control)


def _served_for(bench: Bench, group: Sequence[Point]) -> Deployment:
    """What the group's server serves."""
    router = group[0].router
    update: dict[str, Any] = {"router": router}
    if router.name == "single":  # the other model would prefill for nothing
        update["batching"] = bench.deployment.batching.model_copy(update={"llm_prefill": "lazy"})
    return bench.deployment.model_copy(update=update)


def _check_served(bench: Bench, groups: Sequence[Sequence[Point]]) -> None:
    """Raises UserError when one of the servers that are needed would be refused at its start: what `tokenrouter
    validate` says of it. Nothing is loaded, but weights of the catalogue that this machine lacks are fetched."""
    needed = [group for group in groups if any(bench.missing(point) for point in group)]
    for index in bench.deployment.here if needed else ():
        engine = bench.deployment.models[index].engine
        if isinstance(engine, LlamaCppConfig) and engine.weights in CATALOG:
            fetch(engine.weights)  # without them, whether a router fits them isn't known
    lines = []
    for group in needed:
        for problem in check(_served_for(bench, group)):
            of_router = problem.path.split(".")[0] == "router"
            lines.append(f"{group[0].label}: {problem}" if of_router else str(problem))
    if lines:
        raise UserError(dict.fromkeys(lines))  # what has nothing to do with the router is found for each


def _groups(points: Iterable[Point]) -> list[list[Point]]:
    """By the router that the server is started with, in order."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.router.model_dump_json(), []).append(point)
    return list(groups.values())


def _file_name(point: Point) -> str:
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", point.label) + ".jsonl"


def _check_files(points: Iterable[Point]) -> None:
    """Raises UserError when two points would be kept in one file."""
    labels: dict[str, str] = {}
    for point in points:
        name = _file_name(point)
        if name in labels:
            raise UserError(
                f"routers: '{labels[name]}' and '{point.label}' would both have their answers in {name}; give one of"
                " them another label"
            )
        labels[name] = point.label


def _alone(label: str, model: int) -> Point:
    return Point(label, label, RouterConfig(name="single"), {"model": model})


def _controls(bench: Bench, points: Sequence[Point]) -> dict[str, Point | None]:
    """For each point the random one at its share of tokens: one that the spec asks for, or one that another point has
    already, if it is near. None where all tokens are one model's: there is no choice to make at random."""
    tolerance = bench.spec.control_tolerance
    asked = {point.overrides["p"]: point for point in points if point.router == _RANDOM and "p" in point.overrides}
    chosen = {p: point for p, point in asked.items() if 0 < p < 1}
    routed = [point for point in points if point.router.name != _RANDOM.name]
    controls: dict[str, Point | None] = {}
    for share, label in sorted((bench.result(point).llm_share, point.label) for point in routed):
        if not 0 < share < 1:
            controls[label] = None
            continue
        p = min(chosen, key=lambda p: abs(p - share), default=math.inf)
        if abs(p - share) > tolerance:
            p = _rounded(share)
            chosen[p] = Point(f"{RANDOM} p={p}", RANDOM, _RANDOM, {"p": p}, p)
        controls[label] = chosen[p]
    return controls


def _rounded(share: float) -> float:
    """To 4 decimals, where that leaves a choice."""
    p = round(share, 4)
    return p if 0 < p < 1 else share


def _engine(config: dict[str, Any]) -> dict[str, Any]:
    """What of an engine's configuration its answers may depend on, to the last bit of a sum."""
    return _shown({k: v for k, v in config.items() if k not in _NEVER_MATTERS})


def _shown(params: dict[str, Any]) -> dict[str, Any]:
    """Without the folders of files."""
    weights = params.get("weights")
    return {**params, "weights": Path(weights).name} if isinstance(weights, str) else params


def _digest_of_weights(router: RouterConfig, params: dict[str, Any]) -> str | None:
    """Of a trained router's file: trained anew, it is another router. Somebody's own router may call what it likes
    `weights`."""
    weights = params.get("weights")
    trained = issubclass(router.algorithm().params, NeuralParams)
    if not isinstance(weights, str) or not (trained or weights.endswith(".safetensors")):
        return None
    try:
        return hashlib.sha256(locate_router(weights).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"weights: {weights}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
