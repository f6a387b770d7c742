# SPDX-License-Identifier: Apache-2.0
"""`batching: auto`, running: looks at the traffic, asks the solver, hands the scheduler its B."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from python_backends.token_router.metrics import ControllerReadings
from python_backends.token_router.threshold.controller import ThresholdController
from python_backends.token_router.threshold.profile import Profile
from python_backends.token_router.threshold.solver_process import Solver, SolverFailed
from python_backends.token_router.threshold.traffic import Traffic

__all__ = ["LOOK_S", "AutoBatching"]

_log = logging.getLogger("token_router.auto")

LOOK_S = 0.25
_REST = 2.0  # times as long as the solver has worked: where a solution takes seconds, it must not work all the time
_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0


class AutoBatching:
    """traffic: what is learnt. controller: what decides. solver: what it asks. largest: the most requests live
    at once. changed: called when the controller's B has changed."""

    def __init__(
        self,
        traffic: Traffic,
        controller: ThresholdController,
        solver: Solver,
        largest: int,
        changed: Callable[[], None],
    ) -> None:
        self.controller = controller
        self._traffic = traffic
        self._solver = solver
        self._largest = largest
        self._changed = changed
        self._retry_s = _RETRY_S
        self._failure: str | None = None
        self._profile: Profile | None = None

    async def run(self) -> None:
        """Runs until it is cancelled; the solver ends with it."""
        looked_at: list[int] = []
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if self._traffic.calls != looked_at:  # else nothing has happened
                    looked_at = list(self._traffic.calls)
                    await self._look_safely()
        finally:
            await self._solver.close()

    def status(self) -> dict[str, Any]:
        """See `ThresholdController.status`. profile: the traffic as last seen. error: why the last question got no
        answer; None = it did, or there is none to ask any more."""
        profile = None if self._profile is None else self._profile.model_dump(mode="json")
        return self.controller.status() | {"profile": profile, "error": self._failure}

    def readings(self, live: int) -> ControllerReadings:
        """For the metrics, with `live` requests."""
        controller = self.controller
        return ControllerReadings(
            self._profile, controller.predicted(live), controller.solves, controller.failures, controller.changes
        )

    async def _look_safely(self) -> None:
        """Whatever goes wrong here, the requests go on with the B that there is."""
        try:
            await self._look()
        except Exception as error:
            _log.exception("the traffic could not be looked at")
            self._failure = repr(error)
            await self._failed()

    async def _look(self) -> None:
        profile = self._profile = self._traffic.profile(self._largest)
        question = None if profile is None else self.controller.question(profile)
        if question is None:
            self._failure = None
            return
        began = time.monotonic()
        try:
            answer = await self._solver.solve(question)
        except SolverFailed as error:
            self._failure = str(error)
            _log.warning("N = %d: no solution: %s; B stays, asked again in %g s", question.live, error, self._retry_s)
            await self._failed()
            return
        self._failure = None
        self._retry_s = _RETRY_S
        if self.controller.answered(question, answer):
            self._changed()
        await asyncio.sleep(_REST * (time.monotonic() - began))

    async def _failed(self) -> None:
        """Ask no more for a while, longer each time."""
        self.controller.failed()
        await asyncio.sleep(self._retry_s)
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
