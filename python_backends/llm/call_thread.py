# SPDX-License-Identifier: Apache-2.0
"""The thread that makes an LLM's calls, step after step, in the order in which they came.

Triton hands over the next call only when `execute` returns. So `execute` leaves it here and returns at once: the
calls that `token_router` sent ahead are here, and read, when a step ends, and the LLM goes on without waiting for
anybody. Those that came during a step are made together, as one step (`joins`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from python_backends.llm.contract import StepRequest, StepResponse
from python_backends.llm.joining import joins

__all__ = ["Answer", "CallThread"]

# At most so long whoever brings a call to an idle LLM lets the thread begin before it goes on itself: both need the
# interpreter's lock, and what Triton's stub does after `execute` takes longer than beginning a step.
_HANDOVER_S = 0.001

Answer: TypeAlias = Callable[[StepResponse | Exception], None]


class _Call(NamedTuple):
    request: StepRequest
    answer: Answer


class CallThread:
    """make: makes calls as one step. What it raises is the answer to each of them.

    Giving an answer costs as much as sampling and routing together. While the next call is here already, another
    thread gives it, beside the engine's computing.
    """

    def __init__(self, make: Callable[[Sequence[StepRequest]], Sequence[StepResponse]]) -> None:
        self._make = make
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy = threading.Event()
        self._threads = [
            threading.Thread(target=self._make_calls, name="calls", daemon=True),
            threading.Thread(target=self._give_answers, name="answers", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, request: StepRequest, answer: Answer) -> None:
        """Make this call after those before. answer: gets its response, or what went wrong, in another thread."""
        self._calls.put(_Call(request, answer))
        self._busy.wait(_HANDOVER_S)

    def close(self) -> None:
        """Returns when the calls that came before have been made and answered."""
        self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _make_calls(self) -> None:
        waiting: deque[_Call | None] = deque()
        while True:
            if not waiting and self._calls.empty():
                self._busy.clear()
            while not (waiting and self._calls.empty()):
                waiting.append(self._calls.get())
            self._busy.set()
            first = waiting.popleft()
            if first is None:
                break
            calls = [first]
            while waiting and (later := waiting[0]) is not None and joins([c.request for c in calls], later.request):
                calls.append(later)
                waiting.popleft()
            outcomes = self._outcomes([call.request for call in calls])
            goes_on = bool(waiting) or not self._calls.empty()
            for call, outcome in zip(calls, outcomes, strict=True):
                if goes_on:
                    self._answers.put(lambda call=call, outcome=outcome: call.answer(outcome))  # type: ignore[misc]
                else:
                    call.answer(outcome)
        self._answers.put(None)

    def _outcomes(self, requests: Sequence[StepRequest]) -> Sequence[StepResponse | Exception]:
        try:
            return self._make(requests)
        except Exception as error:  # whatever it is belongs to the calls, not to this thread
            return [error] * len(requests)

    def _give_answers(self) -> None:
        while (give := self._answers.get()) is not None:
            give()
