# SPDX-License-Identifier: Apache-2.0
"""The router `random`, and a stopwatch: in the processes of Triton that load it, importing this module wraps a few
functions of the runtime, which then note when they are called and when they are done.

Each process writes what it has noted when Triton finalizes its model: a file NAME.json in the folder that the
environment variable names, a list of [seconds of the monotonic clock, what, model, number of the call, more].
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from routers.base import Algorithm, OneTokenRouter
from routers.random_draw import RandomParams, RandomSLM

__all__ = ["FOLDER_VARIABLE", "TRACED", "install_llm", "install_router"]

FOLDER_VARIABLE = "TOKENROUTER_HOPS"

TRACED = Algorithm(name="random", params=RandomParams, entry=RandomSLM, peer=OneTokenRouter)


class Stopwatch:
    """Notes moments. The call that a thread is at is what its notes belong to."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, str, str, int, Any]] = []
        self._at = threading.local()

    def begin(self, model: str, number: int) -> None:
        """This thread is at that call from now on."""
        self._at.call = model, number

    def note(self, what: str, more: Any = None) -> None:
        """Of the call that this thread is at."""
        self.notes.append((time.monotonic(), what, *self._at.call, more))

    def write(self, name: str) -> None:
        Path(os.environ[FOLDER_VARIABLE], f"{name}.json").write_text(json.dumps(self.notes))


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace owner.name by around(the old one, arguments...). Raises AttributeError when there is none."""
    old = getattr(owner, name)
    setattr(owner, name, functools.wraps(old)(functools.partial(around, old)))


def _wrap_method(owner: type, name: str, around: Callable[..., Any]) -> None:
    old = getattr(owner, name)

    @functools.wraps(old)
    def method(self: Any, *args: Any) -> Any:
        return around(old, self, *args)

    setattr(owner, name, method)


def install_router(model_class: type) -> Stopwatch:
    """In token_router's process. model_class: what Triton's stub drives."""
    from python_backends.token_router import llm_client, local_llm

    watch = Stopwatch()

    under_way: dict[Any, tuple[str, int]] = {}

    def step(old: Any, self: Any, request: Any) -> Any:
        watch.begin(self.name, request.number)
        watch.note("launched", {"steps": [s.session for s in request.steps], "opens": len(request.opens)})
        answer = old(self, request)
        under_way[answer] = self.name, request.number

        def answered(future: Any) -> None:
            del under_way[future]
            if future.cancelled() or future.exception() is not None:
                return
            sessions = [*(s.session for s in request.steps), *request.follows]
            results = zip(sessions, future.result().results, strict=True)
            watch.begin(self.name, request.number)
            watch.note("answered", [session for session, result in results if result.destination])

        answer.add_done_callback(answered)
        return answer

    def exchange(old: Any, self: Any, request: Any) -> Any:
        watch.begin(self.name, request.number)
        return old(self, request)

    def heard(old: Any, self: Any, future: Any, message: Any, kind: Any) -> None:
        if future in under_way:
            watch.begin(*under_way[future])
        old(self, future, message, kind)

    def encode(old: Any, request: Any) -> Any:
        wire = old(request)
        if not request.hello:
            watch.note("sent")
        return wire

    def decode(old: Any, wire: Any) -> Any:
        watch.note("received")
        return old(wire)

    _wrap_method(llm_client.ThreadedLLMClient, "step", step)
    _wrap_method(llm_client.ThreadedLLMClient, "_exchange", exchange)
    _wrap_method(local_llm._StepStream, "_answered", heard)
    for module in (llm_client, local_llm):
        _wrap(module, "encode_request", encode)
        _wrap(module, "decode_response", decode)
    _write_at_the_end(model_class, lambda _: watch.write("token_router"))
    return watch


def install_llm(model_class: type) -> Stopwatch:
    """In an LLM's process. model_class: what Triton's stub drives."""
    from python_backends.llm.engines.paced import PacedEngine
    from python_backends.llm.runner import LLMRunner

    watch = Stopwatch()
    entered = [0.0]  # only one call at a time

    def answer(old: Any, self: Any, wire: Any) -> Any:
        entered[0] = time.monotonic()
        answer = old(self, wire)
        watch.note("left")
        return answer

    def run(old: Any, self: Any, request: Any) -> Any:
        watch.begin(self._facts.name, request.number)
        watch.notes.append((entered[0], "entered", self._facts.name, request.number, None))
        response = old(self, request)
        watch.note("routed")
        return response

    def step(old: Any, self: Any, batch: Any) -> Any:
        watch.note("begins")
        output = old(self, batch)
        watch.note("ends")
        return output

    _wrap_method(model_class, "_answer", answer)
    _wrap_method(LLMRunner, "execute", run)
    _wrap_method(PacedEngine, "step", step)
    _write_at_the_end(model_class, lambda self: watch.write(self._runner._facts.name))
    return watch


def _write_at_the_end(model_class: type, write: Callable[[Any], None]) -> None:
    def finalize(old: Any, self: Any) -> None:
        write(self)
        old(self)

    _wrap_method(model_class, "finalize", finalize)


def _install() -> None:
    """In a process of Triton whose folder is named."""
    models = [vars(m).get("TritonPythonModel") for m in list(sys.modules.values())]
    model_class = next((model for model in models if model is not None), None)
    if FOLDER_VARIABLE not in os.environ or model_class is None:
        return
    at_router = "python_backends.token_router.runtime" in sys.modules
    (install_router if at_router else install_llm)(model_class)


_install()
