# SPDX-License-Identifier: Apache-2.0
"""In-flight batching over one of our engines: a request joins the batch at the next step, and leaves when it is done.

Engine sessions outlive their requests, as stored prefixes. A request computes what the block cache says a stock model
would compute, and more where the engine has no session with that prefix to go on from.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from block_cache import BlockCache, Lease, Retention

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines import Engine, EngineError, EngineOutput


@dataclass(eq=False)
class Job:
    """One request. done: called with its outcome from the executor's thread. logits: FP32, a row a token made.
    prefills: whether it is there for its KV only, and the prompt goes on."""

    prompt: list[int]
    max_tokens: int
    end_id: int | None
    wants_logits: bool
    prefills: bool
    retention: Retention
    done: Callable[[Job], None]
    request_id: str = ""
    output: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    error: str | None = None
    stopped: bool = False
    session: int = -1
    computed: int = 0  # tokens of the prompt that were computed
    lease: Lease | None = None
    times_ns: dict[str, int] = field(default_factory=dict)

    def happened(self, what: str) -> None:
        self.times_ns[what] = time.monotonic_ns()


class Inflight:
    """The executor's thread.

    exact: a stored session is gone on from behind its prompt only, and from where it ends, even if the block cache
    has lost some of it. An engine that cuts prompts and what follows them into different calls gives the same bits
    then as one that was never interrupted; what a stock model would compute is in the counts of blocks only.
    """

    def __init__(self, engine: Engine, cache: BlockCache, exact: bool) -> None:
        self._engine = engine
        self._exact = exact
        self._cache = cache
        self._arrived: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: list[Job] = []
        self._active: list[Job] = []
        self._stored: dict[int, list[int]] = {}  # idle engine sessions, the least recently used first
        self._prompts: dict[int, int] = {}  # the length that each session was opened with
        self._numbers = 0
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        job.happened("arrival")
        self._arrived.put(job)

    def close(self) -> None:
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._receive():
            self._admit()
            self._active = [job for job in self._active if not self._ends(job)]
            if self._active:
                self._step()
            elif self._waiting:
                time.sleep(0.001)

    def _receive(self) -> bool:
        """False = no more will come."""
        block = not self._active and not self._waiting
        while True:
            try:
                job = self._arrived.get(block=block)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._waiting.append(job)
            block = False

    def _admit(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            if job.stopped:
                self._waiting.pop(0)
                job.done(job)
                continue
            most = self._engine.capacity().max_sessions
            lease = None
            if len(self._active) < most:
                lease = self._cache.begin(job.prompt, job.max_tokens, job.retention)
            if lease is None:
                return  # first come, first served
            job.lease = lease
            self._waiting.pop(0)
            self._place(job, lease.reused_tokens)
            job.happened("first_scheduled")
            self._active.append(job)

    def _place(self, job: Job, reused_tokens: int) -> None:
        """An engine session for the job: the stored one with the longest beginning in common, else a new one."""
        common = {s: _common(tokens, job.prompt) for s, tokens in self._stored.items()}
        best = max(common, key=lambda s: common[s], default=None)
        start = 0 if best is None else min(common[best], len(job.prompt) - 1 if self._exact else reused_tokens)
        if best is not None and self._exact and start < self._prompts[best] - 1:
            start = 0
        if start:
            assert best is not None
            job.session = best
            del self._stored[best]
        else:
            if len(self._active) + len(self._stored) >= self._engine.capacity().max_sessions:
                oldest = next(iter(self._stored))
                del self._stored[oldest]
                self._engine.free([oldest])
            job.session = self._numbers
            self._numbers += 1
            prompt = len(job.prompt) + job.prefills
            self._prompts[job.session] = prompt
            self._engine.open(SessionOpen(job.session, prompt, len(job.prompt) + job.max_tokens))
        job.computed = len(job.prompt) - start

    def _step(self) -> None:
        steps = []
        for job in self._active:
            start = len(job.prompt) + len(job.output) - 1 if job.output else len(job.prompt) - job.computed
            steps.append(SessionStep(job.session, start, [*job.prompt, *job.output][start:]))
        try:
            output = self._engine.step(steps)
        except EngineError as error:
            output = EngineOutput([], errors={job.session: str(error) for job in self._active})
        jobs = {job.session: job for job in self._active}
        for session, message in output.errors.items():
            jobs[session].error = message
        for row, session in enumerate(output.sessions):
            self._made(jobs[session], output, row)

    def _made(self, job: Job, output: EngineOutput, row: int) -> None:
        if output.logits is None:
            assert output.next_token_ids is not None
            token = output.next_token_ids[row]
        else:
            token = int(output.logits[row].argmax())
            if job.wants_logits:
                job.logits.append(output.logits[row].numpy().copy())
        if not job.output:
            job.happened("first_token")
        job.output.append(token)

    def _ends(self, job: Job) -> bool:
        ended = job.stopped or job.error is not None or len(job.output) >= job.max_tokens
        if not ended and not (job.output and job.output[-1] == job.end_id):
            return False
        assert job.lease is not None
        if job.error is None and job.output:
            self._cache.end(job.lease, job.output)
            self._stored[job.session] = [*job.prompt, *job.output][:-1]
        else:
            self._cache.end(job.lease, [])
            self._engine.free([job.session])
        job.happened("last_token")
        job.done(job)
        return True


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
