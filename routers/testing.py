# SPDX-License-Identifier: Apache-2.0
"""A harness for routers, without a server or weights: it drives an algorithm on scripted models.

    from routers.testing import check_router
    check_router(MINE, {"threshold": 0.5})

Each request runs by itself first, then all of them together under random schedules: any model next, with any batch.
The rules, by their names in `RuleBroken`:

- route: it returns INT64 [n] or n ints, from 0 = stay to the number of peers, and changes nothing but `fields`, which
  are JSON.
- rows: a row's destination and fields are the same in any batch, and when `route` is called again.
- send, receive: what they return can be delivered: the right request, no gap, a prefix. They change nothing.
- conservation: what is sent was made by the models, and nothing that was committed is taken back.
- progress: of M models' visits in a row, at least one keeps a token.
- schedule: a request's answer doesn't depend on who else is served, or when.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from routers.base import (
    Algorithm,
    BaseRouter,
    LogitsOutput,
    RouterParams,
    ServedModel,
    StepResult,
    destinations,
    model_to_peer,
    peer_to_model,
)
from routers.registry import overridden, parse_params

__all__ = ["EOS", "RuleBroken", "Script", "Trace", "check_router"]

EOS = 0  # the token that ends an answer
_PROMPTS = (1, 5, 3, 12)  # lengths, in turn


class RuleBroken(Exception):
    """rule: its name. rid, step: of which request, at which of its steps (from 1). problem: what is wrong."""

    def __init__(self, rule: str, rid: int, step: int, problem: str) -> None:
        super().__init__(f"{rule}: request {rid}, step {step}: {problem}")
        self.rule, self.rid, self.step, self.problem = rule, rid, step, problem


@dataclass(frozen=True)
class Script:
    """What the models compute. logits, hidden_states: of a model's number and the sequence so far, FP32
    [vocabulary] and FP32 [hidden_size]; None = random ones, by the seed, the logits from flat to certain.
    token_bytes: the text of a token."""

    vocabulary: int = 128
    hidden_size: int = 16
    seed: int = 0
    logits: Callable[[int, Sequence[int]], torch.Tensor] | None = None
    hidden_states: Callable[[int, Sequence[int]], torch.Tensor] | None = None
    token_bytes: Callable[[int], bytes] = lambda token: bytes([token % 256])

    def row_logits(self, model: int, sequence: Sequence[int]) -> torch.Tensor:
        """FP32 [vocabulary]."""
        if self.logits is not None:
            return self.logits(model, sequence)
        rng = _generator(self.seed, model, sequence)
        scale = 10 ** float(torch.empty(1).uniform_(-2, 3, generator=rng))
        return torch.randn(self.vocabulary, generator=rng) * scale

    def row_hidden_state(self, model: int, sequence: Sequence[int]) -> torch.Tensor:
        """FP32 [hidden_size]."""
        if self.hidden_states is not None:
            return self.hidden_states(model, sequence)
        return torch.randn(self.hidden_size, generator=_generator("hidden", self.seed, model, sequence))

    def served(self, name: str) -> ServedModel:
        """The model of that name as its router is told of it; its weights bear its name."""
        table = torch.randn(self.vocabulary, self.hidden_size, generator=_generator("embedding", self.seed))
        return ServedModel(name, name, self.vocabulary, self.hidden_size, table.__getitem__, self.token_bytes)


@dataclass
class Trace:
    """An answer: its tokens, the number of the model that made each, how often it went from model to model."""

    token_ids: list[int] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    handoffs: int = 0


def check_router(
    algorithm: Algorithm,
    params: Mapping[str, Any] | None = None,
    *,
    models: Sequence[str] = ("slm", "llm"),
    overrides: Sequence[Mapping[str, Any]] = ({},),
    script: Script | None = None,
    requests: int = 8,
    max_tokens: int = 24,
    schedules: int = 8,
) -> list[Trace]:
    """Check every rule; returns what became of each request, to check what this algorithm should do with it.

    params: as in a deployment file. models: the names of the models. overrides: the parameters that the requests
    override, in turn. requests, max_tokens: of each schedule; the last request asks for one token only.
    Raises RuleBroken, and ValueError when a server would refuse the parameters, the overrides or the models.
    """
    script = script or Script()
    shared = parse_params(algorithm, params or {})
    own = [overridden(algorithm, params or {}, changed, models) for changed in overrides]

    def run(rids: Sequence[int], schedule: int) -> list[Trace]:
        routers = [algorithm.router(index, shared, models) for index in range(len(models))]
        for router, name in zip(routers, models, strict=True):
            router.check(script.served(name))
            router.bind(script.served(name))
        live = []
        for rid in rids:
            prompt = [1 + (7 * rid + at) % (script.vocabulary - 1) for at in range(_PROMPTS[rid % len(_PROMPTS)])]
            limit = 1 if rid == requests - 1 else max_tokens
            live.append(_Request(rid, own[rid % len(own)], prompt, limit, len(models)))
        return _Driver(routers, script, live, random.Random(schedule)).run()

    with _one_thread():
        alone = [run([rid], 0)[0] for rid in range(requests)]
        for schedule in range(schedules):
            for rid, trace in enumerate(run(range(requests), schedule)):
                if trace != alone[rid]:
                    problem = f"schedule {schedule} gave {trace}; by itself it gave {alone[rid]}"
                    raise RuleBroken("schedule", rid, len(trace.token_ids), problem)
    return alone


@contextmanager
def _one_thread() -> Iterator[None]:
    """As a served router has: with more, torch adds up a lone row in parts, and rows would depend on the batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Request:
    """A request on its way, which is also what `send` of the model that it is at sees (`RoutedRequest`).

    known: by model, the tokens after the prompt that it knows. locs: by model, its peer_locs.
    """

    rid: int
    params: RouterParams
    origin_input_ids: list[int]
    limit: int
    models: int
    at: int = 0
    known: list[list[int]] = field(default_factory=list)
    locs: list[list[int]] = field(default_factory=list)
    destination: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    steps: int = 0
    idle_visits: int = 0

    def __post_init__(self) -> None:
        self.known = [[] for _ in range(self.models)]
        self.locs = [[0] * self.models for _ in range(self.models)]

    @property
    def output_ids(self) -> list[int]:
        return self.known[self.at]

    @property
    def peer_locs(self) -> list[int]:
        return self.locs[self.at]

    @property
    def sequence(self) -> list[int]:
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.ends(self.output_ids)

    def ends(self, output_ids: Sequence[int]) -> bool:
        return bool(output_ids) and (output_ids[-1] == EOS or len(output_ids) >= self.limit)

    def commit(self) -> None:
        """What the model here knows is final."""
        new = self.output_ids[len(self.trace.token_ids) :]
        self.trace.token_ids += new
        self.trace.makers += [self.at] * len(new)
        self.idle_visits = 0 if new else self.idle_visits + 1

    def check(self, rule: str, holds: bool, problem: str) -> None:
        if not holds:
            raise RuleBroken(rule, self.rid, self.steps, problem)


class _Driver:
    """Runs requests to their ends, one batch of one model at a time, checking every step."""

    def __init__(
        self, routers: Sequence[BaseRouter[Any]], script: Script, requests: Sequence[_Request], rng: random.Random
    ) -> None:
        self._routers = routers
        self._names = [f"{type(router).__name__} beside '{router.models[i]}'" for i, router in enumerate(routers)]
        self._script = script
        self._requests = requests
        self._rng = rng

    def run(self) -> list[Trace]:
        while live := [r for r in self._requests if not r.ends(r.trace.token_ids)]:
            model = self._rng.choice(sorted({r.at for r in live}))
            waiting = [r for r in live if r.at == model]
            self._step(model, self._rng.sample(waiting, self._rng.randint(1, len(waiting))))
        return [r.trace for r in self._requests]

    def _step(self, model: int, batch: Sequence[_Request]) -> None:
        for request in batch:
            request.steps += 1
        tokens, routed = self._route(model, batch)
        for request, token, decision in zip(batch, tokens, routed, strict=True):
            alone = self._route(model, [request])[1][0]
            problem = f"{self._names[model]} gave {decision} in a batch of {len(batch)}, and {alone} by itself"
            request.check("rows", decision == alone, problem)
            request.output_ids.append(token)
            request.destination, request.fields = decision
            if request.destination == 0:
                request.commit()
            else:
                self._hand_over(request)

    def _route(self, model: int, batch: Sequence[_Request]) -> tuple[list[int], list[tuple[int, Any]]]:
        """The token of each row; the destination and the fields that `route` gives it, checked."""
        router, name, first = self._routers[model], self._names[model], batch[0]
        result = self._result(model, batch)
        before = copy.deepcopy(replace(result, draw=float))
        returned = self._call(first, "route", model, router.route, result)
        try:
            routed = destinations(returned, len(batch))
        except ValueError as error:
            raise RuleBroken("route", first.rid, first.steps, f"route of {name}: {error}") from error
        changed = [f for f in _ROUTE_READS if not _same(getattr(before, f), getattr(result, f))]
        first.check("route", not changed, f"{name} changed {', '.join(changed)}")
        for request, to in zip(batch, routed, strict=True):
            problem = f"{name} gave destination {to}; allowed: 0 to {len(self._routers) - 1}"
            request.check("route", 0 <= to < len(self._routers), problem)
        try:
            fields = json.loads(json.dumps(result.fields))
        except (TypeError, ValueError) as error:
            raise RuleBroken(
                "route", first.rid, first.steps, f"{name} left fields that aren't JSON: {error}"
            ) from error
        return list(before.token_ids), list(zip(routed, fields, strict=True))

    def _result(self, model: int, batch: Sequence[_Request]) -> StepResult:
        router, sequences = self._routers[model], [r.sequence for r in batch]
        hidden = None
        if router.needs_hidden_states:
            hidden = torch.stack([self._script.row_hidden_state(model, s) for s in sequences])
        logits = torch.stack([self._script.row_logits(model, s) for s in sequences])
        return StepResult(
            logits_output=LogitsOutput(logits if router.needs_logits else None, hidden),
            token_ids=[self._token(r, row) for r, row in zip(batch, logits, strict=True)],
            places=[len(s) for s in sequences],
            sequences=sequences,
            prompt_tokens=[len(r.origin_input_ids) for r in batch],
            rids=[r.rid for r in batch],
            params=[r.params for r in batch],
            draw=lambda row: random.Random(repr((batch[row].rid, model, len(sequences[row])))).random(),
            fields=[{} for _ in batch],
        )

    def _token(self, request: _Request, logits: torch.Tensor) -> int:
        if not any(router.needs_sampling for router in self._routers):
            return int(logits.argmax())
        rng = _generator("token", request.rid, len(request.sequence))
        return int(logits.softmax(-1).multinomial(1, generator=rng))

    def _hand_over(self, request: _Request) -> None:
        """One handoff: `send` here, `receive` there, and what was kept is final."""
        source, target = request.at, peer_to_model(request.at, request.destination)
        before = copy.deepcopy(request)
        sent = self._call(request, "send", source, self._routers[source].send, request)
        request.check("send", request == before, f"{self._names[source]} changed the request")
        tokens, begin, prompt = list(sent.token_ids), sent.loc - len(sent.token_ids), len(request.origin_input_ids)
        has = prompt + len(request.known[target])
        what = f"{self._names[source]} sent {tokens} as positions {begin} to {sent.loc}"
        request.check("send", sent.rid == request.rid, f"{what} of request {sent.rid}")
        request.check("send", 0 <= begin <= has, f"{what}; {self._names[target]} has {has} tokens")
        request.check("conservation", tokens == request.sequence[begin : sent.loc], f"{what} of {request.sequence}")
        sent = replace(sent, token_ids=tokens, finished=request.ends(request.sequence[prompt : sent.loc]))
        accepted = list(self._call(request, "receive", target, self._routers[target].receive, sent))
        what = f"{self._names[target]} accepted {accepted} of {tokens} from position {begin} on"
        request.check("receive", accepted == request.sequence[begin : sent.loc][: len(accepted)], what)
        final = prompt + len(request.trace.token_ids)
        request.check("conservation", begin + len(accepted) >= final, f"{what}; the first {final} tokens are final")
        kept = request.sequence[prompt : begin + len(accepted)]
        for model, peer in ((source, target), (target, source)):
            request.known[model] = list(kept)
            request.locs[model][model_to_peer(model, peer)] = prompt + len(kept)
        request.commit()
        stuck = request.idle_visits >= len(self._routers)
        request.check("progress", not stuck, f"{request.idle_visits} visits in a row kept no token")
        request.at = target
        if not request.ends(request.trace.token_ids):  # a token that ends the answer takes the request nowhere
            request.trace.handoffs += 1

    def _call(self, request: _Request, rule: str, model: int, function: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return function(argument)
        except Exception as error:  # a router is a user's code
            raise RuleBroken(rule, request.rid, request.steps, f"{self._names[model]} raised {error!r}") from error


_ROUTE_READS = (
    "logits_output", "token_ids", "next_token_ids", "places", "sequences", "prompt_tokens", "rids", "params",
)  # fmt: skip


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, LogitsOutput):
        return all(_same(getattr(before, f), getattr(after, f)) for f in ("next_token_logits", "hidden_states"))
    return torch.equal(before, after) if isinstance(before, torch.Tensor) else bool(before == after)


def _generator(*seed: Any) -> torch.Generator:
    """Random numbers that depend on nothing but these values."""
    return torch.Generator().manual_seed(random.Random(repr(seed)).getrandbits(63))
