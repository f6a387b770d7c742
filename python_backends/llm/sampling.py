# SPDX-License-Identifier: Apache-2.0
"""From logits to a token: penalties, temperature, min-p, top-k, top-p, and a draw that can be repeated.

The penalties and filters mean what they mean in vLLM. A draw is a pure function of (seed, position, stream):
no generator is carried along, so it can't depend on the batch, on the schedule or on which model samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from python_backends.llm.contract import GREEDY_BELOW, SamplingParams

__all__ = ["Sampled", "SamplingRow", "routing_stream", "sample", "uniform"]

_TOKEN_STREAM = 0  # one for all models: the draw of a position is the same whichever model makes it

_MASK = (1 << 64) - 1
_NUCLEUS_GUESS = 256  # candidates sorted first for top-p; a nucleus rarely holds more


class SamplingRow(NamedTuple):
    """What sampling must know of one session.

    token_ids: the sequence so far, prompt included; the token drawn takes position len(token_ids).
    prompt_tokens: how many of them are the prompt.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    prompt_tokens: int


class Sampled(NamedTuple):
    """token_ids: n. logprobs: n, of each under the raw logits. errors: row -> why it has no token (then its token
    and its log-probability mean nothing)."""

    token_ids: list[int]
    logprobs: list[float]
    errors: dict[int, str]


def _mix(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit numbers that spreads every bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, stream: int) -> float:
    """A number of [0, 1) with 53 random bits that depends on nothing but these three (each >= 0)."""
    return (_mix(_mix(_mix(seed & _MASK) ^ position) ^ stream) >> 11) * 2.0**-53


def routing_stream(model_index: int) -> int:
    """The stream of the draws that model number `model_index` routes with."""
    return 1 + model_index


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """One token for each row of FP32 [n, vocabulary]; the logits are left as they are.

    A row that holds NaN or +inf, or nothing but -inf, gets an error; the others are not touched by it.
    """
    token_ids = logits.argmax(-1)
    totals = logits.logsumexp(-1)
    errors = {r: "the model's logits are not finite" for r, ok in enumerate(totals.isfinite().tolist()) if not ok}
    for r, row in enumerate(rows):
        if r not in errors and not row.params.is_greedy:
            try:
                token_ids[r] = _sample_row(logits[r], row)
            except ValueError as error:
                errors[r] = str(error)
    logprobs = logits.gather(-1, token_ids[:, None]).squeeze(-1) - totals
    return Sampled(token_ids.tolist(), logprobs.tolist(), errors)


def _sample_row(raw: torch.Tensor, row: SamplingRow) -> int:
    """The token of one row, FP32 [vocabulary]. Rows are done one by one: no batch can change their bits."""
    params = row.params
    logits = _penalized(raw, row) if params.has_penalties else raw
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    top = logits.max()
    if not top.isfinite():
        raise ValueError("the penalties leave no finite logits")
    weights = ((logits - top) / params.temperature).exp()
    candidates = _candidates(weights, params)
    cumulative = (weights if candidates is None else weights[candidates]).cumsum(0, dtype=torch.float64)
    total = float(cumulative[-1])
    draw = uniform(params.seed, len(row.token_ids), _TOKEN_STREAM) * total
    # the first place whose sum is above the draw; rounding must not bring the draw up to the last sum
    at = int(torch.searchsorted(cumulative, min(draw, math.nextafter(total, 0)), right=True))
    return at if candidates is None else int(candidates[at])


def _penalized(raw: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """A copy of FP32 [vocabulary] with the three penalties."""
    params, logits = row.params, raw.clone()
    sequence = np.asarray(row.token_ids, dtype=np.int64)
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(sequence)).to(raw.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    output, counts = (
        torch.from_numpy(a).to(raw.device) for a in np.unique(sequence[row.prompt_tokens :], return_counts=True)
    )
    logits[output] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def _candidates(weights: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """The token ids that min-p, top-k and top-p leave, rising; None = all. weights: FP32 [vocabulary],
    probabilities divided by the largest one."""
    kept = None
    if params.min_p > 0:
        kept = weights >= params.min_p
    if 0 < params.top_k < weights.numel():
        ranked = weights if kept is None else weights * kept
        in_top_k = weights >= ranked.topk(params.top_k).values[-1]  # ties with the k-th stay, as in vLLM
        kept = in_top_k if kept is None else kept & in_top_k
    ids = None if kept is None else kept.nonzero().squeeze(-1)
    if params.top_p >= 1:
        return ids
    if ids is None:
        return _nucleus(weights, params.top_p)
    return ids[_nucleus(weights[ids], params.top_p)]


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The places, rising, of the smallest set of largest weights FP32 [m] that holds `top_p` of their sum."""
    size, enough = weights.numel(), top_p * weights.sum(dtype=torch.float64)
    guess = min(_NUCLEUS_GUESS, size)
    while True:  # sorting a whole vocabulary costs more than a small model's step
        values, places = weights.topk(guess)
        cumulative = values.cumsum(0, dtype=torch.float64)
        if guess == size or cumulative[-1] >= enough:
            count = int((cumulative < enough).sum()) + 1
            return places[:count].sort().values
        guess = min(guess * 8, size)
