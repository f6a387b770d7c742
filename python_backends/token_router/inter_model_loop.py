# SPDX-License-Identifier: Apache-2.0
"""The inter-model loop: brings every request that leaves a model to the one it goes to, and tells all
models of admissions and finishes. It has no task of its own: a handoff is carried in the turn in which the request
leaves, and the loops that it wakes go on after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from python_backends.token_router.config import BatchingConfig
from python_backends.token_router.decoding_loop import DecodingLoop
from python_backends.token_router.errors import RequestFailed, TokenRouterError
from python_backends.token_router.request import Request, Session, SessionState
from python_backends.token_router.scheduling import Scheduler
from python_backends.token_router.threshold.traffic import Traffic
from routers import BaseRouter, model_to_peer, peer_to_model
from routers.registry import cut

__all__ = ["InterModelLoop"]


class InterModelLoop:
    """The way between the models.

    loops, routers: by model number. scheduler, traffic: of all models.
    commit: makes every token that a session knows final; true = that ended the request.
    fail: ends a request with an error.
    live: requests being generated. handoffs[i][j]: since the start, from model i to model j.
    """

    def __init__(
        self,
        loops: Sequence[DecodingLoop],
        routers: Sequence[BaseRouter[Any]],
        scheduler: Scheduler,
        traffic: Traffic,
        batching: BatchingConfig,
        commit: Callable[[Session], bool],
        fail: Callable[[Request, TokenRouterError], None],
    ) -> None:
        self._loops = loops
        self._routers = routers
        self._scheduler = scheduler
        self._traffic = traffic
        self._eager = batching.llm_prefill == "eager"
        self._resume = batching.resume
        self._commit = commit
        self._fail = fail
        self.live = 0
        self.handoffs = [[0] * len(loops) for _ in loops]

    def admit(self, request: Request) -> None:
        """Give the request a session on every model and start it at the entry."""
        models = len(self._loops)
        request.sessions = [Session(request, model, peer_locs=[0] * models) for model in range(models)]
        self._live_changed(self.live + 1)
        entry, *peers = request.sessions
        entry.here = True
        self._loops[0].add(entry)
        if self._eager and entry.prefilling:
            for session in peers:
                self._loops[session.model].add(session)

    def finish(self, request: Request) -> None:
        """The request has ended: no model keeps anything of it."""
        for session in request.sessions:
            self._loops[session.model].drop(session)
        self._traffic.finished(request.rid)
        self._live_changed(self.live - 1)

    def handoff(self, source: Session) -> None:
        """The request leaves `source` for its peer number `source.destination`: send, receive, commit what was kept,
        wake it at its new model. At once: what is between the end of one model's step and the begin of the other's
        costs both."""
        request = source.request
        target = request.sessions[_goes_to(source)]
        ran_ahead = source.length - 1  # with the tokens of this call before the one that leaves
        try:
            start, accepted = self._exchange(source, target)
        except Exception as error:  # an algorithm is a user's code: what it raises ends this request only
            where = f"router between '{self._name(source)}' and '{self._name(target)}'"
            self._fail(request, RequestFailed(f"{where}: {error!r}"))
            return
        # Both ends now know the same sequence: what `send` or `receive` dropped is gone at the source too.
        target.splice(start, accepted)
        source.splice(start, accepted)
        source.peer_locs[source.destination] = target.length
        target.peer_locs[model_to_peer(target.model, source.model)] = source.length
        request.idle_handoffs += 1
        self._traffic.left(source.model, source.rid, target.model, max(0, source.length - ran_ahead))
        if source.length > request.committed and self._commit(source):
            return
        if request.idle_handoffs > 2 * len(self._loops):
            what = f"the router makes no progress: {request.idle_handoffs} handoffs in a row kept no token"
            self._fail(request, RequestFailed(what))
            return
        request.handoffs += 1
        self.handoffs[source.model][target.model] += 1
        if not self._resume:
            self._loops[source.model].evict(source)
        target.here = True
        if target.state is SessionState.PENDING:  # else its prompt is being prefilled, and it goes on from there
            self._loops[target.model].add(target)

    def _live_changed(self, live: int) -> None:
        self.live = live
        self._scheduler.live_changed(live)
        for loop in self._loops:
            loop.wake()

    def _name(self, session: Session) -> str:
        return self._loops[session.model].llm.name

    def _exchange(self, source: Session, target: Session) -> tuple[int, list[int]]:
        """`send` here, `receive` there: the position from which on, the prompt skipped, and the tokens that
        both ends then have. Raises what they raise, and ValueError when the router left a gap, made up
        tokens or changed what the client already has."""
        request = source.request
        peer_req = self._routers[source.model].send(source)
        start = peer_req.loc - len(peer_req.token_ids)
        if peer_req.rid != request.rid:
            raise ValueError(f"rid: {peer_req.rid}; this is request {request.rid}")
        if not 0 <= start <= target.length:
            raise ValueError(
                f"token_ids: begin at position {start}; the peer has {target.length} tokens, nothing may be missing"
            )
        sent = list(peer_req.token_ids)
        if sent != source.tokens(start, peer_req.loc):
            raise ValueError(f"token_ids: {cut(str(sent))} aren't those of the sequence from position {start} on")
        peer_req = replace(peer_req, finished=request.ends(peer_req.token_ids, peer_req.loc))
        accepted = list(self._routers[target.model].receive(peer_req))
        if accepted != sent[: len(accepted)]:
            raise ValueError(f"receive: accepted {cut(str(accepted))}, which {cut(str(sent))} doesn't begin with")
        end = start + len(accepted)
        start = max(start, len(request.prompt_ids))
        tokens = source.tokens(start, max(start, end))
        settled = request.output_ids[start - len(request.prompt_ids) :]
        if tokens[: len(settled)] != settled:
            raise ValueError(
                f"loc: {peer_req.loc} with {len(accepted)} tokens accepted would take back or change tokens that"
                f" are final; the first {request.committed} of the sequence are"
            )
        return start, tokens


def _goes_to(session: Session) -> int:
    """The number of the model that a session which leaves goes to."""
    return peer_to_model(session.model, session.destination)
