# SPDX-License-Identifier: Apache-2.0
"""Which KV a stock model would reuse: the bookkeeping of TensorRT-LLM's KV manager, without the KV.

After loadOrAllocateBlocks, storeBlocksForReuse and the eviction policy of kvCacheManager.cpp in 1.0 to 1.2: a radix
tree whose edges are blocks of tokens. Of a prompt, the blocks of all tokens but the last are looked up: whole blocks
first, then the longest beginning of one more. A request's blocks are stored when it has ended, its last token left
out. Blocks that nobody uses are evicted leaves first, by priority and then by age.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

DEFAULT_PRIORITY = 35


@dataclass(frozen=True)
class Retention:
    """Of a request's blocks: the priority of the prompt's and of the others, and for how many ms (None = for ever)."""

    prompt: int = DEFAULT_PRIORITY
    decode: int = DEFAULT_PRIORITY
    duration_ms: int | None = None


@dataclass(eq=False)
class _Block:
    """tokens: at most a block's. children: by their tokens. users: requests that hold it."""

    tokens: tuple[int, ...] = ()
    parent: _Block | None = None
    children: dict[tuple[int, ...], _Block] = field(default_factory=dict)
    users: int = 0
    priority: int = DEFAULT_PRIORITY
    expires_s: float = math.inf
    used: int = 0


@dataclass(eq=False)
class Lease:
    """One request's blocks. reused, new: how many were found, and how many were not. reused_tokens: KV that needn't
    be computed; always less than the prompt."""

    prompt: tuple[int, ...]
    retention: Retention
    held: list[_Block]
    private: int
    reused: int
    new: int
    reused_tokens: int


class BlockCache:
    """blocks: how many there are, of `size` tokens. clock: seconds."""

    def __init__(self, blocks: int, size: int, clock: Callable[[], float], reuse: bool = True) -> None:
        self._free = blocks
        self._size = size
        self._clock = clock
        self._reuse = reuse
        self._root = _Block()
        self._ages = itertools.count()

    @property
    def stored(self) -> int:
        """Blocks in the tree."""
        return sum(1 for _ in self._under(self._root))

    def begin(self, prompt: Sequence[int], output: int, retention: Retention) -> Lease | None:
        """A request's blocks, with room for `output` tokens; None = it has to wait for others to end."""
        size = self._size
        held, tokens, partial = self._match(prompt[:-1]) if self._reuse else ([], 0, None)
        wanted = -(-(len(prompt) + output) // size) - len(held)
        takes_leaf = partial is not None and not partial.children and not partial.users
        for block in (*held, *([partial] if partial else [])):
            block.users += 1  # not to be evicted for this very request
        if takes_leaf:
            self._drop(partial)  # its own from now on
        fits = self._make_room(wanted)
        if partial is not None and not takes_leaf:
            partial.users -= 1
        if not fits:
            for block in held:
                block.users -= 1
            return None
        self._free -= wanted
        reused = len(held) + (partial is not None)
        new = -(-len(prompt) // size) - len(held) - takes_leaf
        return Lease(tuple(prompt), retention, held, wanted, reused, new, tokens)

    def end(self, lease: Lease, output: Sequence[int]) -> None:
        """The request has ended with these tokens after its prompt: what has KV is stored."""
        tokens = (*lease.prompt, *output)[:-1]
        node, spare = self._root, lease.private
        for at in range(0, len(tokens) if self._reuse else 0, self._size):
            key = tokens[at : at + self._size]
            child = node.children.get(key)
            if child is None:
                if not spare:
                    break
                spare -= 1
                child = node.children[key] = _Block(key, node)
            self._keep(child, lease.retention, at < len(lease.prompt))
            node = child
        for block in lease.held:
            block.users -= 1
        self._free += spare

    def _match(self, tokens: Sequence[int]) -> tuple[list[_Block], int, _Block | None]:
        """The whole blocks, how many tokens are known in all, and the block that begins with the rest of them."""
        held: list[_Block] = []
        node, at = self._root, 0
        while at < len(tokens):
            key = tuple(tokens[at : at + self._size])
            child = node.children.get(key) if len(key) == self._size else None
            if child is None:
                common, partial = max(
                    ((_common(key, tokens_), block) for tokens_, block in node.children.items()),
                    key=lambda found: found[0],
                    default=(0, None),
                )
                return held, at + common, partial if common else None
            held.append(child)
            node, at = child, at + self._size
        return held, at, None

    def _keep(self, block: _Block, retention: Retention, of_prompt: bool) -> None:
        block.used = next(self._ages)
        block.priority = retention.prompt if of_prompt else retention.decode
        block.expires_s = math.inf if retention.duration_ms is None else self._clock() + retention.duration_ms / 1000

    def _make_room(self, wanted: int) -> bool:
        if self._free + sum(not block.users for block in self._under(self._root)) < wanted:
            return False
        while self._free < wanted:
            leaves = [b for b in self._under(self._root) if not b.children and not b.users]
            self._drop(min(leaves, key=self._worth))
        return True

    def _worth(self, block: _Block) -> tuple[int, int]:
        return (DEFAULT_PRIORITY if self._clock() >= block.expires_s else block.priority, block.used)

    def _drop(self, block: _Block) -> None:
        assert block.parent is not None
        del block.parent.children[block.tokens]
        self._free += 1

    def _under(self, node: _Block) -> Iterator[_Block]:
        for child in node.children.values():
            yield child
            yield from self._under(child)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
