# SPDX-License-Identifier: Apache-2.0
"""How a step is cut into calls of llama.cpp: everything once, in order, and cut by position alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.llm.engines.llama_calls import CALL_TOKENS, Call, Piece, deterministic_calls, mixed_calls

CHUNK = 128


def suffix(slot: int, start: int, length: int, output: bool = True) -> Piece:
    return Piece(slot, start, range(start, start + length), output)  # each token is its position


suffixes = st.lists(
    st.tuples(st.integers(0, 700), st.integers(1, 700), st.booleans(), st.integers(0, 800)), max_size=5
).map(lambda rows: [(suffix(slot, start, n, out), frm) for slot, (start, n, out, frm) in enumerate(rows)])


def check(calls: Sequence[Call], wanted: Sequence[Piece], hidden_states: bool) -> None:
    for call in calls:
        assert 0 < sum(len(p.token_ids) for p in call.pieces) <= CALL_TOKENS
        assert len({p.slot for p in call.pieces}) == len(call.pieces)
        assert call.hidden_states == (hidden_states and any(p.output for p in call.pieces))
        assert not call.hidden_states or all(p.output and len(p.token_ids) == 1 for p in call.pieces)
    for whole in wanted:
        mine = [p for call in calls for p in call.pieces if p.slot == whole.slot]
        assert [p.start for p in mine[1:]] == [p.end for p in mine[:-1]] and mine[0].start == whole.start
        assert [t for p in mine for t in p.token_ids] == list(whole.token_ids)
        assert [p.output for p in mine] == [False] * (len(mine) - 1) + [whole.output]


@given(suffixes, st.booleans())
def test_every_token_once_and_in_order(given_: list[tuple[Piece, int]], hidden_states: bool) -> None:
    pieces = [p for p, _ in given_]
    check(mixed_calls(pieces, hidden_states), pieces, hidden_states)
    calls = deterministic_calls(given_, CHUNK, hidden_states)
    check(calls, pieces, hidden_states)
    for call in calls:
        for piece in call.pieces:
            decode_from = given_[piece.slot][1]
            if piece.start < decode_from:  # prefill: alone, within one chunk, before the prompt's last token
                assert len(call.pieces) == 1
                assert piece.end <= decode_from and (piece.end - 1) // CHUNK == piece.start // CHUNK
            else:
                assert len(piece.token_ids) < 64


@pytest.mark.parametrize("first", [128, 256, 384])
def test_prefill_is_cut_alike_whatever_came_first(first: int) -> None:
    def cuts(*parts: tuple[int, int]) -> list[tuple[int, int]]:
        calls = [
            c for start, end in parts for c in deterministic_calls([(suffix(0, start, end - start), 399)], CHUNK, False)
        ]
        return [(p.start, p.end) for c in calls for p in c.pieces]

    assert cuts((0, 400)) == [(0, 128), (128, 256), (256, 384), (384, 399), (399, 400)]
    assert cuts((0, first), (first, 400)) == cuts((0, 400))


def test_single_tokens_share_one_call() -> None:
    (call,) = deterministic_calls([(suffix(slot, 200, 1), 100) for slot in range(200)], CHUNK, False)
    assert len(call.pieces) == 200
