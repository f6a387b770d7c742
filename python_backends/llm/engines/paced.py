# SPDX-License-Identifier: Apache-2.0
"""An engine without weights: a step takes a given time, and the next token is a fixed pseudo-random
function of the model's name and of the whole prefix.

One lost, doubled or reordered token changes every token after it, so a stream that equals the function's
values was decoded from exactly the right prefix at every step, whatever the schedule was.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import Capacity, Engine, EngineOutput
from python_backends.llm.engines.config import PacedConfig
from python_backends.llm.engines.step_check import check_open, check_step

__all__ = ["PacedEngine", "PrefixHash", "next_token"]

_EOS_TOKEN_ID = 0

_MASK = (1 << 64) - 1
_OVERSLEEP_S = 0.0003  # a sleep may end this much late


class PrefixHash:
    """The hashes of all prefixes of one growing sequence: appending costs O(new tokens), cutting nothing.

    model: the name that the function depends on.
    """

    def __init__(self, model: str) -> None:
        seed = hashlib.blake2b(model.encode(), digest_size=8).digest()
        self._hashes = [int.from_bytes(seed, "little")]

    def __len__(self) -> int:
        """The length of the sequence, in tokens."""
        return len(self._hashes) - 1

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self._hashes[length + 1 :]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens."""
        h = self._hashes[-1]
        for token in token_ids:
            # a multiply-xorshift step; + 1 so that token 0 counts too
            h = ((h ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
            h = ((h ^ (h >> 29)) * 0x94D049BB133111EB) & _MASK
            h ^= h >> 32
            self._hashes.append(h)

    def next_token(self, vocab_size: int, eos_every: int) -> int:
        """The token after the sequence: _EOS_TOKEN_ID about once in `eos_every` (0 = never), else one of
        1 to vocab_size - 1."""
        h = self._hashes[-1]
        if eos_every and (h >> 40) % eos_every == 0:
            return _EOS_TOKEN_ID
        return 1 + (h & 0xFFFFFFFFFF) % (vocab_size - 1)


def next_token(model: str, prefix: Sequence[int], vocab_size: int, eos_every: int) -> int:
    """The token that `PacedEngine` of that name makes after `prefix`; see `PrefixHash.next_token`."""
    hashes = PrefixHash(model)
    hashes.extend(prefix)
    return hashes.next_token(vocab_size, eos_every)


class PacedEngine(Engine):
    """See the module. name: of the model, so that two models of the same settings write differently."""

    name: ClassVar[str] = "paced"

    def __init__(self, config: PacedConfig, model: str) -> None:
        self._config = config
        self._model = model
        self._sessions: dict[int, PrefixHash] = {}
        self._capacity = Capacity(
            max_sessions=config.max_sessions,
            context_tokens=config.context_tokens,
            prefill_chunk=config.prefill_chunk,
            vocab_size=config.vocab_size,
            eos_token_ids=(_EOS_TOKEN_ID,),
            provides=config.provides,
            kv_tokens=config.kv_tokens,
        )

    def capacity(self) -> Capacity:
        return self._capacity

    def open(self, session: SessionOpen) -> None:
        check_open(session, self._sessions, self._capacity)
        self._sessions[session.session] = PrefixHash(self._model)

    def step(self, batch: Sequence[SessionStep]) -> EngineOutput:
        began_s = time.perf_counter()
        sessions: list[int] = []
        next_token_ids: list[int] = []
        errors: dict[int, str] = {}
        more_tokens = 0
        for step in batch:
            prefix = self._sessions.get(step.session)
            if prefix is None:
                errors[step.session] = f"session {step.session} is not open"
                continue
            try:
                check_step(step, len(prefix), self._capacity)
            except ValueError as error:
                errors[step.session] = str(error)
                continue
            prefix.truncate(step.start)
            prefix.extend(step.token_ids)
            more_tokens += len(step.token_ids) - 1
            if step.sample:
                sessions.append(step.session)
                next_token_ids.append(prefix.next_token(self._config.vocab_size, self._config.eos_every))
        step_s = (self._config.step_ms + self._config.prefill_token_ms * more_tokens) / 1000
        _wait_until(began_s + step_s)
        return EngineOutput(sessions, next_token_ids=next_token_ids, errors=errors)

    def free(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            self._sessions.pop(session, None)

    def close(self) -> None:
        self._sessions.clear()


def _wait_until(at_s: float) -> None:
    """Until that moment of `time.perf_counter`, not later: the last of it is spent looking at the clock."""
    if (left_s := at_s - _OVERSLEEP_S - time.perf_counter()) > 0:
        time.sleep(left_s)
    while time.perf_counter() < at_s:
        pass
