# SPDX-License-Identifier: Apache-2.0
"""From a client's inputs to a request that the runtime can take: parse, tokenise, check against what the
models can hold. Runs in the thread that receives requests; it keeps no state."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from python_backends.llm.contract import GREEDY_BELOW, LLMFacts
from python_backends.token_router.config import LimitsConfig
from python_backends.token_router.errors import InvalidRequest
from python_backends.token_router.kv_budget import KvPool
from python_backends.token_router.params import GenerateParams, Message
from python_backends.token_router.request import Request
from python_backends.token_router.responses import Chunk, ResponseStream
from python_backends.token_router.text import TextStream
from python_backends.token_router.tokenizer import Tokenizer
from routers import RouterConfig

__all__ = ["Intake", "Served", "Submission"]


@dataclass(frozen=True)
class Served:
    """What all models together can take.

    context_tokens, vocab_size: the smallest of any. eos_token_ids: of any. greedy_only: the models whose
    engines can't sample. pools: the KV of each model, in order.
    """

    context_tokens: int
    vocab_size: int
    max_sessions: int
    eos_token_ids: frozenset[int]
    greedy_only: tuple[str, ...]
    pools: tuple[KvPool, ...]

    @classmethod
    def by(cls, facts: Sequence[LLMFacts]) -> Served:
        """From what every model said of itself."""
        return cls(
            context_tokens=min(f.context_tokens for f in facts),
            vocab_size=min(f.vocab_size for f in facts),
            max_sessions=min(f.max_sessions for f in facts),
            eos_token_ids=frozenset(i for f in facts for i in f.eos_token_ids),
            greedy_only=tuple(f.name for f in facts if not f.samples),
            pools=tuple(KvPool.of(f) for f in facts),
        )


@dataclass(frozen=True)
class Submission:
    """A checked request, not yet taken."""

    prompt_ids: list[int]
    max_tokens: int
    params: GenerateParams
    seed: int
    eos_token_ids: frozenset[int]
    pieces: Sequence[bytes] | None
    echo: str

    @property
    def limit(self) -> int:
        """The length of the sequence, prompt included, at which it ends."""
        return len(self.prompt_ids) + self.max_tokens

    def request(self, rid: int, stream: ResponseStream) -> Request:
        """The request, under its number, answered through `stream`."""
        request = Request(
            rid=rid,
            prompt_ids=self.prompt_ids,
            limit=self.limit,
            eos_token_ids=self.eos_token_ids,
            sampling=self.params.sampling(self.seed),
            router_params=self.params.router_params,
            stream=stream,
            text=TextStream(self.pieces, self.params.stop_words),
            streaming=self.params.stream,
            want_log_probs=self.params.return_log_probs,
        )
        if self.echo:
            first = Chunk(text=self.echo)
            if request.streaming:
                stream.send(first)
            else:
                request.whole = first
        return request


class Intake:
    """Checks requests for one deployment."""

    def __init__(
        self, tokenizer: Tokenizer | None, router: RouterConfig, models: Sequence[str], limits: LimitsConfig
    ) -> None:
        self._tokenizer = tokenizer
        self._router = router
        self._models = models
        self._limits = limits
        self._needs_sampling = router.algorithm().needs_sampling

    def check(self, inputs: Mapping[str, Any], served: Served) -> Submission:
        """The request that these inputs ask for. Raises InvalidRequest."""
        params = GenerateParams.parse(inputs)
        if params.router_params:
            try:
                self._router.override(params.router_params, self._models)
            except ValueError as error:
                raise InvalidRequest(f"router_params: {error}") from error
        if params.stop_words and self._tokenizer is None:
            raise InvalidRequest("stop_words: this deployment has no tokenizer, so it makes no text to find them in")
        self._check_sampling(params, served)
        prompt_ids = self._prompt_ids(params, served)
        return Submission(
            prompt_ids=prompt_ids,
            max_tokens=self._max_tokens(params, len(prompt_ids), served),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos_token_ids=frozenset() if params.ignore_eos else served.eos_token_ids,
            pieces=None if self._tokenizer is None else self._tokenizer.pieces,
            echo=self._echo(params, prompt_ids),
        )

    def _check_sampling(self, params: GenerateParams, served: Served) -> None:
        if served.greedy_only and not params.sampling(seed=0).is_greedy:
            raise InvalidRequest(
                f"sampling parameters: the engine of model '{served.greedy_only[0]}' can't sample;"
                " allowed: greedy requests only"
            )
        if self._needs_sampling:
            self._check_leaves_a_choice(params, served)

    def _check_leaves_a_choice(self, params: GenerateParams, served: Served) -> None:
        """Refuses what always leaves one token to draw from: that is greedy, whatever the temperature."""
        # the most probable of V tokens has 1/V or more: no second one is needed to reach a top_p up to that
        top_p_above = 1 / served.vocab_size
        for field, leaves_a_choice, allowed in (
            ("temperature", params.temperature >= GREEDY_BELOW, f"{GREEDY_BELOW:g} or more"),
            ("top_k", params.top_k != 1, "0 (off), or 2 or more"),
            ("top_p", params.top_p > top_p_above, f"above {top_p_above:g}"),
            ("min_p", params.min_p < 1, "below 1"),
        ):
            if not leaves_a_choice:
                raise InvalidRequest(
                    f"{field}: router '{self._router.name}' must sample; allowed: {allowed},"
                    f" got {getattr(params, field):g}"
                )

    def _prompt_ids(self, params: GenerateParams, served: Served) -> list[int]:
        if params.input_ids is not None:
            return self._checked_ids(params.input_ids, served)
        field = "text_input" if params.text_input is not None else "messages"
        if self._tokenizer is None:
            raise InvalidRequest(f"{field}: this deployment has no tokenizer; send input_ids")
        text = params.text_input
        if text is None:
            text = self._rendered(params.messages or (), served, self._tokenizer)
        self._check_bytes(field, len(text.encode()), served, self._tokenizer)
        ids = self._tokenizer.encode(text, rendered=params.messages is not None)
        if not ids:
            raise InvalidRequest(f"{field}: is empty; at least one token is needed")
        return ids

    @staticmethod
    def _rendered(messages: Sequence[Message], served: Served, tokenizer: Tokenizer) -> str:
        if len(messages) > served.context_tokens:  # each takes a token or more, and some time to render
            raise InvalidRequest(
                f"messages: {len(messages)} of them can't fit in the context of {served.context_tokens} tokens"
            )
        try:
            return tokenizer.render_chat([message.model_dump() for message in messages])
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    @staticmethod
    def _checked_ids(ids: list[int], served: Served) -> list[int]:
        if not ids:
            raise InvalidRequest("input_ids: is empty; at least one token is needed")
        for at, token in enumerate(ids):
            if not 0 <= token < served.vocab_size:
                raise InvalidRequest(
                    f"input_ids[{at}]: {token} is not in the vocabulary; allowed: 0 to {served.vocab_size - 1}"
                )
        return ids

    @staticmethod
    def _check_bytes(field: str, size: int, served: Served, tokenizer: Tokenizer) -> None:
        # Before tokenising: a prompt of 100 MB would take seconds to find out that it doesn't fit.
        most = served.context_tokens * tokenizer.longest_piece
        if size > most:
            raise InvalidRequest(
                f"{field}: {size} bytes can't fit in the context of {served.context_tokens} tokens;"
                f" allowed: at most {most} bytes"
            )

    def _max_tokens(self, params: GenerateParams, prompt_tokens: int, served: Served) -> int:
        most, where = served.context_tokens, "context"
        smallest = min(served.pools, key=lambda pool: pool.longest)
        if smallest.longest < most:
            most, where = smallest.longest, f"KV of model '{smallest.model}'"
        room = most - prompt_tokens
        if room < 1:
            raise InvalidRequest(
                f"prompt: {prompt_tokens} tokens leave no room for an answer; the {where} holds {most} tokens"
            )
        if params.max_tokens is None:
            return min(self._limits.default_max_tokens, room)
        if params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens: {params.max_tokens} with a prompt of {prompt_tokens} tokens is more than the"
                f" {where} of {most}; allowed: 1 to {room}"
            )
        return params.max_tokens

    def _echo(self, params: GenerateParams, prompt_ids: list[int]) -> str:
        if params.exclude_input_in_output:
            return ""
        if params.text_input is not None:
            return params.text_input
        if self._tokenizer is None:
            raise InvalidRequest("exclude_input_in_output: false needs a tokenizer, and this deployment has none")
        return self._tokenizer.decode(prompt_ids)
