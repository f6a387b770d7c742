# SPDX-License-Identifier: Apache-2.0
"""Who watches a simulation: a trace, a controller."""

from __future__ import annotations

from collections.abc import Sequence

from tools.simulator.requests import SimRequest, SimSession

__all__ = ["Observer"]


class Observer:
    """Times are simulated, in ns. Each method does nothing here; an observer has those that it needs."""

    def live_changed(self, now: int, live: int) -> None:
        """A request was admitted or has ended."""

    def waits(self, now: int, session: SimSession) -> None:
        """It joined its model's queue."""

    def launched(self, now: int, model: int, batch: Sequence[SimSession]) -> None:
        """`model` begins a step."""

    def stepped(self, now: int, model: int, sessions: int, more_tokens: int, took: int) -> None:
        """`model` ends a step that took so long (ns); more_tokens: of all suffixes beyond one each. Called
        before what the step did to its sessions."""

    def pending(self, now: int, session: SimSession) -> None:
        """It neither waits nor runs any more; its request is at another model."""

    def routed(self, now: int, session: SimSession, destination: int, tokens: int) -> None:
        """A step of `session` made so many tokens and sends its request to this model, perhaps its own."""

    def ended(self, now: int, request: SimRequest) -> None:
        """It has its last token."""
