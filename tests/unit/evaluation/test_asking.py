# SPDX-License-Identifier: Apache-2.0
"""What a sitting writes down of the server's counts and beliefs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.client import Chunk, TokenRouterClient
from tools.control import ControlError
from tools.evaluation.answers import AnswerFile
from tools.evaluation.asking import Asking, ask_all
from tools.evaluation.tasks import Judgement, Question


class Control:
    """A server's: `beliefs` are what it believes at each asking, and an exception among them is raised. Ten steps more
    come between two askings than between the two before."""

    def __init__(self, *beliefs: Any) -> None:
        self._beliefs = iter(beliefs)
        self._steps = self._growth = 0

    def traffic(self) -> dict[str, Any]:
        belief = next(self._beliefs)
        if isinstance(belief, BaseException):
            raise belief
        self._growth += 10
        self._steps += self._growth
        counts = {"outcomes": [[self._steps, 1], [1, 0]], "tokens": [[self._steps, 0], [1, 0]]}
        return {"counts": counts, "profile": belief and {"p": belief}}


class Generation(Iterator[Chunk]):
    sent_at = 0.0

    def __init__(self) -> None:
        last = Chunk("x", (1,), ("slm",), (), "stop", {"handoffs": 0}, time.monotonic())
        self._chunks = iter([last])

    def __next__(self) -> Chunk:
        return next(self._chunks)


def asked(control: Any, path: Path, monkeypatch: pytest.MonkeyPatch, questions: int = 3) -> AnswerFile:
    monkeypatch.setattr(TokenRouterClient, "generate", lambda *_, **__: Generation())
    tokenizer: Any = SimpleNamespace(encode_chat=lambda *_: [1])
    asked = [Question(f"q/{n}", [], lambda _: Judgement("passed")) for n in range(questions)]
    file = AnswerFile(path, {})
    ask_all("127.0.0.1:1", control, tokenizer, asked, Asking(max_tokens=1), file, lambda _: None)
    return file


def test_a_belief_is_the_mean_over_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, after each answer, at the end. That it knew nothing yet, or couldn't be asked, isn't a belief of zero."""
    control = Control(None, None, [[0.9, 0.1], [1, 0]], [[0.7, 0.3], [0.8, 0.2]], None)
    traffic = asked(control, tmp_path / "a.jsonl", monkeypatch).traffic[0]
    first, second = 30 / 70, 40 / 70
    assert traffic.given == [
        pytest.approx([first * 0.9 + second * 0.7, first * 0.1 + second * 0.3]),
        pytest.approx([first + second * 0.8, second * 0.2]),
    ]
    assert traffic.outcomes == [[140, 0], [0, 0]]
    unheard = Control(None, ControlError("busy"), [[0.9, 0.1], [1, 0]], ControlError("busy"), None)
    traffic = asked(unheard, tmp_path / "b.jsonl", monkeypatch).traffic[0]
    assert traffic.given == [pytest.approx([0.9, 0.1]), [1, 0]]


def test_too_little_traffic_gives_no_belief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = asked(Control(None, None, None), tmp_path / "a.jsonl", monkeypatch, questions=1)
    assert file.traffic[0].given is None


def test_an_interrupted_sitting_has_what_was_counted_by_its_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C, between the second answer and its count; it would be the same after a kill."""
    path, believed = tmp_path / "a.jsonl", [[0.9, 0.1], [1, 0]]
    with pytest.raises(KeyboardInterrupt):
        asked(Control(None, believed, KeyboardInterrupt()), path, monkeypatch, questions=2)
    killed = AnswerFile(path, {})
    assert set(killed.answers) == {"q/0", "q/1"}
    assert killed.traffic[0].outcomes == [[20, 0], [0, 0]]
    assert killed.traffic[0].given == believed
    file = asked(Control(None, None, None), path, monkeypatch)
    assert {sitting: traffic.outcomes[0][0] for sitting, traffic in file.traffic.items()} == {0: 20, 1: 50}
    assert [a.sitting for a in file.of(["q/0", "q/1", "q/2"])] == [0, 0, 1]


def test_a_server_elsewhere_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = asked(None, tmp_path / "a.jsonl", monkeypatch)
    assert len(file.answers) == 3
    assert file.traffic == {}
