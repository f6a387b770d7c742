# SPDX-License-Identifier: Apache-2.0
"""`batching: auto` in a simulation: the runtime's estimator and controller, on the simulation's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from python_backends.token_router.threshold.auto import LOOK_S
from python_backends.token_router.threshold.controller import Answer, Question, ThresholdController
from python_backends.token_router.threshold.traffic import Traffic
from tools.simulator.engine import Simulation
from tools.simulator.observer import Observer
from tools.simulator.requests import SimRequest, SimSession

__all__ = ["SimulatedAuto"]


class SimulatedAuto(Observer):
    """Learns from the simulation and sets its B from now on.

    models: their names. largest: the most requests live at once. solve: answers at once; the answer is applied
    `solve_s` simulated seconds later.
    """

    def __init__(
        self,
        simulation: Simulation,
        models: Sequence[str],
        largest: int,
        solve: Callable[[Question], Answer],
        solve_s: float = 0.1,
    ) -> None:
        self.traffic = Traffic(models, lambda: simulation.now / 1e9)
        self.controller = ThresholdController(len(models))
        self._simulation = simulation
        self._largest = largest
        self._solve = solve
        self._solve_s = solve_s
        self._batch: list[list[SimSession]] = [[] for _ in models]
        simulation.observe(self)
        simulation.use_thresholds(self.controller)
        self._in(LOOK_S, self._look)

    def launched(self, now: int, model: int, batch: Sequence[SimSession]) -> None:
        self._batch[model] = list(batch)
        self.traffic.launched(model)

    def stepped(self, now: int, model: int, sessions: int, more_tokens: int, took: int) -> None:
        prefilled = any(session.urgent for session in self._batch[model])
        self.traffic.called(model, sessions, more_tokens, took / 1e6, 1, prefilled)

    def routed(self, now: int, session: SimSession, destination: int, tokens: int) -> None:
        if destination == session.model:
            self.traffic.stayed(session.model, session.request.rid)
        else:
            self.traffic.left(session.model, session.request.rid, destination, tokens)

    def ended(self, now: int, request: SimRequest) -> None:
        self.traffic.finished(request.rid)

    def _look(self) -> None:
        profile = self.traffic.profile(self._largest)
        question = None if profile is None else self.controller.question(profile)
        if question is None:
            self._in(LOOK_S, self._look)
            return
        answer = self._solve(question)
        self._in(self._solve_s, lambda: self._apply(question, answer))

    def _apply(self, question: Question, answer: Answer) -> None:
        if self.controller.answered(question, answer):
            self._simulation.use_thresholds(self.controller)
        self._look()

    def _in(self, seconds: float, act: Callable[[], None]) -> None:
        self._simulation.at(self._simulation.now / 1e9 + seconds, act)
