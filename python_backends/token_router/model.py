# SPDX-License-Identifier: Apache-2.0
"""Triton's side of the public model: requests in, the way to the LLMs, and the event loop's thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import selectors
import sys
import threading
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from python_backends.llm.catalog import locate_tokenizer
from python_backends.stub import exit_with_parent, log_to_triton
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.control import serve_control
from python_backends.token_router.errors import InvalidRequest, RequestFailed, TokenRouterError
from python_backends.token_router.llm_clients import llm_client
from python_backends.token_router.metrics import MetricsBook
from python_backends.token_router.metrics_thread import MetricsThread
from python_backends.token_router.public import INPUTS, REFUSED_INPUTS
from python_backends.token_router.response_thread import Outbox, ResponseThread, TritonStream
from python_backends.token_router.runtime import Runtime
from python_backends.token_router.tokenizer import Tokenizer
from routers.registry import cut

__all__ = ["TritonPythonModel"]

_RUN_DIR_VARIABLE = "TOKENROUTER_RUN_DIR"
_MEET_TIMEOUT_S = 30.0
_LAST_ANSWERS_S = 5.0
_METRICS_S = 1.0
_FEW_DESCRIPTORS = 512
_SWITCH_S = 0.0001  # a call leaves while the event loop goes on with others, not after it


class TritonPythonModel:
    """Decoupled: `execute` hands each request to the runtime and returns; answers come from its thread."""

    def initialize(self, args: dict[str, str]) -> None:
        exit_with_parent()
        sys.setswitchinterval(_SWITCH_S)
        log_to_triton(pb_utils.Logger)
        parameters = json.loads(args["model_config"])["parameters"]
        self._config = RuntimeConfig.model_validate_json(parameters["runtime"]["string_value"])
        name = self._config.tokenizer
        self._tokenizer = None if name is None else Tokenizer(locate_tokenizer(name))
        self._responses = ResponseThread()
        self._loop = asyncio.SelectorEventLoop(_selector())
        self._outbox = Outbox(self._responses, self._loop)
        self._main: asyncio.Task[None] | None = None
        self._awake = False
        started: threading.Event = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run_loop, args=(started,), name="event-loop", daemon=True)
        self._thread.start()
        started.wait()
        if self._failure is not None:
            raise self._failure

    def execute(self, requests: list[Any]) -> None:
        if not self._awake:
            self._wake_up()
        for request in requests:
            self._take(request)

    def finalize(self) -> None:
        """Triton calls this once no request is in flight."""
        if self._main is not None:
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()
        self._responses.close()

    def _wake_up(self) -> None:
        """Start the loops at the first request: a BLS call before Triton has finished loading this model
        crashes the whole server, and nothing else tells that it has."""
        self._awake = True
        answered = asyncio.run_coroutine_threadsafe(self._meet_models(), self._loop)
        # on a timeout the request is refused: a model is still starting
        with contextlib.suppress(concurrent.futures.TimeoutError):
            answered.result(_MEET_TIMEOUT_S)

    async def _meet_models(self) -> None:
        self._first_request.set()
        await self._runtime.up.wait()

    def _take(self, request: Any) -> None:
        stream = TritonStream(self._responses, request.get_response_sender(), request.requested_output_names())
        try:
            served = self._runtime.require_served()
            submission = self._runtime.intake.check(_inputs(request, served.context_tokens), served)
        except TokenRouterError as error:
            stream.fail(error)
            return
        except Exception as error:  # whatever a request can do to us, its client gets an answer
            logging.getLogger("token_router").exception("a request could not be checked")
            stream.fail(RequestFailed(f"the request could not be checked: {cut(repr(error))}"))
            return
        stream.prompt_tokens = len(submission.prompt_ids)
        self._loop.call_soon_threadsafe(self._submit, submission, stream)

    def _submit(self, submission: Any, stream: TritonStream) -> None:
        stream.wake = self._outbox.put
        request = self._runtime.submit(submission, stream)
        if request is not None:
            stream.on_cancel = lambda: self._loop.call_soon_threadsafe(self._runtime.cancel, request)
            self._responses.wake(stream)  # watched for cancellation from now on

    def _run_loop(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(started))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
            logging.getLogger("token_router").exception("the runtime has failed")
            if started.is_set():
                self._responses.close(_LAST_ANSWERS_S)
                os._exit(1)  # a router that serves nothing must not look alive: the supervisor reloads it
        finally:
            started.set()
            self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        llms = [llm_client(index, self._config) for index in range(len(self._config.models))]
        self._runtime = Runtime(self._config, llms, self._tokenizer)
        run_dir = os.environ.get(_RUN_DIR_VARIABLE)
        control = await serve_control(self._runtime, Path(run_dir)) if run_dir else None
        self._main = asyncio.current_task()
        self._first_request = asyncio.Event()
        started.set()
        try:
            await self._first_request.wait()
            metrics = asyncio.create_task(self._tell_metrics())
            try:
                await self._runtime.run()
            finally:
                metrics.cancel()
        finally:
            self._outbox.flush()
            if control is not None:
                control.close()

    async def _tell_metrics(self) -> None:
        """From the first request on: before, Triton may still be loading this model."""
        thread, book = MetricsThread(), MetricsBook()
        try:
            while True:
                thread.tell(book.updates(self._runtime.readings()))
                await asyncio.sleep(_METRICS_S)
        finally:
            thread.close()


def _selector() -> selectors.BaseSelector:
    """What the event loop waits with: epoll rounds every timer up to a whole millisecond, select doesn't, but has no
    descriptor from 1024 on. There are ten or so, and where more were inherited, new ones have high numbers."""
    with open(os.devnull, "rb") as probe:
        few = probe.fileno() < _FEW_DESCRIPTORS
    return selectors.SelectSelector() if few else selectors.DefaultSelector()


def _inputs(request: Any, context_tokens: int) -> dict[str, Any]:
    """The request's inputs as plain values. Raises InvalidRequest.

    context_tokens: more numbers than these can't be served, and aren't even looked at.
    """
    values: dict[str, Any] = {}
    for tensor in request.inputs():
        name = tensor.name()
        array = tensor.as_numpy().reshape(-1)
        declared = INPUTS.get(name) or REFUSED_INPUTS[name]
        if array.size > context_tokens:
            raise InvalidRequest(f"{name}: has {array.size} elements; the context holds {context_tokens} tokens")
        items = array.tolist()
        if declared.data_type == "TYPE_STRING":
            try:
                items = [item.decode("utf-8") for item in items]
            except UnicodeDecodeError as error:
                raise InvalidRequest(f"{name}: must be valid UTF-8; {error.reason} at byte {error.start}") from error
        if declared.dims == (1,):
            if len(items) != 1:
                raise InvalidRequest(f"{name}: has {len(items)} elements; allowed: 1")
            values[name] = items[0]
        else:
            values[name] = items
    return values
