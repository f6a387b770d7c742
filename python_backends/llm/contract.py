# SPDX-License-Identifier: Apache-2.0
"""The messages between `token_router` and an LLM. One `StepRequest` is one call, is one batched step.

A *session* is one request's state on one LLM: its tokens and their KV. The LLM keeps a session until it
is freed; a session left out of a call is untouched (a pending one costs nothing but its memory).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "GREEDY_BELOW",
    "LLMFacts",
    "SamplingParams",
    "SessionOpen",
    "SessionResult",
    "SessionStep",
    "StepRequest",
    "StepResponse",
    "StepStats",
]


GREEDY_BELOW = 1e-5  # a temperature that FP32 could not divide by; vLLM's bound too


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from the logits. Checked at the edge (`token_router/params.py`), not here.

    temperature: below GREEDY_BELOW = greedy. top_k: 0 = off. top_p: 1 = off. min_p: 0 = off.
    repetition_penalty: > 1 discourages every token of prompt and output (1 = off).
    presence_penalty, frequency_penalty: subtracted for tokens of the output only (0 = off).
    seed: with it, a request's draws are the same whatever else is served.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_greedy(self) -> bool:
        """Whether the token is simply the most probable one: no engine needs to sample for it."""
        return self.temperature < GREEDY_BELOW and not self.has_penalties


@dataclass(frozen=True)
class SessionOpen:
    """What an LLM must know of a request before its first step there.

    prompt_tokens: the prompt's length: penalties count the output apart, and prefill is cut within it.
    limit: the length of the sequence (prompt included) at which the request ends.
    stop_at_eos: false = the end-of-sequence tokens are tokens like others (`ignore_eos`).
    router_params: the routing parameters that this request overrides.
    """

    session: int
    prompt_tokens: int
    limit: int
    sampling: SamplingParams = SamplingParams()
    stop_at_eos: bool = True
    router_params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionStep:
    """One session's part of a step.

    start: the position that token_ids begin at. What the KV holds past it is dropped first: that is how
        a rejected token disappears. At most the number of tokens that the KV holds.
    token_ids: at least one.
    sample: whether to sample and route the token that follows; false = prefill only.
    """

    session: int
    start: int
    token_ids: list[int]
    sample: bool = True


@dataclass(frozen=True)
class StepRequest:
    """One call.

    steps: the sessions of this step, each at most once; may be empty.
    opens: the sessions among them that this LLM sees for the first time.
    free: sessions to forget; freed before anything else. Unknown ones are ignored.
    max_steps: how many tokens each session may get in this call (run-ahead). The LLM stops after the first
        step in which a session ends, fails, or has nothing sampled. Where the engine makes the steps by itself
        (`Engine.run`), the others stop at their next token then, and may be some steps apart.
    max_leaves: how many sessions may leave before it stops too: the others go on without them.
    number: of the call, counted by the router. follows: sessions of the call before it (number - 1), which this
        one was sent ahead of: each gets its next step here if it stayed, and an empty result if it left or ended,
        or if another call came in between.
    at_least: with fewer sessions than these in it, the step isn't made, and all results are empty.
    hello: asks for `StepResponse.facts`; frees every session first. A router says it when it starts.
    """

    steps: list[SessionStep] = field(default_factory=list)
    opens: list[SessionOpen] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    max_steps: int = 1
    max_leaves: int = 0
    number: int = 0
    follows: list[int] = field(default_factory=list)
    at_least: int = 1
    hello: bool = False


@dataclass(frozen=True)
class SessionResult:
    """What a step gave one session.

    token_ids: the tokens sampled, in order; empty after `sample=False` or an error.
    logprobs: of each token under the raw logits (0.0 where the engine has none).
    destination: of the last token: 0 = stay, j = to peer j.
    fields: what `route` gives to `send` with the last token.
    error: why this session failed; None = it didn't. A failed session must be freed.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    destination: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class StepStats:
    """compute_ms: wall time in the LLM's process, sampling and routing included.
    engine_ms: of which inside the engine.
    steps: forward steps made. sessions: held now. kv_tokens: held now, over all sessions.
    """

    compute_ms: float = 0.0
    engine_ms: float = 0.0
    steps: int = 0
    sessions: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True)
class LLMFacts:
    """What an LLM tells the router about itself.

    pid: the process that holds the weights (a Triton stub); the router watches it and ends it if it hangs. None of a
        stock `tensorrtllm` model, which has no process of its own.
    max_sessions: held at once. context_tokens: of one session, prompt and output together.
    kv_tokens: of all sessions together; a session takes whole blocks of kv_block tokens of it.
    prefill_chunk: the most tokens of one session that a step should bring; the router cuts longer
        suffixes at multiples of it.
    vocab_size: token ids are 0 to vocab_size - 1. eos_token_ids: those that end a request.
    samples: whether the engine honours `SamplingParams`. `paced` and a stock model with return_logits: false don't:
        they take greedy requests only.
    socket: the name of the Unix socket on its host that takes steps too (`step_socket.py`); None = only calls do.
    """

    name: str
    engine: str
    pid: int | None
    max_sessions: int
    context_tokens: int
    prefill_chunk: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    samples: bool
    kv_tokens: int
    kv_block: int = 1
    socket: str | None = None


@dataclass(frozen=True)
class StepResponse:
    """results: one for each of StepRequest.steps, in order, then one for each of its follows. facts: the answer to
    `hello`."""

    results: list[SessionResult] = field(default_factory=list)
    stats: StepStats = StepStats()
    facts: LLMFacts | None = None
