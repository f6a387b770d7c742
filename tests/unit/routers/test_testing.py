# SPDX-License-Identifier: Apache-2.0
"""The harness: every router that we ship passes it, and each rule is missed by a router that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from routers import (
    ALGORITHMS,
    Algorithm,
    BaseRouter,
    OneTokenRouter,
    PeerReq,
    RouterParams,
    StepResult,
    peer_request,
    send_without_last,
)
from routers.testing import EOS, RuleBroken, Script, check_router
from tests.unit.routers.trained import HIDDEN, MODELS, NETWORKS, THRESHOLDS, VOCAB, write

THREE = ("a", "b", "c")
P = [[0.5, 0.2, 0.3], [0.1, 0.9, 0.0], [0.0, 1.0, 0.0]]
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("rstitch", {"tau": 0.3}, {"overrides": [{}, {"tau": 0.0}, {"tau": 1.0}]}),
    ("me", {"weights": [0.5, 0.3, 0.2]}, {"models": THREE, "overrides": [{}, {"weights": [0.0, 0.9, 0.1]}]}),
    ("bild", {"threshold": 0.6}, {"overrides": [{}, {"threshold": 0.2}]}),
    ("glimp", {"tau": 0.2}, {"script": Script(vocabulary=14), "overrides": [{}, {"tau": 0.5}]}),
    ("random", {"p": 0.3}, {"overrides": [{}, {"p": 1.0}]}),
    ("single", {"model": 1}, {"models": THREE, "overrides": [{}, {"model": 2}]}),
    ("markov", {"p": P, "c": [[1, 0, 1], [1, 1, 1], [1, 1, 1]]}, {"models": THREE}),
]


@pytest.mark.parametrize(("name", "params", "settings"), CASES, ids=[name for name, _, _ in CASES])
def test_shipped_routers_pass(name: str, params: dict[str, Any], settings: dict[str, Any]) -> None:
    traces = check_router(ALGORITHMS[name], params, schedules=4, **settings)
    makers = {maker for trace in traces for maker in trace.makers}
    assert makers >= ({1, 2} if name == "single" else set(range(len(settings.get("models", "ab")))))
    assert all(len(t.token_ids) == 24 or t.token_ids[-1] == EOS for t in traces[:-1])
    assert len(traces[-1].token_ids) == 1
    assert sum(t.handoffs for t in traces) > 5


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_trained_routers_pass(name: str, tmp_path: Path) -> None:
    kind, arguments = NETWORKS[name]
    if name == "r2r":
        arguments = {**arguments, "embedding_size": HIDDEN}  # the harness's embedding
    torch.manual_seed(1)
    path = write(tmp_path / "router.safetensors", name, kind(**arguments), network=arguments)
    traces = check_router(
        ALGORITHMS[name],
        {"weights": str(path)},
        models=MODELS,
        script=Script(vocabulary=VOCAB, hidden_size=HIDDEN),
        overrides=[{}, {THRESHOLDS[name]: 0.2}, {THRESHOLDS[name]: 0.8}],
        requests=4,
        schedules=2,
    )
    assert {maker for trace in traces for maker in trace.makers} == {0, 1}


def test_every_shipped_router_is_tried() -> None:
    assert {name for name, _, _ in CASES} | set(NETWORKS) == set(ALGORITHMS)


class Stays(BaseRouter[RouterParams]):
    """Never leaves: what the routers below are made of."""

    def route(self, result: StepResult) -> torch.Tensor:
        return torch.zeros(len(result.rids), dtype=torch.int64)


class Looks(BaseRouter[RouterParams]):
    """Looks at the logits."""

    def route(self, result: StepResult) -> torch.Tensor:
        return (result.logits[:, 0] > 0).long()


class Leaves(BaseRouter[RouterParams]):
    """Leaves at every third place."""

    def route(self, result: StepResult) -> torch.Tensor:
        return (torch.tensor(result.places) % 3 == 0).long()


def _algorithm(entry: type[BaseRouter[Any]] = Leaves, peer: type[BaseRouter[Any]] = OneTokenRouter) -> Algorithm:
    return Algorithm("own", RouterParams, entry, peer)


def _route(function: Callable[[Any, StepResult], Any]) -> Algorithm:
    return _algorithm(type("Routes", (BaseRouter,), {"route": function}))


def _send(function: Callable[[Any, Any], PeerReq], peer: type[BaseRouter[Any]] = OneTokenRouter) -> Algorithm:
    return _algorithm(type("Sends", (Leaves,), {"send": function}), peer)


def _receive(function: Callable[[Any, PeerReq], Any]) -> Algorithm:
    return _algorithm(peer=type("Receives", (OneTokenRouter,), {"receive": function}))


def _zeros(result: StepResult) -> torch.Tensor:
    return torch.zeros(len(result.rids), dtype=torch.int64)


def _counts(router: Any, result: StepResult) -> torch.Tensor:
    """Remembers how often it was called."""
    router.calls = getattr(router, "calls", 0) + 1
    return torch.full((len(result.rids),), router.calls % 2)


def _scales(_: Any, result: StepResult) -> torch.Tensor:
    result.logits.div_(0.7)
    return _zeros(result)


def _shortens(_: Any, result: StepResult) -> torch.Tensor:
    result.sequences[0].pop()
    return _zeros(result)


def _leaves_a_tensor(_: Any, result: StepResult) -> torch.Tensor:
    result.fields[-1]["entropy"] = torch.tensor(0.5)
    return _zeros(result)


def _fails(*_: Any) -> Any:
    raise ArithmeticError("told to")


def _cuts(_: Any, req: Any) -> PeerReq:
    req.output_ids.pop()
    return peer_request(req)


def _all(req: Any) -> list[int]:
    return list(req.origin_input_ids + req.output_ids)


def _as_if(req: Any, sequence: list[int]) -> PeerReq:
    """What would bring the peer up to another sequence than the request's."""
    return replace(peer_request(req), token_ids=sequence[req.peer_locs[1] :], loc=len(sequence))


class DropsToo(OneTokenRouter):
    """What would live-lock: the large model's token is dropped as well."""

    def send(self, req: Any) -> PeerReq:
        return send_without_last(req)


class AtFirst(Stays):
    """Leaves as soon as its instance serves several requests: it depends on who else is served."""

    seen: frozenset[int] = frozenset()

    def route(self, result: StepResult) -> torch.Tensor:
        self.seen |= set(result.rids)
        return torch.full((len(result.rids),), int(len(self.seen) > 6))


BREAKS: list[tuple[str, str, Algorithm]] = [
    ("route", "must return INT64 [1] or a list of as many ints, it returned a list of 2", _route(lambda *_: [0, 0])),
    ("route", "it returned a list with bool", _route(lambda _, r: [False] * len(r.rids))),
    ("route", "it returned torch.float32 [1]", _route(lambda _, r: torch.zeros(len(r.rids)))),
    ("route", "it returned torch.int64 [1, 1]", _route(lambda _, r: torch.zeros(len(r.rids), 1, dtype=torch.int64))),
    ("route", "gave destination 2; allowed: 0 to 1", _route(lambda _, r: _zeros(r) + 2)),
    ("route", "gave destination 2; allowed: 0 to 1", _route(lambda _, r: [2] * len(r.rids))),
    ("route", "gave destination -1", _route(lambda _, r: _zeros(r) - 1)),
    ("route", "changed logits_output", _route(_scales)),
    ("route", "changed sequences", _route(_shortens)),
    ("route", "changed next_token_ids", _route(lambda _, r: _zeros(r) + 0 * r.next_token_ids.add_(1))),
    ("route", "aren't JSON", _route(_leaves_a_tensor)),
    ("route", "raised ArithmeticError('told to')", _route(_fails)),
    ("route", "engine returns no logits", _algorithm(type("Undeclared", (Looks,), {"needs_logits": False}))),
    ("rows", "in a batch of", _route(_counts)),
    ("rows", "in a batch of", _route(lambda _, r: torch.full((len(r.rids),), int(len(r.rids) > 1)))),
    ("send", "raised ArithmeticError", _send(_fails)),
    ("send", "changed the request", _send(_cuts)),
    ("send", "of request 999", _send(lambda _, req: replace(peer_request(req), rid=999))),
    ("send", "tokens", _send(lambda _, req: PeerReq(req.rid, req.output_ids[-1:], len(_all(req))))),
    ("conservation", "of [", _send(lambda _, req: _as_if(req, [*_all(req)[:-1], 5]))),
    ("conservation", "of [", _send(lambda _, req: _as_if(req, [*_all(req), 5]))),
    ("conservation", "tokens are final", _send(lambda _, req: peer_request(req, dropped=2))),
    ("conservation", "tokens are final", _receive(lambda _, peer_req: peer_req.token_ids[:-2])),
    ("receive", "accepted", _receive(lambda _, peer_req: [*peer_req.token_ids, 5])),
    ("receive", "raised ArithmeticError", _receive(_fails)),
    ("progress", "2 visits in a row kept no token", _send(lambda _, req: send_without_last(req), DropsToo)),
    ("schedule", "by itself it gave", _algorithm(AtFirst)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "problem", "algorithm"), BREAKS, ids=[f"{r}-{p}" for r, p, _ in BREAKS])
def test_a_router_that_breaks_a_rule_is_told_which_and_where(rule: str, problem: str, algorithm: Algorithm) -> None:
    with pytest.raises(RuleBroken) as broken:
        check_router(algorithm)
    assert (broken.value.rule, problem in broken.value.problem) == (rule, True), broken.value
    assert broken.value.step >= 1
    assert str(broken.value).startswith(f"{rule}: request {broken.value.rid}, step {broken.value.step}: ")


def test_what_would_be_refused_at_start_is_refused() -> None:
    with pytest.raises(ValueError, match="tau: Input should be less than or equal to 1"):
        check_router(ALGORITHMS["rstitch"], overrides=[{"tau": 2.0}])
    with pytest.raises(ValueError, match="'step_end' can't be set by a request to router 'glimp'; allowed: tau"):
        check_router(ALGORITHMS["glimp"], overrides=[{"step_end": "."}])
    with pytest.raises(ValueError, match="routes between 2 models; the deployment has 3"):
        check_router(ALGORITHMS["rstitch"], models=THREE)
    with pytest.raises(ValueError, match=r"step_end: '%%' ends no token of model 'slm'"):
        check_router(ALGORITHMS["glimp"], {"step_end": "%%"})


def test_scripted_logits_and_hidden_states_are_what_a_router_gets() -> None:
    seen: list[StepResult] = []

    def route(_: Any, result: StepResult) -> torch.Tensor:
        seen.append(result)
        return _zeros(result)

    entry = type("Sees", (BaseRouter,), {"route": route, "needs_hidden_states": True})
    script = Script(
        vocabulary=8,
        logits=lambda model, sequence: torch.nn.functional.one_hot(torch.tensor((sequence[-1] + 1) % 8), 8).float(),
        hidden_states=lambda model, sequence: torch.tensor([float(len(sequence)), float(model)]),
    )
    traces = check_router(_algorithm(entry), script=script, max_tokens=4)
    assert traces[0].token_ids == [2, 3, 4, 5]
    for result in seen:
        assert result.next_token_ids.tolist() == [(s[-1] + 1) % 8 for s in result.sequences]
        assert result.hidden_states is not None and result.hidden_states[:, 0].tolist() == list(result.places)
        assert [len(s) for s in result.sequences] == list(result.places)


def test_the_token_that_ends_an_answer_makes_no_handoff() -> None:
    """As the server counts: each model makes a token and hands over, but for the last one."""
    traces = check_router(_route(lambda _, r: torch.ones(len(r.rids), dtype=torch.int64)), max_tokens=6, requests=3)
    assert [len(trace.token_ids) for trace in traces] == [6, 6, 1]
    assert [trace.handoffs for trace in traces] == [5, 5, 0]
