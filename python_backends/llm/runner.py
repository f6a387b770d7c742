# SPDX-License-Identifier: Apache-2.0
"""One LLM behind the step contract: its sessions, and a call = forward, sample, route, perhaps again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from python_backends.llm.contract import (
    LLMFacts,
    SessionOpen,
    SessionResult,
    SessionStep,
    StepRequest,
    StepResponse,
    StepStats,
)
from python_backends.llm.engines.base import Capacity, Engine, EngineError, EngineOutput
from python_backends.llm.routing import route_rows
from python_backends.llm.sampling import Sampled, SamplingRow, routing_stream, sample, uniform
from routers import BaseRouter, LogitsOutput, RouterConfig, RouterParams, ServedModel, StepResult

__all__ = ["LLMRunner", "bind", "check_compatible"]

_WRAPPED = 1 << 30  # a number that is lower by more than this has begun again


def check_compatible(router: BaseRouter[Any], capacity: Capacity, engine: str = "in use") -> None:
    """Raises ValueError when the router needs what an engine of this capacity can't return.

    engine: its name, for the message.
    """
    missing = [what for what in router.needs() if what not in capacity.provides]
    if missing:
        raise ValueError(
            f"router {type(router).__name__} needs {' and '.join(missing)}, which the engine {engine} can't return;"
            f" use the engine llama_cpp, or a router that goes without, such as {_undemanding(capacity)}"
        )


def _undemanding(capacity: Capacity) -> str:
    """Routers that get along with it."""
    return "rstitch, me or random" if "logits" in capacity.provides else "random, single or markov"


def bind(router: BaseRouter[Any], name: str, engine: Engine) -> None:
    """Tell the router which model it sits beside. Raises ValueError when it can't serve there."""
    capacity = engine.capacity()
    embed = engine.embed if "embeddings" in capacity.provides else None
    texts = engine.token_bytes if "token_bytes" in capacity.provides else None
    model = ServedModel(name, engine.weights, capacity.vocab_size, capacity.hidden_size, embed, texts)
    router.check(model)
    router.bind(model)


@dataclass(slots=True)
class _Session:
    """tokens: what the engine's KV holds, by position. router_params: the deployment's and the request's."""

    opened: SessionOpen
    router_params: RouterParams
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Progress:
    """What one session has got in the call under way."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    destination: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def result(self) -> SessionResult:
        if self.error is not None:
            return SessionResult(error=self.error)
        return SessionResult(self.token_ids, self.logprobs, self.destination, self.fields)


@dataclass(slots=True)
class _CallClock:
    """What the engine did in one call."""

    steps: int = 0
    engine_s: float = 0.0


class LLMRunner:
    """Executes `StepRequest`s on one engine. One call at a time; not always from the same thread.

    name, index: the model's, index in the deployment's order. router: the one beside this model.
    router_config: where the parameters that a request overrides are checked.
    Raises ValueError when the router needs what the engine can't return, or was made for other models.
    """

    def __init__(
        self, name: str, index: int, engine: Engine, router: BaseRouter[Any], router_config: RouterConfig
    ) -> None:
        self._capacity = engine.capacity()
        check_compatible(router, self._capacity, engine.name)
        bind(router, name, engine)
        self._engine = engine
        self._router = router
        self._router_config = router_config
        self._model_count = len(router.models)
        self._routing_stream = routing_stream(index)
        self._eos = frozenset(self._capacity.eos_token_ids)
        self._sessions: dict[int, _Session] = {}
        self._kv_tokens = 0  # of all of them
        self._stayed: dict[int, int] = {}  # of the last call: the sessions that go on, and the token of each
        self._last_number = 0
        self._freed_early: set[int] = set()  # by a call that overtook the one before it, which may open them
        self._facts = LLMFacts(
            name=name,
            engine=engine.name,
            pid=os.getpid(),
            max_sessions=self._capacity.max_sessions,
            context_tokens=self._capacity.context_tokens,
            prefill_chunk=self._capacity.prefill_chunk,
            vocab_size=self._capacity.vocab_size,
            eos_token_ids=self._capacity.eos_token_ids,
            samples="sampling" in self._capacity.provides,
            kv_tokens=self._capacity.all_kv_tokens,
            kv_block=self._capacity.kv_block,
        )

    def execute(self, request: StepRequest) -> StepResponse:
        """One call. What concerns one session becomes its result's error; the others go on.

        Raises ValueError when the request contradicts itself.
        """
        began_s = time.perf_counter()
        progress = {session: _Progress() for session in (*(s.session for s in request.steps), *request.follows)}
        if len(progress) != len(request.steps) + len(request.follows):
            raise ValueError("sessions: a session is there twice; each may be in a step at most once")
        overtaken = not request.hello and 0 < self._last_number - request.number < _WRAPPED
        in_order = request.number == self._last_number + 1
        stayed = self._stayed if in_order else {}
        self._free(list(self._sessions) if request.hello else request.free)
        for opened in request.opens:
            if overtaken and opened.session in self._freed_early:
                continue  # its request has ended; its step fails as that of an unknown session
            self._open(opened, progress)
        self._freed_early = set() if in_order or overtaken else set(request.free)
        call = _CallClock()
        batch = [step for step in request.steps if self._known(step, progress)]
        max_steps = request.max_steps if len(batch) == len(request.steps) else 1
        batch += [self._next_step(s, stayed[s]) for s in request.follows if s in stayed and s in self._sessions]
        if len(batch) < request.at_least:
            batch = []  # everybody is sent anew
        may_leave = request.max_leaves
        if batch and max_steps > 1 and self._engine.runs and all(step.sample for step in batch):
            self._run(batch, max_steps, may_leave, progress, call)
            batch = []
        while batch:
            self._append(batch)
            output = self._forward(batch, progress, call)
            goes_on = self._finish_step(batch, output, progress)
            stay = [s.session for s in batch if progress[s.session].destination == 0]
            may_leave -= len(batch) - len(stay)
            if not goes_on or may_leave < 0 or call.steps >= max_steps:
                break
            batch = [self._next_step(s, progress[s].token_ids[-1]) for s in stay]
        if not overtaken:
            self._last_number = request.number
            self._stayed = {s: p.token_ids[-1] for s, p in progress.items() if self._stays(s, p)}
        stats = StepStats(
            compute_ms=(time.perf_counter() - began_s) * 1000,
            engine_ms=call.engine_s * 1000,
            steps=call.steps,
            sessions=len(self._sessions),
            kv_tokens=self._kv_tokens,
        )
        return StepResponse([p.result() for p in progress.values()], stats, self._facts if request.hello else None)

    def _free(self, sessions: Sequence[int]) -> None:
        if sessions:
            self._engine.free(sessions)
            for session in sessions:
                if (held := self._sessions.pop(session, None)) is not None:
                    self._kv_tokens -= len(held.tokens)

    def _open(self, opened: SessionOpen, progress: dict[int, _Progress]) -> None:
        """Make a session, or note in its progress why not."""
        try:
            if not self._facts.samples and not opened.sampling.is_greedy:
                raise ValueError(f"sampling: the engine {self._facts.engine} takes greedy requests only")
            overrides = opened.router_params
            params = self._router_config.override(overrides, self._router.models) if overrides else self._router.params
            self._engine.open(opened)
        except (ValueError, EngineError) as error:
            if opened.session in progress:
                progress[opened.session].error = str(error)
            return
        self._sessions[opened.session] = _Session(opened, params)

    def _next_step(self, session: int, token: int) -> SessionStep:
        """After a step that gave this token."""
        return SessionStep(session, len(self._sessions[session].tokens), [token])

    def _stays(self, session: int, progress: _Progress) -> bool:
        """Whether a session has a next step here."""
        if progress.error is not None or progress.destination != 0 or not progress.token_ids:
            return False
        return not self._ends(session, progress.token_ids[-1])

    def _known(self, step: SessionStep, progress: dict[int, _Progress]) -> bool:
        mine = progress[step.session]
        if mine.error is None and step.session not in self._sessions:
            mine.error = f"session {step.session} is not open on this model"
        return mine.error is None

    def _append(self, batch: Sequence[SessionStep]) -> None:
        """The step's tokens into the sessions' sequences; what stood there from `start` on is dropped."""
        for step in batch:
            tokens = self._sessions[step.session].tokens
            self._kv_tokens -= len(tokens)
            tokens[step.start :] = step.token_ids
            self._kv_tokens += len(tokens)

    def _forward(self, batch: Sequence[SessionStep], progress: dict[int, _Progress], call: _CallClock) -> EngineOutput:
        began_s = time.perf_counter()
        try:
            output = self._engine.step(batch)
        except EngineError as error:
            output = EngineOutput([], errors={s.session: str(error) for s in batch})
        call.engine_s += time.perf_counter() - began_s
        call.steps += 1
        for session, message in output.errors.items():
            progress[session].error = message
        return output

    def _run(
        self,
        batch: Sequence[SessionStep],
        max_steps: int,
        may_leave: int,
        progress: dict[int, _Progress],
        call: _CallClock,
    ) -> None:
        """The steps of a call, made by the engine itself: `execute`'s loop, for one session at a time."""
        began_s = time.perf_counter()
        self._append(batch)
        by_session = {step.session: step for step in batch}
        begins = {step.session: step.start + len(step.token_ids) for step in batch}
        left: set[int] = set()
        ended: set[int] = set()

        def decide(session: int, made: int, logits: torch.Tensor) -> int | None:
            asked_s = time.perf_counter()
            mine = progress[session]
            del mine.token_ids[made:], mine.logprobs[made:]  # decided on a part of the prompt
            if made:
                self._append([SessionStep(session, begins[session] + made - 1, mine.token_ids[-1:])])
            ended.add(session)  # unless it gets through
            if self._finish_step([by_session[session]], EngineOutput([session], logits), progress):
                ended.remove(session)
            (left.add if mine.destination else left.discard)(session)
            call.engine_s -= time.perf_counter() - asked_s
            stops = mine.destination or ended or len(left) > may_leave
            return None if stops else mine.token_ids[-1]

        limits = [self._sessions[s].opened.limit - begin for s, begin in begins.items()]
        try:
            errors = self._engine.run(batch, [max(1, min(max_steps, limit)) for limit in limits], decide)
        except EngineError as error:
            errors = dict.fromkeys(begins, str(error))
        call.engine_s += time.perf_counter() - began_s
        call.steps = max(1, *(len(progress[s].token_ids) for s in begins))
        for session, message in errors.items():
            progress[session].error = message

    def _finish_step(self, batch: Sequence[SessionStep], output: EngineOutput, progress: dict[int, _Progress]) -> bool:
        """Sample and route what the engine gave. Returns whether run-ahead may go on: nobody has ended or
        failed, everybody has a new token."""
        sampled = self._sample(output)
        for r, message in sampled.errors.items():
            progress[output.sessions[r]].error = message
        good = [r for r in range(len(output.sessions)) if r not in sampled.errors]
        if not good:
            return False
        step = self._step_result(output, sampled, good)
        destinations, errors = route_rows(self._router, step, self._model_count)
        goes_on = len(good) == len(batch)
        for i, (session, token) in enumerate(zip(step.rids, step.token_ids, strict=True)):
            mine = progress[session]
            mine.token_ids.append(token)
            mine.logprobs.append(sampled.logprobs[good[i]])
            mine.destination, mine.fields, mine.error = destinations[i], step.fields[i], errors.get(i)
            goes_on &= mine.error is None and not self._ends(session, token)
        return goes_on

    def _ends(self, session: int, token: int) -> bool:
        """Whether this token, about to be committed, ends the session's request."""
        held = self._sessions[session]
        full = len(held.tokens) + 1 >= held.opened.limit
        return full or (held.opened.stop_at_eos and token in self._eos)

    def _sample(self, output: EngineOutput) -> Sampled:
        if output.logits is None:
            return Sampled(list(output.next_token_ids or ()), [0.0] * len(output.sessions), {})
        held = [self._sessions[s] for s in output.sessions]
        return sample(output.logits, [SamplingRow(h.opened.sampling, h.tokens, h.opened.prompt_tokens) for h in held])

    def _step_result(self, output: EngineOutput, sampled: Sampled, rows: Sequence[int]) -> StepResult:
        """What `route` gets: these rows of the output."""
        sessions = [output.sessions[r] for r in rows]
        held = [self._sessions[s] for s in sessions]
        places = [len(h.tokens) for h in held]
        logits, hidden, token_ids = output.logits, output.hidden_states, sampled.token_ids
        if len(rows) < len(output.sessions):
            token_ids = [token_ids[r] for r in rows]
            logits = None if logits is None else logits[rows]
            hidden = None if hidden is None else hidden[rows]
        return StepResult(
            logits_output=LogitsOutput(logits, hidden),
            token_ids=token_ids,
            places=places,
            sequences=[h.tokens for h in held],
            prompt_tokens=[h.opened.prompt_tokens for h in held],
            rids=sessions,
            params=[h.router_params for h in held],
            draw=lambda row: uniform(held[row].opened.sampling.seed, places[row], self._routing_stream),
            fields=[{} for _ in rows],
        )
