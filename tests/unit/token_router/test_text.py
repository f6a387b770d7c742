# SPDX-License-Identifier: Apache-2.0
"""Text out of tokens: no broken character, no leaked stop string, whatever the cuts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.token_router.text import TextStream


def _stream(pieces: list[bytes], stop: list[str]) -> tuple[list[str], bool]:
    """What is sent after each token, and at the end if no stop string came."""
    stream = TextStream(pieces, stop)
    sent = []
    for i in range(len(pieces)):
        sent.append(stream.push(i))
        if stream.stopped:
            return sent, True
    sent.append(stream.flush())
    return sent, stream.stopped


@st.composite
def _cut_texts(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    text = draw(st.text(st.sampled_from("ab\n é€😀漢"), max_size=30))
    raw = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    return text, [raw[a:b] for a, b in itertools.pairwise(cuts)]


@given(_cut_texts(), st.lists(st.text(st.sampled_from("ab\n é"), min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(cut: tuple[str, list[bytes]], stop: list[str]) -> None:
    text, pieces = cut
    sent, stopped = _stream(pieces, stop)
    places = [at for s in stop if (at := text.find(s)) >= 0]
    assert stopped == bool(places)
    # Which stop string is seen first depends on where the tokens end; the text never holds a whole one
    # and is a beginning of the true text that ends where one of them begins.
    got = "".join(sent)
    assert text.startswith(got)
    assert got == text if not places else len(got) in [at for s in stop for at in _all(text, s)]
    assert all(s not in got for s in stop)


def _all(text: str, s: str) -> list[int]:
    return [i for i in range(len(text)) if text.startswith(s, i)]


@pytest.mark.parametrize(
    ("pieces", "stop", "sent"),
    [
        ([b"\xe2", b"\x82", b"\xac!"], [], ["", "", "€!", ""]),
        ([b"a\xe2", b"b"], [], ["a", "\ufffdb", ""]),
        ([b"a", b"\xe2\x82"], [], ["a", "", "\ufffd"]),
        ([b"one E", b"N", b"D two"], ["END"], ["one ", "", ""]),
        ([b"one E", b"N", b"! two"], ["END"], ["one ", "", "EN! two", ""]),
        ([b"x", b"", b"y"], [], ["x", "", "y", ""]),
    ],
)
def test_what_is_held_back(pieces: list[bytes], stop: list[str], sent: list[str]) -> None:
    assert _stream(pieces, stop)[0] == sent


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert stream.push(5) == stream.flush() == ""
