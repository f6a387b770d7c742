# SPDX-License-Identifier: Apache-2.0
"""Sampling: the right distribution, penalties by hand, and draws that nothing else can change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from python_backends.llm.contract import SamplingParams
from python_backends.llm.sampling import SamplingRow, routing_stream, sample, uniform

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
HOT = SamplingParams(temperature=1.0)


def tokens(logits: torch.Tensor, params: SamplingParams, positions: range, seed: int = 7) -> list[int]:
    """One draw for each position, all in one batch."""
    rows = [SamplingRow(replace(params, seed=seed), [0] * position, position) for position in positions]
    return sample(logits.expand(len(rows), -1), rows).token_ids


def expected(params: SamplingParams) -> torch.Tensor:
    """The distribution that `params` means, worked out the plain way: sort, cut, normalise."""
    p = (LOGITS.double() / params.temperature).softmax(-1)
    p = torch.where(p >= params.min_p * p.max(), p, 0)
    if params.top_k:
        p = torch.where(p >= p.sort(descending=True).values[params.top_k - 1], p, 0)
    p = p / p.sum()
    kept, total = [], 0.0
    for token in p.argsort(descending=True).tolist():
        if total >= params.top_p:
            break
        kept.append(token)
        total += float(p[token])
    mask = torch.zeros_like(p)
    mask[kept] = 1
    return p * mask / (p * mask).sum()


@pytest.mark.parametrize(
    "params",
    [
        HOT,
        replace(HOT, temperature=0.5),
        replace(HOT, temperature=3.0),
        replace(HOT, top_k=3),
        replace(HOT, top_p=0.8),
        replace(HOT, min_p=0.3),
        replace(HOT, temperature=1.7, top_k=5, top_p=0.9, min_p=0.1),
    ],
    ids=str,
)
def test_the_draws_have_the_distribution(params: SamplingParams) -> None:
    count = 4000
    seen = torch.tensor(tokens(LOGITS, params, range(count))).bincount(minlength=len(LOGITS)).double()
    wanted = expected(params) * count
    possible = wanted > 0
    assert seen[~possible].sum() == 0
    chi2 = float(((seen - wanted)[possible] ** 2 / wanted[possible]).sum())
    freedom = int(possible.sum()) - 1
    # a quantile above 0.9999 by the normal approximation; the seed is fixed, so this never flickers
    assert chi2 < freedom + 4.5 * math.sqrt(2 * freedom) + 6


def test_a_wide_nucleus_is_found_beyond_the_first_guess() -> None:
    flat = torch.zeros(5000)
    drawn = tokens(flat, replace(HOT, top_p=0.5), range(600))
    assert len(set(drawn)) > 500
    assert len({t for t in tokens(flat, replace(HOT, top_p=1e-9), range(50))}) == 1


@pytest.mark.parametrize(
    ("params", "output", "by_hand"),
    [
        # prompt [0, 3]: repetition divides a positive logit and multiplies a negative one, prompt included
        (SamplingParams(repetition_penalty=2.0), [1], [1.0, 0.5, 0.5, -1.0]),
        (SamplingParams(presence_penalty=0.4), [1, 1, 2], [2.0, 0.6, 0.1, -0.5]),
        (SamplingParams(frequency_penalty=0.4), [1, 1, 2], [2.0, 0.2, 0.1, -0.5]),
        (
            SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5),
            [1, 1],
            [1.0, 0.5 - 0.25 - 1.0, 0.5, -1.0],
        ),
        (SamplingParams(presence_penalty=1.0, frequency_penalty=1.0), [], [2.0, 1.0, 0.5, -0.5]),
    ],
)
def test_penalties_by_hand(params: SamplingParams, output: list[int], by_hand: list[float]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, -0.5])
    row = SamplingRow(params, [0, 3, *output], prompt_tokens=2)
    # against a token that has no penalty and a logit just below or above, each penalised value shows
    for token, value in enumerate(by_hand):
        for rival, wins in ((value - 1e-3, True), (value + 1e-3, False)):
            pair = torch.full((5,), -100.0)
            pair[token], pair[4] = logits[token], rival
            assert (sample(pair[None], [row]).token_ids == [token]) is wins


def test_the_raw_logits_stay_and_give_the_log_probability() -> None:
    logits = LOGITS.repeat(2, 1)
    before = logits.clone()
    rows = [SamplingRow(SamplingParams(repetition_penalty=5.0), [0], 1), SamplingRow(SamplingParams(), [0], 1)]
    sampled = sample(logits, rows)
    assert sampled.token_ids == [1, 0]
    assert torch.equal(logits, before)
    assert sampled.logprobs == pytest.approx(LOGITS.log_softmax(-1)[[1, 0]].tolist())


def test_a_draw_depends_on_seed_and_position_only() -> None:
    params = replace(HOT, top_p=0.9)
    together = tokens(LOGITS, params, range(64))
    assert [tokens(LOGITS, params, range(i, i + 1))[0] for i in range(64)] == together
    assert tokens(LOGITS, params, range(64), seed=8) != together


def test_uniforms_are_uniform_and_streams_apart() -> None:
    draws = torch.tensor([[uniform(5, i, stream) for i in range(4000)] for stream in (0, 1, routing_stream(1))])
    assert draws.min() >= 0 and draws.max() < 1
    assert draws.mean(-1) == pytest.approx([0.5] * 3, abs=0.02)
    assert torch.corrcoef(draws) == pytest.approx(torch.eye(3), abs=0.06)
    assert uniform(2**64 - 1, 10**6, 3) == uniform(2**64 - 1, 10**6, 3)


@pytest.mark.parametrize("params", [SamplingParams(), HOT, SamplingParams(repetition_penalty=1.2)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_bad_row_fails_alone(params: SamplingParams, bad: float | None) -> None:
    logits = LOGITS.repeat(3, 1)
    good = sample(logits, [SamplingRow(params, [0], 1)] * 3)
    logits[1] = -math.inf
    if bad is not None:
        logits[1, 4] = bad
    sampled = sample(logits, [SamplingRow(params, [0], 1)] * 3)
    assert set(sampled.errors) == {1}
    assert sampled.token_ids[::2] == good.token_ids[::2]


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert params.is_greedy
    assert tokens(LOGITS, params, range(5)) == [0] * 5
    assert sample(LOGITS[None], [SamplingRow(replace(params, presence_penalty=0.1), [1], 1)]).token_ids == [0]


def test_penalties_that_leave_nothing_finite_fail_their_row_only() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0], [5.0, 1.0, 0.0]])
    broken = SamplingRow(SamplingParams(temperature=1.0, repetition_penalty=1e-45), [0], 1)
    sampled = sample(logits, [broken, SamplingRow(SamplingParams(), [0], 1)])
    assert set(sampled.errors) == {0} and "finite" in sampled.errors[0]
    assert sampled.token_ids[1] == 0
