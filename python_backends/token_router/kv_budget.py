# SPDX-License-Identifier: Apache-2.0
"""Who may take KV: every model's, in tokens, and what the requests being generated have reserved of it.

A request is on all models, and each may come to hold all of its sequence. So it reserves its whole limit on every
one of them when it is admitted, and no step ever finds the KV full (docs/decisions/0014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from python_backends.llm.contract import LLMFacts

__all__ = ["KvBudget", "KvPool"]


@dataclass(frozen=True)
class KvPool:
    """One model's KV. tokens: of all sessions together. block: a session takes whole blocks of so many tokens."""

    model: str
    tokens: int
    block: int

    @classmethod
    def of(cls, facts: LLMFacts) -> KvPool:
        """As the model says of itself."""
        return cls(facts.name, facts.kv_tokens, facts.kv_block)

    @property
    def longest(self) -> int:
        """The longest sequence that it could hold, with nobody else there."""
        return self.tokens - self.tokens % self.block

    def takes(self, length: int) -> int:
        """The tokens that a sequence of this length takes of it."""
        return -(-length // self.block) * self.block


class KvBudget:
    """What is reserved on each model, by model number. Belongs to the event loop's thread.

    models: their names. Nothing fits before they have said what they hold. pools: what that is.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self.pools = tuple(KvPool(name, 0, 1) for name in models)
        self._lengths: dict[int, int] = {}  # of the sequences that have reserved, by request

    def use(self, pools: Sequence[KvPool]) -> None:
        """What the models hold from now on."""
        self.pools = tuple(pools)

    def could_fit(self, length: int) -> bool:
        """Whether a sequence of this length fits on every model with nobody else there."""
        return all(length <= pool.longest for pool in self.pools)

    def fits(self, length: int) -> bool:
        """Whether it fits on every model now."""
        return all(pool.takes(length) <= free for pool, free in zip(self.pools, self.free(), strict=True))

    def over_committed(self) -> bool:
        """Whether more is reserved than there is: a model came back smaller than it was."""
        return any(taken > pool.tokens for pool, taken in zip(self.pools, self.reserved(), strict=True))

    def reserve(self, rid: int, length: int) -> None:
        """For request `rid`; the caller has asked whether it fits."""
        self._lengths[rid] = length

    def release(self, rid: int) -> None:
        """The request has ended."""
        del self._lengths[rid]

    def reserved(self) -> list[int]:
        """Tokens, on each model."""
        return [sum(map(pool.takes, self._lengths.values())) for pool in self.pools]

    def free(self) -> list[int]:
        """Tokens that nobody has reserved, on each model."""
        return [max(0, pool.tokens - taken) for pool, taken in zip(self.pools, self.reserved(), strict=True)]
