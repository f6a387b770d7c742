# SPDX-License-Identifier: Apache-2.0
"""Models whose logits a test writes, behind the real runner: real sampling, real routers, the fake clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from python_backends.llm.contract import LLMFacts, SessionOpen, SessionStep, StepRequest, StepResponse
from python_backends.llm.engines.base import Capacity, Engine, EngineOutput
from python_backends.llm.runner import LLMRunner
from python_backends.token_router.config import RuntimeConfig
from python_backends.token_router.errors import RequestFailed
from python_backends.token_router.llm_client import LLMClient
from tests.unit.token_router.harness import Deployment, Stream

LINE_ENDS = (1, 2, 3)  # tokens whose text is a line's end
Logits = Callable[[int, Sequence[int]], torch.Tensor]  # (model, sequence so far) -> FP32 [vocabulary]


class ScriptedEngine(Engine):
    """Model number `model`, whose next-token logits are `logits(model, sequence)`."""

    name = "scripted"

    def __init__(self, model: int, logits: Logits, vocabulary: int, eos: tuple[int, ...] = ()) -> None:
        self._model = model
        self._logits = logits
        self._vocabulary = vocabulary
        self._eos = eos
        self._tokens: dict[int, list[int]] = {}

    def capacity(self) -> Capacity:
        return Capacity(64, 4096, 8, self._vocabulary, self._eos, frozenset({"logits", "token_bytes", "sampling"}))

    def open(self, session: SessionOpen) -> None:
        assert session.session not in self._tokens
        self._tokens[session.session] = []

    def step(self, batch: Sequence[SessionStep]) -> EngineOutput:
        for step in batch:
            tokens = self._tokens[step.session]
            assert 0 <= step.start <= len(tokens)
            tokens[step.start :] = step.token_ids
        rows = [step.session for step in batch if step.sample]
        logits = [self._logits(self._model, self._tokens[session]) for session in rows]
        return EngineOutput(rows, torch.stack(logits) if logits else torch.empty(0, self._vocabulary))

    def token_bytes(self, token: int) -> bytes:
        return b"\n" if token in LINE_ENDS else b"x"

    def free(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            self._tokens.pop(session, None)

    def close(self) -> None:
        pass


class RunnerLLM(LLMClient):
    """An LLM in this process: the runner of a scripted engine, with steps that take `step_s`."""

    lost = False

    def __init__(self, name: str, runner: LLMRunner, step_s: float) -> None:
        self.name = name
        self.on_death = lambda reason: None
        self._runner = runner
        self._step_s = step_s
        self._lock = asyncio.Lock()  # first come, first served

    async def hello(self) -> LLMFacts:
        facts = self._runner.execute(StepRequest(hello=True)).facts
        assert facts is not None
        return facts

    def step(self, request: StepRequest) -> asyncio.Future[StepResponse]:
        return asyncio.ensure_future(self._step(request))

    async def _step(self, request: StepRequest) -> StepResponse:
        async with self._lock:
            await asyncio.sleep(self._step_s)
            try:
                return self._runner.execute(request)
            except ValueError as error:
                raise RequestFailed(str(error)) from error

    async def reload(self) -> None:
        raise AssertionError("it was not lost")

    def close(self) -> None:
        pass


def scripted_llms(
    config: RuntimeConfig, logits: Logits, vocabulary: int, steps_s: Sequence[float], eos: tuple[int, ...] = ()
) -> list[RunnerLLM]:
    """The deployment's LLMs. Made inside the event loop that runs them."""
    routers = [config.router.router(model, config.model_names) for model in range(len(config.models))]
    return [
        RunnerLLM(
            name,
            LLMRunner(name, model, ScriptedEngine(model, logits, vocabulary, eos), routers[model], config.router),
            steps_s[model],
        )
        for model, name in enumerate(config.model_names)
    ]


async def answers(
    config: RuntimeConfig,
    logits: Logits,
    vocabulary: int,
    steps_s: Sequence[float],
    requests: Sequence[dict[str, Any]],
) -> list[Stream]:
    """What becomes of these requests, all sent at once."""
    async with Deployment(config, scripted_llms(config, logits, vocabulary, steps_s)) as deployment:
        streams = [deployment.submit(**request)[1] for request in requests]
        await asyncio.gather(*(stream.done.wait() for stream in streams))
    return streams
