# SPDX-License-Identifier: Apache-2.0
"""What a request's client is sent, and the way there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from python_backends.token_router.errors import TokenRouterError

__all__ = ["Chunk", "ResponseStream", "Usage"]


@dataclass(frozen=True)
class Usage:
    """The counts of a finished request. completion_tokens_by_model: every model, by name."""

    prompt_tokens: int
    completion_tokens: int
    completion_tokens_by_model: dict[str, int]
    handoffs: int


@dataclass
class Chunk:
    """Newly committed tokens, in order, and the text they complete.

    models: the model that made each token. log_probs: of each token; empty unless asked for.
    finish_reason, usage: in a request's last chunk only.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None

    def extend(self, other: Chunk) -> None:
        """Append the chunk that follows this one."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.models += other.models
        self.log_probs += other.log_probs
        self.finish_reason = other.finish_reason
        self.usage = other.usage


class ResponseStream(Protocol):
    """One request's way back to its client. Never blocks. Called by the event loop's thread, but for a request
    that is refused before it gets there.

    Exactly one final call is made: `send` with a chunk that has a finish_reason, or `fail`.
    """

    def send(self, chunk: Chunk) -> Any: ...

    def fail(self, error: TokenRouterError) -> Any: ...
