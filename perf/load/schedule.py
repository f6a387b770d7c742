# SPDX-License-Identifier: Apache-2.0
"""What each user sends and when, all of it drawn from the run's seed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perf.load.options import LoadOptions

__all__ = ["Request", "arrivals", "requests"]

_SEED_BITS = 32


@dataclass(frozen=True)
class Request:
    """number: of its user, from 0. inputs: of the public model, as Python values.

    cancel_after: the user cancels when so many tokens have come; None = reads to the end.
    """

    number: int
    inputs: Mapping[str, Any]
    cancel_after: int | None

    @property
    def digest(self) -> str:
        """The same for the same inputs, and hardly ever for others."""
        text = json.dumps([self.inputs, self.cancel_after], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def requests(options: LoadOptions, user: int) -> Iterator[Request]:
    """All that user number `user` sends, without end. A closed and an open loop, gRPC and HTTP send the same."""
    rng = random.Random(f"{options.seed}/{user}/requests")
    number = 0
    while True:
        prompt = options.prompts.draw(rng)
        max_tokens, seed, cancels = options.max_tokens.draw(rng), rng.getrandbits(_SEED_BITS), rng.random()
        inputs = {"max_tokens": max_tokens, "seed": seed, **prompt}
        if options.ignore_eos:
            inputs["ignore_eos"] = True
        midway = rng.randint(1, max(1, inputs["max_tokens"] - 1))
        yield Request(number, inputs, midway if cancels < options.cancel_share else None)
        number += 1


def arrivals(options: LoadOptions, user: int) -> Iterator[float]:
    """When each of its requests is due in an open loop: seconds after the user's start, a Poisson process of
    `options.rate`. Users together are one Poisson process of the sum of their rates."""
    if options.rate is None:
        raise ValueError("arrivals: rate is not set")
    rng = random.Random(f"{options.seed}/{user}/arrivals")
    at = 0.0
    while True:
        at += rng.expovariate(options.rate)
        yield at
