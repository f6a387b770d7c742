# SPDX-License-Identifier: Apache-2.0
"""Loading an LLM's model anew: by HTTP, with a small server in Triton's place, and by the stub."""

from __future__ import annotations

import importlib
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType
from typing import Any

import pytest

UNLOAD, LOAD = (f"/v2/repository/models/llm/{action}" for action in ("unload", "load"))


class Stub:
    """What the stub was asked. broken: loading fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.broken = False

    class Error(Exception):
        pass

    def unload_model(self, name: str) -> None:
        self.calls.append(("unload", name))

    def load_model(self, name: str) -> None:
        self.calls.append(("load", name))
        if self.broken:
            raise self.Error("failed to load 'llm': no weights")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    triton = ModuleType("triton_python_backend_utils")
    vars(triton).update(unload_model=stub.unload_model, load_model=stub.load_model, TritonModelException=Stub.Error)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    return stub


@pytest.fixture
def loading(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, over that stub."""
    name = "python_backends.token_router.model_loading"
    monkeypatch.setitem(sys.modules, name, ModuleType("unused"))  # so that it is taken out again
    del sys.modules[name]
    return importlib.import_module(name)


class Triton:
    """Answers every POST with 200, but that of a path in `answers` with these bytes.

    posts: path and Connection header of each.
    """

    def __init__(self) -> None:
        self.posts: list[tuple[str, str | None]] = []
        self.answers: dict[str, bytes] = {}
        triton = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                triton.posts.append((self.path, self.headers["Connection"]))
                self.wfile.write(triton.answers.get(self.path, b"HTTP/1.1 200 OK\r\n\r\n"))

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def triton(loading: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    triton = Triton()
    monkeypatch.setenv(loading.TRITON_HTTP_VARIABLE, triton.address)
    thread = threading.Thread(target=triton.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield triton
    triton.server.shutdown()
    thread.join()
    triton.server.server_close()


def test_it_unloads_then_loads_by_http(loading: Any, triton: Triton, stub: Stub) -> None:
    loading.reloader("llm")()
    assert triton.posts == [(UNLOAD, "close"), (LOAD, "close")]
    assert stub.calls == []


@pytest.mark.parametrize(("refused", "posted"), [(UNLOAD, [UNLOAD]), (LOAD, [UNLOAD, LOAD])])
def test_a_refusal_is_told_in_tritons_words(loading: Any, triton: Triton, refused: str, posted: list[str]) -> None:
    triton.answers[refused] = b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"failed to load 'llm',\n  no weights\n"
    with pytest.raises(RuntimeError, match=r"^failed to load 'llm', no weights$"):
        loading.reloader("llm")()
    assert [path for path, _ in triton.posts] == posted


def test_an_answer_that_is_not_http_is_no_answer(loading: Any, triton: Triton) -> None:
    triton.answers[LOAD] = b"rubbish\r\n"
    with pytest.raises(RuntimeError, match=f"Triton did not answer at http://{triton.address}{LOAD}: rubbish"):
        loading.reloader("llm")()


def test_nobody_at_the_address_is_named(loading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))  # and doesn't listen
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        monkeypatch.setenv(loading.TRITON_HTTP_VARIABLE, address)
        with pytest.raises(RuntimeError, match=f"Triton did not answer at http://{address}{UNLOAD}: .*refused"):
            loading.reloader("llm")()


def test_without_the_address_the_stub_does_it(loading: Any, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loading.TRITON_HTTP_VARIABLE, raising=False)
    reload = loading.reloader("llm")
    reload()
    assert stub.calls == [("unload", "llm"), ("load", "llm")]
    stub.broken = True
    with pytest.raises(RuntimeError, match="failed to load 'llm': no weights"):
        reload()
