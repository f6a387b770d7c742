# SPDX-License-Identifier: Apache-2.0
"""A simulated request and its session on each model: what the runtime's `Request` and `Session` are to the
scheduling, without tokens."""

from __future__ import annotations

import random

__all__ = ["SimRequest", "SimSession"]


class SimRequest:
    """rid: its number, in order of arrival. arrived: when (ns). prompt: tokens.
    length: of its sequence, prompt included. limit: the length at which it ends.
    sessions: one for each model. at: the number of the model where it is.
    routing, tokens: its own random streams.
    """

    __slots__ = ("arrived", "at", "ended", "length", "limit", "prompt", "rid", "routing", "sessions", "tokens")

    def __init__(
        self, rid: int, arrived: int, prompt: int, limit: float, routing: random.Random, tokens: random.Random
    ) -> None:
        self.rid = rid
        self.arrived = arrived
        self.prompt = prompt
        self.length = prompt
        self.limit = limit
        self.routing = routing
        self.tokens = tokens
        self.sessions: list[SimSession] = []
        self.at = 0
        self.ended = False


class SimSession:
    """One request on one model; waits in the runtime's `DelayedBatchingQueue`.

    here: whether the request is at this model. busy: whether it waits or runs here (a peer's prefill may).
    left: the steps left of the request's run here, the one under way included. to: where it goes then.
    known: the tokens in this model's KV. takes: of which the step under way adds so many.
    samples: whether that step makes a token.
    waiting_since (ns), urgent: the queue's.
    """

    __slots__ = (
        "busy", "here", "known", "left", "model", "prefill_tokens", "request", "samples", "takes", "to", "urgent",
        "waiting_since",
    )  # fmt: skip

    def __init__(self, request: SimRequest, model: int, known: int) -> None:
        self.request = request
        self.model = model
        self.known = known
        self.here = False
        self.busy = False
        self.left: float = 0
        self.to = model
        self.takes = 0
        self.samples = True
        self.prefill_tokens = 0
        self.waiting_since: float = 0
        self.urgent = False

    @property
    def must_not_wait(self) -> bool:
        """Whether its batch is never delayed: a prefill, or the request's first token."""
        request = self.request
        return self.prefill_tokens > 0 or request.length == request.prompt

    @property
    def target(self) -> int:
        """How many tokens the model is to have processed: all where the request is, else the prompt but its
        last token."""
        request = self.request
        return request.length if self.here else request.prompt - 1

    def will_wait(self) -> None:
        """Say how much there is to prefill, before it joins the queue."""
        self.prefill_tokens = self.target - self.known if self.known < self.request.prompt - 1 else 0

    def plan(self, chunk: int) -> int:
        """Decide what its next step processes, at most `chunk` tokens; returns how many beyond the first."""
        target = self.target
        start = min(self.known, target - 1)
        end = target if target - start <= chunk else (start // chunk + 1) * chunk
        self.takes = end - self.known
        self.samples = self.here and end == target
        return end - start - 1
