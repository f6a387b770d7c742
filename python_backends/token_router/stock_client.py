# SPDX-License-Identifier: Apache-2.0
"""An LLM that is a stock `tensorrtllm` model: its sessions, sampling and routing are in token_router's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from python_backends.llm.contract import LLMFacts
from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from python_backends.llm.runner import LLMRunner
from python_backends.llm.wire import Wire, decode_request, encode_response
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import Unavailable
from python_backends.token_router.lifeline import Lifeline
from python_backends.token_router.llm_client import ThreadedLLMClient
from python_backends.token_router.stock_engine import Infer, StockEngine

__all__ = ["StockLLMClient", "StockLifeline"]

_GRACE_S = 5.0  # from being told to stop until a request must have come back


class StockLifeline(Lifeline):
    """The model lives in tritonserver itself, so there is no process to watch, nor one to end. What can hang is a
    request: it is told to stop, and fails. Only when it doesn't come back even so is the model given up."""

    def __init__(self, engine: StockEngine, grace_s: float = _GRACE_S) -> None:
        super().__init__()
        self._engine = engine
        self._grace_s = grace_s
        self._attached = False

    @property
    def lost(self) -> bool:
        return not self._attached

    def attach(self, facts: LLMFacts) -> None:
        self._attached = True

    def detach(self) -> None:
        self._attached = False

    def kill(self, reason: str) -> None:
        stuck = self._engine.running
        threading.Thread(target=self._engine.stop, name="stop", daemon=True).start()
        asyncio.get_running_loop().call_later(self._grace_s, self._look, stuck, reason)

    def _look(self, stuck: frozenset[str], reason: str) -> None:
        still = len(stuck & self._engine.running)  # no id is used twice, in another life either
        if self._attached and still:
            self.detach()
            self.on_death(f"{reason}, and {still} of its requests can't be stopped")


class StockLLMClient(ThreadedLLMClient):
    """LLM number `index`, which has an `engine`.

    infer: see `StockEngine`. reload: unloads and loads the model; raises RuntimeError.
    Raises ValueError when the router needs what such a model can't return, or nothing says what must be known.
    """

    def __init__(
        self,
        index: int,
        config: RuntimeConfig,
        engine: TensorRTLLMBackendConfig,
        infer: Infer,
        reload: Callable[[], None],
    ) -> None:
        name = config.models[index].name
        try:
            self._engine = StockEngine(engine, infer)
            router = config.router.router(index, config.model_names)
            self._runner = LLMRunner(name, index, self._engine, router, config.router)
        except ValueError as error:
            raise ValueError(f"model '{name}': {error}") from error
        torch.set_num_threads(1)  # with more, a routing signal's last bit would depend on who else is in the batch
        self._one_at_a_time = threading.Lock()
        super().__init__(name, self._execute, reload, config.limits.step_timeout_s, StockLifeline(self._engine))

    def kv_blocks(self) -> dict[str, int]:
        return {"kv_reused_blocks": self._engine.reused_blocks, "kv_new_blocks": self._engine.new_blocks}

    async def hello(self) -> LLMFacts:
        """Its requests are timed, since nothing else would end one that hangs. Only when they have come back is it
        said again: a hello that comes late would free the sessions of the next one."""
        if self._busy:
            raise Unavailable(f"model '{self.name}' doesn't answer: a request from before hangs")
        try:
            facts = await asyncio.wait_for(super().hello(), self._step_timeout_s)
        except asyncio.TimeoutError as error:
            self._lifeline.kill("its hello takes too long")
            raise Unavailable(f"model '{self.name}' doesn't answer: a request takes too long") from error
        return replace(facts, pid=None)

    async def reload(self) -> None:
        if hanging := len(self._engine.running):  # nothing ends them: who waits for them may wait for ever
            raise Unavailable(f"model '{self.name}' can't be reloaded: {hanging} of its requests hang")
        await super().reload()

    def close(self) -> None:
        super().close()
        self._engine.close()

    def _execute(self, wire: Wire) -> Wire:
        """One call; of two at once, the one that came first is first (`LLMRunner` notices when it isn't)."""
        request = decode_request(wire)
        with self._one_at_a_time:
            if request.hello:
                try:
                    self._engine.probe()
                except EngineError as error:
                    raise RuntimeError(str(error)) from error
            return encode_response(self._runner.execute(request))
