# SPDX-License-Identifier: Apache-2.0
"""The paced engine: its function sees every change of the prefix, and its steps take their time."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

import pytest

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.config import PacedConfig
from python_backends.llm.engines.paced import PacedEngine, PrefixHash, next_token

V = 1000


def engine(**settings: float) -> PacedEngine:
    return PacedEngine(PacedConfig.model_validate({"type": "paced", "step_ms": 0, **settings}), "slm")


def sampled(paced: PacedEngine, session: int, start: int, token_ids: list[int]) -> int:
    output = paced.step([SessionStep(session, start, token_ids)])
    assert not output.errors and output.next_token_ids is not None
    return output.next_token_ids[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: t[1:],
        lambda t: [*t, t[-1]],
        lambda t: [t[1], t[0], *t[2:]],
        lambda t: [*t[:3], t[3] + 1, *t[4:]],
        lambda t: [*t, 0],
    ],
    ids=["lost", "first lost", "doubled", "reordered", "changed", "zero appended"],
)
def test_any_change_of_the_prefix_changes_what_follows(change: Callable[[list[int]], list[int]]) -> None:
    rng = random.Random(3)
    noticed = 0
    for _ in range(200):
        prefix = rng.sample(range(1, V), 12)
        changed = change(prefix)
        # one token can agree by chance (1 in V); three in a row can't
        noticed += any(
            next_token("slm", [*prefix, t], V, 0) != next_token("slm", [*changed, t], V, 0) for t in range(3)
        )
    assert noticed == 200


def test_models_differ() -> None:
    assert [next_token("slm", [i], V, 0) for i in range(20)] != [next_token("llm", [i], V, 0) for i in range(20)]


def test_the_engine_computes_the_function_whatever_the_cuts() -> None:
    rng = random.Random(4)
    paced = engine(vocab_size=V)
    sequence = [rng.randrange(V) for _ in range(300)]
    paced.open(SessionOpen(1, 10, 10**6))
    at = 0
    while at < len(sequence):
        at = max(0, at - rng.randrange(4))  # drop a tail, sometimes
        to = min(len(sequence), at + rng.randrange(1, 30))
        assert sampled(paced, 1, at, sequence[at:to]) == next_token("slm", sequence[:to], V, 0)
        at = to


def test_truncating_equals_never_having_appended() -> None:
    hashes = PrefixHash("slm")
    hashes.extend([1, 2, 3, 4])
    hashes.truncate(2)
    assert len(hashes) == 2
    assert hashes.next_token(V, 0) == next_token("slm", [1, 2], V, 0)


def test_eos_comes_about_as_often_as_asked() -> None:
    drawn = [next_token("slm", [i], V, 20) for i in range(4000)]
    assert 150 < drawn.count(0) < 250
    assert 0 not in [next_token("slm", [i], V, 0) for i in range(4000)]
    assert all(0 <= t < V for t in drawn)


def test_a_step_takes_its_time() -> None:
    paced = engine(step_ms=20, prefill_token_ms=2)
    paced.open(SessionOpen(1, 1, 100))
    for tokens, wanted_s in ((1, 0.020), (11, 0.040)):
        began_s = time.perf_counter()
        sampled(paced, 1, 0, [1] * tokens)
        assert wanted_s <= time.perf_counter() - began_s < wanted_s + 0.1


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (SessionStep(1, 4, [1]), "start: 4"),
        (SessionStep(1, -1, [1]), "start: -1"),
        (SessionStep(1, 0, []), "token_ids: is empty"),
        (SessionStep(1, 0, [5, V]), f"token_ids: {V} .*0 to {V - 1}"),
        (SessionStep(1, 0, [-1]), "token_ids: -1"),
        (SessionStep(1, 2, [1] * 9), "11 tokens long; at most 10"),
        (SessionStep(9, 0, [1]), "session 9 is not open"),
    ],
)
def test_a_step_that_does_not_fit_fails_alone(step: SessionStep, field: str) -> None:
    paced = engine(vocab_size=V, context_tokens=10)
    for session in (1, 2):
        paced.open(SessionOpen(session, 1, 10))
        sampled(paced, session, 0, [1, 2, 3])
    output = paced.step([step, SessionStep(2, 3, [4])])
    assert list(output.sessions) == [2]
    assert output.next_token_ids == [next_token("slm", [1, 2, 3, 4], V, 0)]
    assert re.search(field, output.errors[step.session])
    assert sampled(paced, 1, 3, [4]) == next_token("slm", [1, 2, 3, 4], V, 0)


def test_sessions_are_counted() -> None:
    paced = engine(max_sessions=2)
    for session in (1, 2):
        paced.open(SessionOpen(session, 1, 10))
    with pytest.raises(ValueError, match="session 2 is open"):
        paced.open(SessionOpen(2, 1, 10))
    with pytest.raises(EngineError, match="max_sessions = 2"):
        paced.open(SessionOpen(3, 1, 10))
    paced.free([2, 99])
    paced.open(SessionOpen(3, 1, 10))
