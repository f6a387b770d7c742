# SPDX-License-Identifier: Apache-2.0
"""One call to an LLM, from its launch to its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from python_backends.llm.contract import SessionResult, StepRequest, StepResponse
from python_backends.token_router.request import Session, SessionState

__all__ = ["Call"]


class Call:
    """One call under way.

    request: what was sent. ahead: the sessions of the call before, if it was sent ahead of that one's end.
    steps: who is in it, and with what: those whom the request names, and of `ahead` those who have stayed
    (`DecodingLoop._settle` of the call before). answer: what is waited for.
    sent_s: when it was sent, event-loop seconds.
    prefilled: whether one of them may not be delayed: its time is not that of decoding.
    fresh: whether one of them gets no token, or its request's first: how long that takes is not foreseen, and who
    isn't through has to be in the next call.
    """

    def __init__(
        self,
        request: StepRequest,
        batch: list[Session],
        ahead: list[Session],
        answer: asyncio.Future[StepResponse],
        sent_s: float,
    ) -> None:
        self.request = request
        self.ahead = dict.fromkeys(ahead)
        self.steps = dict(zip(batch, request.steps, strict=True))
        self.answer = answer
        self.sent_s = sent_s
        self.prefilled = any(session.urgent for session in batch)
        self.fresh = any(not step.sample or not s.request.output_ids for s, step in self.steps.items())
        self._order = [*batch, *ahead]

    def samples(self, session: Session) -> bool:
        """Whether the session gets a token, and isn't only prefilled."""
        return self.steps[session].sample

    def not_made(self, results: Sequence[tuple[Session, SessionResult]]) -> list[Session]:
        """Who was taken from the queue for it and still goes on, if it wasn't made, because too few were in it."""
        if self.request.at_least == 1 or any(result.token_ids or result.error for _, result in results):
            return []
        return [s for s, _ in results if s not in self.ahead and s.state is SessionState.RUNNING]

    def results(self, response: StepResponse) -> list[tuple[Session, SessionResult]]:
        """What the LLM did for those who are in it."""
        pairs = zip(self._order, response.results, strict=True)
        return [(session, result) for session, result in pairs if session in self.steps]
