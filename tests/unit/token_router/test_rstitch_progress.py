# SPDX-License-Identifier: Apache-2.0
"""R-Stitch on the real runtime: whatever the entropies and the threshold, every answer comes, and the right one."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backends.token_router.config import LLMConfig, RuntimeConfig
from routers import Algorithm, PeerReq, RoutedRequest, RouterConfig, send_without_last
from routers.rstitch import RSTITCH, RStitchLLM, RStitchParams, RStitchSLM, normalized_entropy
from tests.unit.token_router.harness import Stream, run
from tests.unit.token_router.scripted import answers

# From certain to undecided; by way of masks, of probabilities that underflow, and of a third token's share.
ROWS = torch.tensor(
    [
        [0.0, 0.0, 0.0, 0.0],
        [500.0, 0.0, 0.0, 0.0],
        [0.0, -math.inf, -math.inf, -math.inf],
        [1.0, 1.0, -math.inf, -math.inf],
        [1e30, 1e30, -1e30, -1e30],
        [3.0, 0.0, 1.0, 0.0],
        [0.0, 9.0, 0.0, 2.0],
    ]
)
ENTROPIES = normalized_entropy(ROWS).double().tolist()


class Stuck(RStitchLLM):
    """Taken literally, the paper's caption has the large model drop its token too."""

    def send(self, req: RoutedRequest) -> PeerReq:
        return send_without_last(req)


STUCK = Algorithm(name="stuck", params=RStitchParams, entry=RStitchSLM, peer=Stuck)


def _logits(seed: int, model: int, sequence: Sequence[int]) -> torch.Tensor:
    digest = hashlib.blake2b(repr((seed, model, list(sequence))).encode(), digest_size=2).digest()
    return ROWS[int.from_bytes(digest, "little") % len(ROWS)]


def _served(name: str, tau: float, seed: int, prompts: list[list[int]], tokens: int) -> list[Stream]:
    """Raises TimeoutError when a token takes more than the two visits that R-Stitch can need, each behind one step
    of the others'."""
    config = RuntimeConfig(
        models=[LLMConfig(name="slm"), LLMConfig(name="llm")], router=RouterConfig(name=name, params={"tau": tau})
    )
    requests = [{"input_ids": prompt, "max_tokens": tokens, "ignore_eos": True} for prompt in prompts]

    async def main() -> list[Stream]:
        serving = answers(config, lambda model, seq: _logits(seed, model, seq), ROWS.shape[1], [1.0, 3.0], requests)
        return await asyncio.wait_for(serving, (tokens + 2) * 2 * (1.0 + 3.0))

    streams: list[Stream] = run(main())
    return streams


def _alone(tau: float, seed: int, prompt: list[int], tokens: int) -> tuple[list[int], list[str]]:
    """R-Stitch as one loop."""
    sequence, makers, model = list(prompt), [], 0
    while len(makers) < tokens:
        logits = _logits(seed, model, sequence)
        uncertain = normalized_entropy(logits[None]).double().item() > tau
        if model == 1 or not uncertain:
            sequence.append(int(logits.argmax()))
            makers.append(["slm", "llm"][model])
        model = int(uncertain)
    return sequence[len(prompt) :], makers


@settings(max_examples=60, deadline=None)
@given(
    tau=st.one_of(st.sampled_from([0.0, 1.0, *ENTROPIES]).filter(lambda h: 0 <= h <= 1), st.floats(0, 1)),
    seed=st.integers(0, 10**6),
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4),
    tokens=st.integers(1, 12),
)
def test_every_threshold_makes_progress(tau: float, seed: int, prompts: list[list[int]], tokens: int) -> None:
    streams = _served("rstitch", tau, seed, prompts, tokens)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.error is None
        assert (stream.token_ids, stream.models) == _alone(tau, seed, prompt, tokens)


def test_a_large_model_that_drops_its_token_gets_stuck() -> None:
    """So the test above can fail: from a certain large model, the small one comes back to where it was."""
    seed = next(s for s in range(1000) if _row_entropies(s, [1]) == (1.0, 0.0))
    (stuck,) = _served(f"{__name__}:STUCK", 0.5, seed, [[1]], 2)
    assert "the router makes no progress" in str(stuck.error)
    assert [s.token_ids for s in _served(RSTITCH.name, 0.5, seed, [[1]], 2)] == [_alone(0.5, seed, [1], 2)[0]]


def _row_entropies(seed: int, sequence: list[int]) -> tuple[float, float]:
    """Of the small model and the large one, after this sequence."""
    small, large = (normalized_entropy(_logits(seed, model, sequence)[None]).item() for model in (0, 1))
    return round(small, 6), round(large, 6)
