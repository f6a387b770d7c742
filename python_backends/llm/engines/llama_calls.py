# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a step go into which call of llama.cpp.

llama.cpp takes another attention kernel from 64 query tokens of a sequence on, and the two differ in the
last bits. So the bits of a session depend on how its tokens are cut into calls; and on nothing else, if
the weights are Q4_0 or Q8_0 and flash attention is on (measured). `deterministic_calls` cuts them the same
way whatever the schedule: the prompt's positions but its last are *prefilled* alone, at fixed boundaries;
the others are *decoded*, fewer than 64 tokens of a session at a time, many sessions together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["CALL_TOKENS", "Call", "Piece", "deterministic_calls", "mixed_calls"]

CALL_TOKENS = 512  # of one call and of one micro-batch: a prompt's chunk must not be split in two
_DECODE_TOKENS = 63  # of one session in a call of the decode region


class Piece(NamedTuple):
    """Consecutive tokens of sequence `slot`, from position `start` on. output: the last one's logits are wanted."""

    slot: int
    start: int
    token_ids: Sequence[int]
    output: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def cut(self, position: int) -> tuple[Piece, Piece]:
        """What lies before the position, and from it on."""
        count = position - self.start
        return (
            Piece(self.slot, self.start, self.token_ids[:count], False),
            Piece(self.slot, position, self.token_ids[count:], self.output),
        )


class Call(NamedTuple):
    """One llama_decode. hidden_states: the outputs' are wanted too; then every token of the call is an output."""

    pieces: Sequence[Piece]
    hidden_states: bool = False


def deterministic_calls(suffixes: Sequence[tuple[Piece, int]], prefill_chunk: int, hidden_states: bool) -> list[Call]:
    """The calls of a step such that the bits of a session depend on its own tokens only.

    suffixes: of each session, its new tokens and the position at which its decode region begins.
    """
    calls: list[Call] = []
    decode: list[Piece] = []
    for suffix, decode_from in suffixes:
        rest = suffix
        while rest.start < min(rest.end, decode_from):
            boundary = (rest.start // prefill_chunk + 1) * prefill_chunk
            chunk, rest = rest.cut(min(boundary, rest.end, decode_from))
            if not rest.token_ids:  # a suffix that ends inside the prompt
                chunk = chunk._replace(output=suffix.output)
            calls.extend(_pack([chunk], CALL_TOKENS, hidden_states))
        if rest.token_ids:
            decode.append(rest)
    return calls + _pack(decode, _DECODE_TOKENS, hidden_states)


def mixed_calls(suffixes: Sequence[Piece], hidden_states: bool) -> list[Call]:
    """The fewest calls, prompts and single tokens mixed: the bits of a session depend on who else is served."""
    return _pack(suffixes, CALL_TOKENS, hidden_states)


def _pack(pieces: Sequence[Piece], session_tokens: int, hidden_states: bool) -> list[Call]:
    """Pieces of different sessions in calls with at most `session_tokens` of a session in each."""
    if not hidden_states:
        return [Call(c) for c in _fill(pieces, session_tokens)]
    # every token would go through the head, so the ones whose hidden states are wanted go apart
    bodies, lasts = [], []
    for piece in pieces:
        body, last = piece.cut(piece.end - piece.output)
        bodies += [body] if body.token_ids else []
        lasts += [last] if last.token_ids else []
    return [Call(c) for c in _fill(bodies, session_tokens)] + [Call(c, True) for c in _fill(lasts, session_tokens)]


def _fill(pieces: Sequence[Piece], session_tokens: int) -> list[list[Piece]]:
    """Calls of at most CALL_TOKENS, filled in order, with one piece of a session in each."""
    calls = []
    while pieces:
        call, later, room = [], [], CALL_TOKENS
        for piece in pieces:
            if len(piece.token_ids) <= min(session_tokens, room):
                now = piece
            else:
                now, rest = piece.cut(piece.start + min(session_tokens, room))
                later.append(rest)
            if now.token_ids:
                call.append(now)
                room -= len(now.token_ids)
        calls.append(call)
        pieces = later
    return calls
