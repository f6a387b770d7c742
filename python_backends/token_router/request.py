# SPDX-License-Identifier: Apache-2.0
"""A client's request, and its session on each model. All of it belongs to the event loop's thread."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from python_backends.llm.contract import SamplingParams, SessionOpen, SessionResult, SessionStep
from python_backends.token_router.responses import Chunk, ResponseStream
from python_backends.token_router.text import TextStream

__all__ = ["Request", "Session", "SessionState"]


class SessionState(enum.Enum):
    """Where a session stands on its model.

    WAITING: in the delayed-batching queue. RUNNING: in the call under way. PENDING: the request is at
    another model; session and KV are kept. FINISHED: the request has ended.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PENDING = "pending"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request, from admission to its final answer.

    limit: the length of the sequence, prompt included, at which it ends.
    eos_token_ids: the tokens that end it; empty when the client ignores them.
    router_params: what it overrides of the router's parameters.
    text: turns committed tokens into text and finds stop strings (client loop).
    output_ids, output_models: the committed tokens and the number of the model that made each (client loop).
    sessions: one for each model, by its number (inter-model loop, at admission).
    handoffs: deliveries from model to model (inter-model loop).
    idle_handoffs: of which since the last committed token.
    whole: the answer so far, of a request that is not streamed (client loop).
    """

    rid: int
    prompt_ids: list[int]
    limit: int
    eos_token_ids: frozenset[int]
    sampling: SamplingParams
    router_params: dict[str, Any]
    stream: ResponseStream
    text: TextStream
    streaming: bool = True
    want_log_probs: bool = False
    output_ids: list[int] = field(default_factory=list)
    output_models: list[int] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    handoffs: int = 0
    idle_handoffs: int = 0
    whole: Chunk = field(default_factory=Chunk)
    ended: bool = False

    def ends(self, token_ids: Sequence[int], length: int) -> bool:
        """Whether a sequence of `length` tokens, the last of them as in `token_ids`, is complete."""
        if length <= len(self.prompt_ids) or not token_ids:
            return False
        return token_ids[-1] in self.eos_token_ids or length >= self.limit

    @property
    def committed(self) -> int:
        """The length of the sequence that the client has or will get, prompt included."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(eq=False)
class Session:
    """One request on one model; what that model's `send` sees (`routers.RoutedRequest`).

    output_ids: the tokens after the prompt that this model knows, the one just sampled included.
    log_probs: of those of output_ids that this model made, by place; 0.0 for the others.
    peer_locs: see RoutedRequest (inter-model loop).
    kv_tokens: how many tokens of this sequence are in the model's KV and right (decoding loop).
    here: whether the request is at this model; else its tokens are prefilled only (inter-model loop).
    waiting_since: when it joined the queue, in event-loop seconds; urgent: whether it may not be delayed
        (delayed-batching queue).
    """

    request: Request
    model: int
    peer_locs: list[int]
    state: SessionState = SessionState.PENDING
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kv_tokens: int = 0
    here: bool = False
    destination: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    waiting_since: float = 0.0
    urgent: bool = False

    @property
    def rid(self) -> int:
        return self.request.rid

    @property
    def origin_input_ids(self) -> list[int]:
        return self.request.prompt_ids

    def finished(self) -> bool:
        """Whether the last token of output_ids would end the request, if it is kept."""
        return self.request.ends(self.output_ids, self.length)

    @property
    def length(self) -> int:
        """Of the sequence as this model knows it, prompt included."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def prefilling(self) -> bool:
        """Whether the model has yet to process the prompt, the last token apart (that one is decoded)."""
        return self.kv_tokens < len(self.request.prompt_ids) - 1

    @property
    def prefill_tokens(self) -> int:
        """How many tokens are still to be prefilled; 0 = it decodes (delayed_batching.Waiter)."""
        return self.target - self.kv_tokens if self.prefilling else 0

    @property
    def must_not_wait(self) -> bool:
        """Whether its batch is never delayed (delayed_batching.Waiter)."""
        return self.prefilling or not self.request.output_ids

    @property
    def target(self) -> int:
        """How many tokens the model is to have processed: all it knows where the request is, else the
        prompt but its last token, whose logits would be of no use there."""
        return self.length if self.here else len(self.request.prompt_ids) - 1

    def next_step(self, chunk: int) -> SessionStep:
        """The session's part of the next call: what its model hasn't processed, at most `chunk` tokens.

        A longer suffix is cut at a multiple of `chunk`, counted from the sequence's start, so that the
        pieces don't depend on the schedule.
        """
        target = self.target
        start = min(self.kv_tokens, target - 1)
        end = target if target - start <= chunk else (start // chunk + 1) * chunk
        return SessionStep(self.rid, start, self.tokens(start, end), sample=self.here and end == target)

    def tokens(self, start: int, end: int) -> list[int]:
        """Positions start to end of the sequence as this model knows it."""
        prompt = self.request.prompt_ids
        if start >= len(prompt):
            return self.output_ids[start - len(prompt) : end - len(prompt)]
        return (prompt[start:end] + self.output_ids[: max(0, end - len(prompt))])[: end - start]

    def opening(self) -> SessionOpen:
        """What the model is told before the session's first step."""
        request = self.request
        return SessionOpen(
            session=request.rid,
            prompt_tokens=len(request.prompt_ids),
            limit=request.limit,
            sampling=request.sampling,
            stop_at_eos=bool(request.eos_token_ids),
            router_params=request.router_params,
        )

    def take_result(self, step: SessionStep, result: SessionResult) -> None:
        """Note what a call did: the KV's length, the sampled tokens, what `route` said of the last."""
        self.kv_tokens = step.start + len(step.token_ids) + max(0, len(result.token_ids) - 1)
        self.output_ids += result.token_ids
        self.log_probs += result.logprobs
        self.destination = result.destination
        self.fields = result.fields

    def splice(self, start: int, token_ids: list[int]) -> None:
        """Replace the sequence from position `start` on (at or after the prompt) by these tokens.

        Where they differ from what was there, the KV behind is no longer right.
        """
        at = start - len(self.request.prompt_ids)
        same = 0
        for old, new in zip(self.output_ids[at:], token_ids, strict=False):
            if old != new:
                break
            same += 1
        self.output_ids[at + same :] = token_ids[same:]
        self.log_probs[at + same :] = [0.0] * (len(token_ids) - same)
        self.kv_tokens = min(self.kv_tokens, start + same)
