# SPDX-License-Identifier: Apache-2.0
"""The client loop: admission, committed tokens to text, the end of a request, cancellation."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from python_backends.token_router.errors import InvalidRequest, RequestCancelled, TokenRouterError, Unavailable
from python_backends.token_router.intake import Submission
from python_backends.token_router.inter_model_loop import InterModelLoop
from python_backends.token_router.kv_budget import KvBudget, KvPool
from python_backends.token_router.request import Request, Session
from python_backends.token_router.responses import Chunk, ResponseStream, Usage

__all__ = ["ClientLoop"]


class ClientLoop:
    """Where requests come in and answers go out. Every admitted request ends in exactly one of `_end`
    (finished) and `fail` (error or cancelled).

    models: their names. refuses: why no request can be taken now, None = none is refused.
    inter_model: set by the runtime. kv: the models' KV and who has reserved it; nothing is admitted before
    `models_hold` has been told of it.
    """

    inter_model: InterModelLoop

    def __init__(self, models: Sequence[str], max_live: int, max_queue: int, refuses: Callable[[], str | None]) -> None:
        self._models = tuple(models)
        self.max_live = max_live
        self._max_queue = max_queue
        self._refuses = refuses
        self.kv = KvBudget(models)
        self._rids = itertools.count(1)
        self._queue: deque[Request] = deque()
        self._live: dict[int, Request] = {}

    @property
    def live(self) -> int:
        """How many requests are being generated."""
        return len(self._live)

    def sessions(self) -> list[Session]:
        """Every session of every request being generated."""
        return [session for request in self._live.values() for session in request.sessions]

    @property
    def queued(self) -> int:
        """How many requests wait for admission."""
        return len(self._queue)

    def submit(self, submission: Submission, stream: ResponseStream) -> Request | None:
        """Take a request, or refuse it (None) when nothing can be taken now, the queue is full, or it never fits."""
        error = self._refusal(submission.limit)
        if error is not None:
            stream.fail(error)
            return None
        request = submission.request(next(self._rids), stream)
        self._queue.append(request)
        self.admit_queued()
        return request

    def admit_queued(self) -> None:
        """Admit as many of the waiting requests as there is room for, in their order: a long one isn't overtaken
        by the short ones after it, which could keep it waiting for ever."""
        while self._queue and self._fits(self._queue[0].limit):
            request = self._queue.popleft()
            self._live[request.rid] = request
            self.kv.reserve(request.rid, request.limit)
            self.inter_model.admit(request)

    def models_hold(self, max_live: int, pools: Sequence[KvPool]) -> None:
        """What can be admitted from now on. After a reload that may be less than before: the latest requests for which
        there is no room any more are ended, and the waiting ones for which there never will be are refused. It may
        be more, too."""
        self.max_live = max_live
        self.kv.use(pools)
        for request in list(self._live.values())[::-1]:
            if self.live > self.max_live or self.kv.over_committed():
                self.fail(request, Unavailable("a model that was loaded again holds less than before"))
        for request in list(self._queue):
            if (error := self._never_fits(request.limit)) is not None:
                self.fail(request, error)
        self.admit_queued()

    def _refusal(self, limit: int) -> TokenRouterError | None:
        """Why a request with this limit isn't taken; None = it is."""
        reason = self._refuses()
        if reason is None and self.queued >= self._max_queue and not self._has_room(limit):
            reason = f"the queue is full: {self.live} requests running, {self.queued} waiting (limit {self._max_queue})"
        return self._never_fits(limit) if reason is None else Unavailable(reason)

    def _never_fits(self, limit: int) -> InvalidRequest | None:
        """Why it could never be admitted; of one that was checked before a model came back with less, too."""
        if self.kv.could_fit(limit):
            return None
        held = ", ".join(f"'{pool.model}' {pool.longest}" for pool in self.kv.pools)
        return InvalidRequest(f"prompt and max_tokens: {limit} tokens are more than the KV of the models holds: {held}")

    def _has_room(self, limit: int) -> bool:
        """Whether a request that comes now needn't wait."""
        return not self._queue and self._fits(limit)

    def _fits(self, limit: int) -> bool:
        return self.live < self.max_live and self.kv.fits(limit)

    def cancel(self, request: Request) -> None:
        """Nobody waits for this request's answer any more."""
        self.fail(request, RequestCancelled("the client cancelled the request"))

    def fail(self, request: Request, error: TokenRouterError) -> None:
        """End a request, admitted or waiting, with an error. Does nothing when it has ended."""
        if request.ended:
            return
        request.stream.fail(error)
        self._close(request)

    def fail_all(self, error: TokenRouterError) -> None:
        """End every request with this error, the waiting ones first so that none of them starts."""
        self.fail_queued(error)
        for request in list(self._live.values()):
            self.fail(request, error)

    def fail_queued(self, error: TokenRouterError) -> None:
        """End the requests that wait for admission, the last one first: only who is first can be admitted meanwhile."""
        for request in list(self._queue)[::-1]:
            self.fail(request, error)

    def commit(self, session: Session) -> bool:
        """Make the tokens that `session`, their maker, knows final: stream them, and end the request at
        the end of sequence, a stop string or its limit. True = it has ended; what follows is dropped."""
        request = session.request
        chunk = Chunk()
        finish_reason = None
        name = self._models[session.model]
        for at in range(len(request.output_ids), len(session.output_ids)):
            token = session.output_ids[at]
            request.output_ids.append(token)
            request.output_models.append(session.model)
            request.idle_handoffs = 0
            chunk.token_ids.append(token)
            chunk.models.append(name)
            if request.want_log_probs:
                chunk.log_probs.append(session.log_probs[at])
            chunk.text += request.text.push(token)
            if token in request.eos_token_ids or request.text.stopped:
                finish_reason = "stop"
            elif request.committed >= request.limit:
                finish_reason = "length"
            if finish_reason is not None:
                self._end(request, chunk, finish_reason)
                return True
        if request.streaming:
            request.stream.send(chunk)
        else:
            request.whole.extend(chunk)
        return False

    def _end(self, request: Request, chunk: Chunk, finish_reason: str) -> None:
        chunk.text += request.text.flush()
        chunk.finish_reason = finish_reason
        chunk.usage = self._usage(request)
        if not request.streaming:
            request.whole.extend(chunk)
            chunk = request.whole
        request.stream.send(chunk)
        self._close(request)

    def _close(self, request: Request) -> None:
        request.ended = True
        if self._live.pop(request.rid, None) is not None:
            self.kv.release(request.rid)
            self.inter_model.finish(request)
        else:
            self._queue.remove(request)
        self.admit_queued()

    def _usage(self, request: Request) -> Usage:
        made = request.output_models
        return Usage(
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=len(made),
            completion_tokens_by_model={name: made.count(i) for i, name in enumerate(self._models)},
            handoffs=request.handoffs,
        )
