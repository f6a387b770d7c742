# SPDX-License-Identifier: Apache-2.0
"""A conversation against a server that plays Triton: what is sent, what is kept, what is shown."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from rich.console import Console

from tests.unit.client.fake_triton import FakeTriton, response
from tools.chat import Conversation
from tools.client import Chunk, TokenRouterClient
from tools.coloring import Painter


def talk(lines: list[str | type[BaseException]], client: TokenRouterClient, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the terminal shows after these lines are typed, and Ctrl-D."""
    typed = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    out = io.StringIO()
    Conversation(client, Console(file=out, width=100, _environ={}), max_tokens=7).run()
    return out.getvalue()


def sent_messages(fake: FakeTriton) -> list[list[tuple[str, str]]]:
    tensors = [{i.name: i.contents for i in request.inputs} for request in fake.requests]
    decoded = [json.loads(t["messages"].bytes_contents[0]) for t in tensors]
    return [[(m["role"], m["content"]) for m in messages] for messages in decoded]


def test_each_question_carries_what_was_said_before(
    triton: tuple[FakeTriton, TokenRouterClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, client = triton
    shown = talk(["one", "", "two", "/clear", "three"], client, monkeypatch)
    first = [("user", "one")]
    assert sent_messages(fake) == [
        first,
        [*first, ("assistant", "Héllo"), ("user", "two")],
        [("user", "three")],
    ]
    assert shown.count("Hé«llo»\n") == 3
    assert [i.contents.int_contents[0] for i in fake.requests[0].inputs if i.name == "max_tokens"] == [7]


def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    triton: tuple[FakeTriton, TokenRouterClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, client = triton
    ended = threading.Event()

    def interrupted(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(ended.set)
        yield response("half", [1], "slm")
        yield response("BOOM", [2], "slm")
        ended.wait(10)

    write = Painter.write

    def interrupt_at_boom(self: Painter, chunk: Chunk) -> None:
        if chunk.text == "BOOM":
            raise KeyboardInterrupt
        write(self, chunk)

    monkeypatch.setattr(Painter, "write", interrupt_at_boom)
    fake.script = interrupted
    shown = talk(["one", KeyboardInterrupt, "/stats"], client, monkeypatch)
    assert "half\nstopped\n" in shown
    assert "answer 1" in shown
    assert ended.wait(10)


def test_a_refused_question_is_no_part_of_the_conversation(
    triton: tuple[FakeTriton, TokenRouterClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, client = triton

    def refuse(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt: too long")
        yield

    fake.script = refuse
    shown = talk(["one", "two"], client, monkeypatch)
    assert "INVALID_ARGUMENT: prompt: too long; /clear begins anew" in shown
    assert sent_messages(fake) == [[("user", "one")], [("user", "two")]]


@pytest.mark.parametrize(("router", "temperatures"), [("rstitch", []), ("me", [1.0]), ("only_there:ROUTER", [])])
def test_a_router_that_must_sample_gets_no_greedy_question(
    triton: tuple[FakeTriton, TokenRouterClient],
    monkeypatch: pytest.MonkeyPatch,
    router: str,
    temperatures: list[float],
) -> None:
    fake, client = triton
    fake.runtime = json.dumps({**json.loads(fake.runtime), "router": {"name": router}})
    talk(["one"], client, monkeypatch)
    inputs = {i.name: i.contents for i in fake.requests[0].inputs}
    assert [v for name, c in inputs.items() if name == "temperature" for v in c.fp32_contents] == temperatures


def test_commands(triton: tuple[FakeTriton, TokenRouterClient], monkeypatch: pytest.MonkeyPatch) -> None:
    fake, client = triton
    shown = talk(["/help", "/nonsense", "/stats"], client, monkeypatch)
    assert "slm  «llm»" in shown
    assert "there is no /nonsense" in shown
    assert "no answer yet" in shown
    assert not fake.requests
