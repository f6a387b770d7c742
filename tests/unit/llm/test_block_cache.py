# SPDX-License-Identifier: Apache-2.0
"""The stand-in's account of KV blocks: what is reused, what is lost, who is evicted first."""

from __future__ import annotations

import pytest

from tests.triton.backends.tensorrtllm.block_cache import BlockCache, Lease, Retention

SIZE = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def cache(blocks: int = 100, reuse: bool = True, clock: Clock | None = None) -> BlockCache:
    return BlockCache(blocks, SIZE, clock or Clock(), reuse)


def run(cache: BlockCache, prompt: list[int], output: list[int], retention: Retention | None = None) -> Lease:
    """A request from its beginning to its end."""
    lease = cache.begin(prompt, len(output), retention or Retention())
    assert lease is not None
    cache.end(lease, output)
    return lease


@pytest.mark.parametrize("length", range(1, 14))
def test_a_prompt_that_was_there_is_reused_but_for_its_last_token(length: int) -> None:
    blocks, prompt = cache(), list(range(length))
    first = run(blocks, prompt, [99])
    assert (first.reused, first.reused_tokens, first.new) == (0, 0, -(-length // SIZE))
    again = run(blocks, prompt, [99])
    assert (again.reused_tokens, again.reused) == (length - 1, -(-(length - 1) // SIZE))


def test_token_by_token_only_the_last_token_is_computed() -> None:
    blocks, sequence = cache(), list(range(5))
    run(blocks, sequence, [5])
    for token in range(5, 30):
        sequence.append(token)
        lease = run(blocks, sequence, [token + 1])
        assert lease.reused_tokens == len(sequence) - 1
    assert blocks.stored == -(-30 // SIZE)  # one chain: the partial block was taken along


def test_a_generated_token_is_stored_and_the_last_one_is_not() -> None:
    blocks = cache()
    run(blocks, [1, 2, 3], [4, 5, 6])
    lease = blocks.begin([1, 2, 3, 4, 5, 6, 7], 1, Retention())
    assert lease is not None and lease.reused_tokens == 5


def test_another_continuation_shares_the_beginning_of_a_block() -> None:
    blocks = cache()
    run(blocks, [1, 2, 3, 4, 5, 6, 7, 8], [9])
    lease = run(blocks, [1, 2, 3, 4, 5, 6, 70, 80], [90])
    assert (lease.reused_tokens, lease.reused) == (6, 2)


def test_what_is_stored_only_when_the_owner_has_ended() -> None:
    blocks, prompt = cache(), list(range(9))
    owner = blocks.begin(prompt, 1, Retention())
    beside = blocks.begin(prompt, 1, Retention())
    assert owner is not None and beside is not None and beside.reused == 0
    blocks.end(owner, [1])
    assert run(blocks, prompt, [1]).reused_tokens == 8
    blocks.end(beside, [1])
    assert blocks.stored == 3  # both had the same: one copy is kept


def test_a_full_cache_lets_requests_wait_and_evicts_leaves_by_age() -> None:
    blocks = cache(blocks=4)
    run(blocks, [1] * 3, [2])
    run(blocks, [3] * 3, [4])
    assert run(blocks, [1] * 3, [2]).reused_tokens == 2  # younger than [3] now
    big = blocks.begin([5] * 11, 1, Retention())  # 3 of 4 blocks: one stored prefix has to go
    assert big is not None
    assert blocks.begin([6] * 5, 1, Retention()) is None  # 2 blocks; whoever waits evicts nothing
    assert run(blocks, [1] * 3, [2]).reused_tokens == 2
    blocks.end(big, [5])
    assert run(blocks, [6] * 5, [7]).reused == 0


def test_priority_comes_before_age_until_it_expires() -> None:
    clock = Clock()
    blocks, dear = cache(blocks=2, clock=clock), Retention(100, 100, duration_ms=1000)
    run(blocks, [1] * 3, [2], dear)
    run(blocks, [3] * 3, [4])
    run(blocks, [5] * 3, [6])  # evicts [3], which is younger but worth less
    assert run(blocks, [1] * 3, [2], dear).reused_tokens == 2
    clock.now = 2.0
    run(blocks, [7] * 3, [8])
    run(blocks, [9] * 3, [8])
    assert run(blocks, [1] * 3, [2]).reused == 0


def test_without_reuse_nothing_is_stored() -> None:
    blocks = cache(reuse=False)
    run(blocks, [1] * 9, [2])
    assert run(blocks, [1] * 9, [2]).reused == 0 and blocks.stored == 0
