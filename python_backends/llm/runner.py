# SPDX-License-Identifier: Apache-2.0
"""One LLM behind the step contract: its sessions, and a call = forward, sample, route, perhaps again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from python_backends.llm.call_order import CallOrder
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
from python_backends.llm.sampling import Sampled, SamplingRow, is_greedy, routing_stream, sample, uniform
from routers import BaseRouter, LogitsOutput, RouterConfig, RouterParams, ServedModel, StepResult

__all__ = ["LLMRunner", "bind", "check_compatible"]


def check_compatible(router: BaseRouter[Any], capacity: Capacity, engine: str = "in use") -> None:
    """Raises ValueError when the router needs what an engine of this capacity can't return.

    engine: its name, for the message.
    """
    needs = {
        "logits": router.needs_logits,
        "hidden_states": router.needs_hidden_states,
        "embeddings": router.needs_embeddings,
        "sampling": router.needs_sampling,
    }
    missing = [what for what, needed in needs.items() if needed and what not in capacity.provides]
    if missing:
        raise ValueError(
            f"router {type(router).__name__} needs {' and '.join(missing)}, which the engine {engine} can't return;"
            " use the engine llama_cpp, or a router that goes without, such as random, single or markov"
        )


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
class _Made:
    """What has been made of the calls under way. progress: of each session that is stepped."""

    progress: dict[int, _Progress] = field(default_factory=dict)
    steps: int = 0
    engine_s: float = 0.0
    session_steps: int = 0
    more_tokens: int = 0


class LLMRunner:
    """Executes `StepRequest`s on one engine. One thread, one step at a time.

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
        self._stayed: dict[int, int] = {}  # the sessions that go on here, and the token that each goes on from
        self._order = CallOrder()
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
        )

    def execute(self, calls: Sequence[StepRequest]) -> list[StepResponse]:
        """Make these calls as one step (`joins`), or one alone, which may be several steps (run-ahead).

        What concerns one session becomes its result's error; the others go on.
        """
        began_s = time.perf_counter()
        made = _Made({step.session: _Progress() for call in calls for step in call.steps})
        brought = set(made.progress)
        batch: list[SessionStep] = []
        for call in calls:
            in_order = self._begin(call, made)
            batch += [step for step in call.steps if self._known(step, made)]
            if in_order:
                batch += self._following(call, made)
        if len(batch) < min((call.at_least for call in calls if call.steps or call.follows), default=1):
            for step in batch:
                self._stayed.pop(step.session, None)  # whoever was to go on is sent anew
        else:
            all_there = len(batch) == len(made.progress)
            self._make_steps(batch, calls[0].max_steps if all_there else 1, calls[0].max_leaves, made)
        stats = StepStats(
            compute_ms=(time.perf_counter() - began_s) * 1000,
            engine_ms=made.engine_s * 1000,
            steps=made.steps,
            sessions=len(self._sessions),
            kv_tokens=sum(len(s.tokens) for s in self._sessions.values()),
            session_steps=made.session_steps,
            more_tokens=made.more_tokens,
            calls=len(calls),
        )
        return [self._response(call, made, brought, stats) for call in calls]

    def _begin(self, call: StepRequest, made: _Made) -> bool:
        """Free and open what the call says. Returns whether its `follows` hold: every call before it has come."""
        if call.hello:
            self._free(list(self._sessions))
            self._order = CallOrder()
        in_order = not call.hello and self._order.came(call.number)
        self._free(call.free)
        self._order.freed(call.free)
        for opened in call.opens:
            if not self._order.over(opened.session):
                self._open(opened, made)  # or its step fails as that of an unknown session
        return in_order

    def _following(self, call: StepRequest, made: _Made) -> list[SessionStep]:
        """The next steps of those of the call's `follows` who have stayed, and whom no other call brings."""
        going = [s for s in call.follows if s in self._stayed and s not in made.progress]
        made.progress.update((session, _Progress()) for session in going)
        return [self._next_step(session, self._stayed[session]) for session in going]

    def _make_steps(self, batch: list[SessionStep], max_steps: int, may_leave: int, made: _Made) -> None:
        """Forward, sample, route; again while the call allows it."""
        while batch:
            self._append(batch)
            output = self._forward(batch, made)
            goes_on = self._finish_step(batch, output, made.progress)
            stay = [s.session for s in batch if made.progress[s.session].destination == 0]
            may_leave -= len(batch) - len(stay)
            if not goes_on or may_leave < 0 or made.steps >= max_steps:
                break
            batch = [self._next_step(s, made.progress[s].token_ids[-1]) for s in stay]
        for session, mine in made.progress.items():
            if self._stays(session, mine):
                self._stayed[session] = mine.token_ids[-1]
            else:
                self._stayed.pop(session, None)

    def _response(self, call: StepRequest, made: _Made, brought: set[int], stats: StepStats) -> StepResponse:
        results = [made.progress[step.session].result() for step in call.steps]
        for session in call.follows:
            if session in brought:
                results.append(SessionResult(elsewhere=True))
            elif session in made.progress:
                results.append(made.progress[session].result())
            else:
                results.append(SessionResult())
        return StepResponse(results, stats, self._facts if call.hello else None)

    def _free(self, sessions: Sequence[int]) -> None:
        if sessions:
            self._engine.free(sessions)
            for session in sessions:
                self._sessions.pop(session, None)
                self._stayed.pop(session, None)

    def _open(self, opened: SessionOpen, made: _Made) -> None:
        """Make a session, or note in its progress why not."""
        try:
            if not self._facts.samples and not is_greedy(opened.sampling):
                raise ValueError(f"sampling: the engine {self._facts.engine} takes greedy requests only")
            overrides = opened.router_params
            params = self._router_config.override(overrides, self._router.models) if overrides else self._router.params
            self._engine.open(opened)
        except (ValueError, EngineError) as error:
            if opened.session in made.progress:
                made.progress[opened.session].error = str(error)
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

    def _known(self, step: SessionStep, made: _Made) -> bool:
        mine = made.progress[step.session]
        if mine.error is None and step.session not in self._sessions:
            mine.error = f"session {step.session} is not open on this model"
        return mine.error is None

    def _append(self, batch: Sequence[SessionStep]) -> None:
        """The step's tokens into the sessions' sequences; what stood there from `start` on is dropped."""
        for step in batch:
            tokens = self._sessions[step.session].tokens
            tokens[step.start :] = step.token_ids

    def _forward(self, batch: Sequence[SessionStep], made: _Made) -> EngineOutput:
        began_s = time.perf_counter()
        try:
            output = self._engine.step(batch)
        except EngineError as error:
            output = EngineOutput([], errors={s.session: str(error) for s in batch})
        made.engine_s += time.perf_counter() - began_s
        made.steps += 1
        made.session_steps += len(batch)
        made.more_tokens += sum(len(step.token_ids) for step in batch) - len(batch)
        for session, message in output.errors.items():
            made.progress[session].error = message
        return output

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
        tokens = step.next_token_ids.tolist()
        for i, session in enumerate(step.rids):
            mine = progress[session]
            mine.token_ids.append(tokens[i])
            mine.logprobs.append(sampled.logprobs[good[i]])
            mine.destination, mine.fields, mine.error = destinations[i], step.fields[i], errors.get(i)
            goes_on &= mine.error is None and not self._ends(session, tokens[i])
        return goes_on

    def _ends(self, session: int, token: int) -> bool:
        """Whether this token, about to be committed, ends the session's request."""
        held = self._sessions[session]
        full = len(held.tokens) + 1 >= held.opened.limit
        return full or (held.opened.stop_at_eos and token in self._eos)

    def _sample(self, output: EngineOutput) -> Sampled:
        if output.logits is None:
            token_ids = torch.tensor(output.next_token_ids or (), dtype=torch.int64)
            return Sampled(token_ids, [0.0] * len(output.sessions), {})
        held = [self._sessions[s] for s in output.sessions]
        return sample(output.logits, [SamplingRow(h.opened.sampling, h.tokens, h.opened.prompt_tokens) for h in held])

    def _step_result(self, output: EngineOutput, sampled: Sampled, rows: Sequence[int]) -> StepResult:
        """What `route` gets: these rows of the output."""
        sessions = [output.sessions[r] for r in rows]
        held = [self._sessions[s] for s in sessions]
        places = [len(h.tokens) for h in held]
        logits, hidden, token_ids = output.logits, output.hidden_states, sampled.token_ids
        if len(rows) < len(output.sessions):
            token_ids = token_ids[rows]
            logits = None if logits is None else logits[rows]
            hidden = None if hidden is None else hidden[rows]
        return StepResult(
            logits_output=LogitsOutput(logits, hidden),
            next_token_ids=token_ids,
            places=places,
            sequences=[h.tokens for h in held],
            prompt_tokens=[h.opened.prompt_tokens for h in held],
            rids=sessions,
            params=[h.router_params for h in held],
            draw=lambda row: uniform(held[row].opened.sampling.seed, places[row], self._routing_stream),
            fields=[{} for _ in rows],
        )
