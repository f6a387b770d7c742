# SPDX-License-Identifier: Apache-2.0
"""Foresight: when the calls under way will be over, and what each model does with that knowledge.

Run-ahead: how many steps a model makes in one call, so that they share the cost of a call. It goes on by
itself only for as long as no request can come to join it, and lets go of a request only as long as no other
model could launch with it.

Sending ahead: the next call is sent shortly before the present one is over, so that the LLM goes on at once; of
the sessions of the present call, those are in it who stay. It isn't sent when a request from another model is
about to come; a client's new request that comes in between does miss it, and waits for one more call.

Holding: a batch that could launch waits for requests that are about to come from another model, when that
saves more waiting than it costs. The Markov model has no such rule. None of these changes a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.request import Session
from python_backends.token_router.scheduling import Scheduler

__all__ = ["Allowance", "Foresight"]

_SMOOTHING = 0.2  # of the newest call in the forecasts of times
_GOES_SMOOTHING = 0.05  # in those of where requests go, after the first 20 calls: each says little of a probability
_MARGIN_S = 0.001  # run-ahead ends this long before another model, so that what leaves is there in time
_LEAD_S = 0.0028  # before the present call's answer is expected: that answer's way here, and the next call's way there
_BEGINS_S = 0.001  # so long after a call was sent, the next one doesn't overtake it any more
_FOLLOWS = 0.3  # sessions: with fewer expected to stay, and nobody waiting, no call is sent ahead
_LATE_S = 0.0005  # how much later than forecast a call may end before nobody is held for it any more


@dataclass(frozen=True)
class Allowance:
    """Of one call: the steps it may make, and how many sessions may leave before it must stop."""

    max_steps: int = 1
    max_leaves: int = 0


@dataclass(frozen=True)
class _Call:
    """One under way. sent_s: when it was sent; began_s: when it was its turn, the same if not sent ahead. ends_s: when
    it is expected to be over at the soonest, as seen from here; next_s: until when the next call has to leave for the
    LLM to go on after all steps of this one; None = nobody knows. fresh: some get no token in it, or their first; it
    says nothing of other calls."""

    sessions: int
    fresh: bool
    sent_s: float
    began_s: float
    ends_s: float | None
    next_s: float | None

    @property
    def sent_ahead(self) -> bool:
        return self.sent_s < self.began_s


class _Forecast:
    """Of one model: how long its calls take, as seen from here, and where its requests go.

    A call takes a part of its own and a part for each step; the latter is smoothed by the number of
    sessions, and for a number not seen it is that of the next.
    """

    def __init__(self, models: int) -> None:
        self._step_s: dict[int, float] = {}
        self.call_s = 0.0  # of a call, whatever its steps
        self.ahead_s = 0.0  # the same of a call sent ahead, from the end of the one before
        self.goes = [0.0] * models  # the share of a call's sessions that leaves for each model
        self._calls = 0

    def learn(self, call: _Call, steps: int, compute_s: float, took_s: float, left: Mapping[int, int]) -> None:
        sessions, step_s = call.sessions, compute_s / steps
        known = self._step_s.get(sessions, step_s)
        self._step_s[sessions] = known + _SMOOTHING * (step_s - known)
        if call.sent_ahead:
            self.ahead_s += _SMOOTHING * (took_s - compute_s - self.ahead_s)
        else:
            self.call_s += _SMOOTHING * (took_s - compute_s - self.call_s)
        self._calls += 1
        weight = max(_GOES_SMOOTHING, 1 / self._calls)
        for model, share in enumerate(self.goes):
            self.goes[model] = share + weight * (left.get(model, 0) / sessions - share)

    def step_s(self, sessions: int) -> float | None:
        """Of one step; None = no step has been seen."""
        if not self._step_s:
            return None
        return self._step_s[min(self._step_s, key=lambda n: abs(n - sessions))]


class Foresight:
    """What every decoding loop asks before a launch. scheduler: of all models. clock: seconds, monotonic."""

    def __init__(self, batching: BatchingConfig, scheduler: Scheduler, models: int, clock: Callable[[], float]) -> None:
        self._steps = batching.run_ahead
        self._holds = batching.hold
        self._sends_ahead = batching.send_ahead and batching.policy == "async"
        self._scheduler = scheduler
        self._clock = clock
        self._forecasts = [_Forecast(models) for _ in range(models)]
        self._calls: list[_Call | None] = [None] * models

    def allows(self, model: int, batch: Sequence[Session]) -> Allowance:
        """For a call of `model` with these sessions, all of which are to get a token."""
        if self._steps == 1:
            return Allowance()
        if len(batch) == self._scheduler.live:  # nobody can come
            steps = self._steps
        else:
            steps = min(self._steps, self._steps_before_others(model, len(batch)))
        if any(not session.request.output_ids for session in batch):
            leaves = 0  # a request that leaves without a token is launched at once where it goes
        else:
            leaves = min(len(batch), self._scheduler.spare_leaves(model))
        return Allowance(steps, leaves)

    def holds_until(self, model: int, waiting: int) -> float | None:
        """Until when a launch of `model` with `waiting` sessions is to be put off; None = it launches now.

        With x the time until another model's call is over, n the requests that should come from it, and L the
        time of a call here: who waits would lose x each, who comes would lose L - x each; the smaller sum wins.
        """
        if not self._holds:
            return None
        forecast = self._forecasts[model]
        step_s = forecast.step_s(waiting)
        if step_s is None:
            return None
        here_s, now = forecast.call_s + step_s, self._clock()
        until: float | None = None
        for other, call in enumerate(self._calls):
            if other == model or call is None or call.ends_s is None:
                continue
            wait_s = call.ends_s + _LATE_S - now
            if self._pays(wait_s, here_s, waiting, other, model):
                until = now + wait_s if until is None else min(until, now + wait_s)
        return until

    def sends_ahead_at(self, model: int) -> float | None:
        """When to ask `sends_ahead`, before the call of `model` is over; None = not for this call."""
        call = self._calls[model]
        if not self._sends_ahead or call is None or call.next_s is None:
            return None
        return max(call.next_s - _LEAD_S, call.sent_s + _BEGINS_S, self._clock())

    def sends_ahead(self, model: int, waiting: int, follows: int, at_least: int) -> bool:
        """Whether to send the next call of `model` now, a little before its present one is over. waiting: for
        it; follows: sessions of the present call, who are in the next one if they stay; at_least: it isn't made
        with fewer."""
        call, forecast = self._calls[model], self._forecasts[model]
        step_s = forecast.step_s(waiting + follows)
        if call is None or call.next_s is None or step_s is None or self._runs_ahead_next(follows):
            return False
        stays = follows * (1 - sum(forecast.goes))
        if waiting < at_least and (waiting + follows < at_least or stays < _FOLLOWS):
            return False  # that there is a next call is not sure enough
        here_s = forecast.ahead_s + step_s
        for other, theirs in enumerate(self._calls):
            if other == model or theirs is None or not self._forecasts[other].goes[model]:
                continue
            if theirs.ends_s is None:
                return False
            wait_s = theirs.ends_s + _LATE_S - call.next_s
            if wait_s < 0 or (self._holds and self._pays(wait_s, here_s, waiting + stays, other, model)):
                return False
        return True

    def launched(
        self,
        model: int,
        sessions: int,
        max_steps: int,
        sent_s: float | None = None,
        fresh: bool = False,
        round_trip_s: float = 0.0,
    ) -> None:
        """`model` begins a call. sessions: in it; sent_s: when it was sent, if that was ahead of the end of the call
        before, which is now.
        fresh: some get no token in it, or their first: how long that takes is not foreseen. round_trip_s: to the
        LLM's host and back; its answer is so long on its way here, and the next call on its way there."""
        now = self._clock()
        forecast = self._forecasts[model]
        step_s = forecast.step_s(sessions)
        ends_s = next_s = None
        if step_s is not None and sessions and not fresh:
            began_s = now + (forecast.call_s if sent_s is None else forecast.ahead_s)
            ends_s, next_s = began_s + step_s, began_s + max_steps * step_s - round_trip_s
        self._calls[model] = _Call(sessions, fresh, now if sent_s is None else sent_s, now, ends_s, next_s)

    def ended(self, model: int, steps: int, compute_s: float, left: Mapping[int, int]) -> None:
        """The call is over. steps, compute_s: what the model did in it; left: how many sessions go to which
        model."""
        call = self._calls[model]
        if call is not None and steps and call.sessions and not call.fresh:
            took_s = self._clock() - call.began_s
            self._forecasts[model].learn(call, steps, compute_s, took_s, left)
        self._calls[model] = None

    def failed(self, model: int) -> None:
        """The call is over, and nothing is to be learned from it."""
        self._calls[model] = None

    def _runs_ahead_next(self, follows: int) -> bool:
        """Whether the next call would better be one of many steps, which is not sent ahead."""
        return self._steps > 1 and follows == self._scheduler.live

    def _pays(self, wait_s: float, here_s: float, waiting: float, other: int, model: int) -> bool:
        """Whether `waiting` sessions of `model` should wait that long for those of the call of `other`."""
        call = self._calls[other]
        coming = 0.0 if call is None else call.sessions * self._forecasts[other].goes[model]
        return 0 < wait_s < here_s and waiting * wait_s < coming * (here_s - wait_s)

    def _steps_before_others(self, model: int, sessions: int) -> int:
        """How many steps end before anybody could come from another model."""
        forecast = self._forecasts[model]
        step_s = forecast.step_s(sessions)
        if step_s is None:
            return 1
        until_s = math.inf
        if (joins_s := self._scheduler.joins_at(model)) is not None:
            until_s = joins_s
        for other, call in enumerate(self._calls):
            if other == model or call is None:
                continue
            if call.ends_s is None:
                return 1
            until_s = min(until_s, call.ends_s)
        left_s = until_s - self._clock() - forecast.call_s - _MARGIN_S
        return self._steps if math.isinf(left_s) else max(1, int(left_s / step_s))
