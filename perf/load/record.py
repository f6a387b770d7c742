# SPDX-License-Identifier: Apache-2.0
"""What a load run has seen: every request, and every response that brought tokens. No Locust here.

TTFT: from sending a request to its first token. ITL, the inter-token latency: a response with n tokens that comes t
after the response before gives n values of t / n, one for each token; the tokens of the first response have none.
So it is the t / n of genai-perf ("time between intermediate responses divided by the number of generated tokens of the
latter response"), each token counting once as in SGLang's benchmark, and the mean over one request is what vLLM calls
TPOT whenever the first response has one token. vLLM's own ITL is t, not t / n: the same while every response has one
token.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum

from perf.load.schedule import Request

__all__ = ["Chunks", "Measured", "Outcome", "Recorder"]


class Outcome(Enum):
    """How a request ended. UNFINISHED: the run ended first, which cancelled it."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNFINISHED = "unfinished"


@dataclass
class Measured:
    """One request. Times are time.monotonic(), in seconds.

    due_at: when it should have been sent, in an open loop. ended_at: of its end, whatever the outcome.
    first_at, last_at: of the first and the last response with tokens; first_tokens: how many the first one had.
    """

    protocol: str
    user: int
    request: Request
    sent_at: float
    due_at: float | None = None
    ended_at: float = math.nan
    first_at: float | None = None
    last_at: float | None = None
    first_tokens: int = 0
    tokens: int = 0
    outcome: Outcome = Outcome.UNFINISHED
    error: str = ""

    def add(self, received_at: float, count: int) -> float | None:
        """Takes `count` > 0 new tokens in. The ITL of each of them, in seconds; None for the first ones."""
        itl_s = None if self.last_at is None else (received_at - self.last_at) / count
        if self.first_at is None:
            self.first_at, self.first_tokens = received_at, count
        self.last_at = received_at
        self.tokens += count
        return itl_s

    @property
    def ttft_s(self) -> float | None:
        """None before the first token."""
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first response, so that waiting and the prompt don't count; None with one only."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return None
        return (self.tokens - self.first_tokens) / (self.last_at - self.first_at)

    @property
    def duration_s(self) -> float:
        """From sending to the end."""
        return self.ended_at - self.sent_at

    @property
    def lag_s(self) -> float | None:
        """How much later than due it was sent; None in a closed loop. A client that can't keep up shows here."""
        return None if self.due_at is None else self.sent_at - self.due_at


@dataclass
class Chunks:
    """Every response with tokens of one protocol: when it came (time.monotonic()), how many tokens it had, and the
    ITL of each of them in seconds (nan in the first response of a request)."""

    received_at: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("l"))
    itl_s: array[float] = field(default_factory=lambda: array("d"))


class Recorder:
    """One run. began_at, ended_at: time.monotonic(), in seconds."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.ended_at = math.nan
        self.requests: list[Measured] = []
        self.chunks: dict[str, Chunks] = defaultdict(Chunks)

    def tokens(self, measured: Measured, received_at: float, count: int) -> float | None:
        """A response with `count` > 0 tokens. The ITL of each of them, as `Measured.add`."""
        itl_s = measured.add(received_at, count)
        chunks = self.chunks[measured.protocol]
        chunks.received_at.append(received_at)
        chunks.tokens.append(count)
        chunks.itl_s.append(math.nan if itl_s is None else itl_s)
        return itl_s

    @property
    def duration_s(self) -> float:
        """Of the whole run."""
        return self.ended_at - self.began_at

    @property
    def protocols(self) -> list[str]:
        """Those that have sent anything."""
        return sorted({measured.protocol for measured in self.requests})
