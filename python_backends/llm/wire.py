# SPDX-License-Identifier: Apache-2.0
"""The step contract on the wire: one INT32 tensor for a `StepRequest`, one for a `StepResponse`.

A BLS call pays for every tensor more than for all that a step has to say (docs/decisions/0009); so a message is
one vector: a header of counts, then the parts in order.

| request | INT32 values |
|---|---|
| header | version, max_steps, max_leaves, number, at_least; counts: sessions n, follows, frees, tokens, control bytes |
| sessions | n times: session, start, number of tokens, sample (0 or 1) |
| follows | the sessions of the call before that are in this one if they stay |
| free | the sessions to free |
| tokens | the suffixes, one after another |
| control | JSON, UTF-8, padded to 4 bytes: `opens`, `hello`; nothing = neither |

| response | INT32 values |
|---|---|
| header | version, results n, tokens, bytes of notes |
| results | n times: number of tokens, destination |
| tokens | one session's after another's |
| log-probabilities | of each token, FP32 bits |
| stats | the five fields of StepStats, FP64 bits |
| notes | JSON, UTF-8, padded to 4 bytes: `errors`, `fields` by row, `facts`; nothing = none |
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from python_backends.llm.contract import (
    LLMFacts,
    SamplingParams,
    SessionOpen,
    SessionResult,
    SessionStep,
    StepRequest,
    StepResponse,
    StepStats,
)

__all__ = [
    "REQUEST_TENSOR",
    "RESPONSE_TENSOR",
    "WIRE_TYPE",
    "Wire",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
]

Wire: TypeAlias = NDArray[np.int32]

REQUEST_TENSOR = "request"
RESPONSE_TENSOR = "response"
WIRE_TYPE = ("TYPE_INT32", (-1,))  # of both, as config.pbtxt declares them

_VERSION = 5
_REQUEST_HEADER = 10
_RESPONSE_HEADER = 4
_STATS = "5d"
_STATS_INTS = 10


def encode_request(request: StepRequest) -> Wire:
    """A StepRequest as the LLM model's input tensor."""
    control: dict[str, Any] = {}
    if request.opens:
        # vars, not asdict: it needn't copy, and this is in the way of a first token
        control["opens"] = [{**vars(o), "sampling": vars(o.sampling)} for o in request.opens]
    if request.hello:
        control["hello"] = True
    text = _text(control)
    tokens = [t for s in request.steps for t in s.token_ids]
    numbers = [_VERSION, request.max_steps, request.max_leaves, request.number, request.at_least]
    numbers += (len(request.steps), len(request.follows), len(request.free), len(tokens), len(text))
    for s in request.steps:
        numbers += (s.session, s.start, len(s.token_ids), s.sample)
    numbers += request.follows
    numbers += request.free
    numbers += tokens
    return _packed(f"{len(numbers)}i", numbers, text)


def decode_request(wire: Wire) -> StepRequest:
    """The inverse of `encode_request`. Raises ValueError when the vector contradicts itself."""
    values = wire.tolist()
    max_steps, max_leaves, number, at_least, n, follows, frees, tokens, text = _header(values, _REQUEST_HEADER)
    if max_steps < 1:
        raise ValueError(f"max_steps: {max_steps}; allowed: 1 or more")
    if max_leaves < 0:
        raise ValueError(f"max_leaves: {max_leaves}; allowed: 0 or more")
    if at_least < 1:
        raise ValueError(f"at_least: {at_least}; allowed: 1 or more")
    at_follows = _REQUEST_HEADER + 4 * n
    at_free = at_follows + follows
    at_tokens = at_free + frees
    at_text = at_tokens + tokens
    _check_length(values, at_text, n, follows, frees, tokens, text)
    steps, at = [], at_tokens
    for row in range(_REQUEST_HEADER, at_follows, 4):
        session, start, count, sample = values[row : row + 4]
        steps.append(SessionStep(session, start, values[at : at + count], bool(sample)))
        at += count
    if at != at_text:
        raise ValueError(f"tokens: there are {tokens}; the sessions count {at - at_tokens}")
    control = _json(wire, at_text, text)
    opens = [SessionOpen(**{**o, "sampling": SamplingParams(**o["sampling"])}) for o in control.get("opens", ())]
    return StepRequest(
        steps,
        opens,
        values[at_free:at_tokens],
        max_steps,
        max_leaves,
        number,
        values[at_follows:at_free],
        at_least,
        control.get("hello", False),
    )


def encode_response(response: StepResponse) -> Wire:
    """A StepResponse as the LLM model's output tensor."""
    results = response.results
    notes: dict[str, Any] = {}
    if errors := {i: r.error for i, r in enumerate(results) if r.error is not None}:
        notes["errors"] = errors
    if fields := {i: r.fields for i, r in enumerate(results) if r.fields}:
        notes["fields"] = fields
    if response.facts is not None:
        notes["facts"] = asdict(response.facts)
    text = _text(notes)
    tokens = [t for r in results for t in r.token_ids]
    numbers: list[float] = [_VERSION, len(results), len(tokens), len(text)]
    for r in results:
        numbers += (len(r.token_ids), r.destination)
    numbers += tokens
    layout = f"{len(numbers)}i{len(tokens)}f{_STATS}"
    numbers += [p for r in results for p in r.logprobs]
    numbers += vars(response.stats).values()
    return _packed(layout, numbers, text)


def decode_response(wire: Wire) -> StepResponse:
    """The inverse of `encode_response`. Raises ValueError when the vector contradicts itself."""
    values = wire.tolist()
    n, tokens, text = _header(values, _RESPONSE_HEADER)
    at_tokens = _RESPONSE_HEADER + 2 * n
    at_logprobs = at_tokens + tokens
    at_stats = at_logprobs + tokens
    at_text = at_stats + _STATS_INTS
    _check_length(values, at_text, n, tokens, text)
    floats = struct.unpack_from(f"={tokens}f{_STATS}", wire.data, 4 * at_logprobs)
    logprobs, (compute_ms, engine_ms, *counts) = list(floats[:tokens]), floats[tokens:]
    notes = _json(wire, at_text, text)
    errors, fields, facts = notes.get("errors", {}), notes.get("fields", {}), notes.get("facts")
    results, at = [], 0
    for i in range(n):
        count, destination = values[_RESPONSE_HEADER + 2 * i : _RESPONSE_HEADER + 2 * i + 2]
        row = str(i)  # JSON's keys are strings
        results.append(
            SessionResult(
                token_ids=values[at_tokens + at : at_tokens + at + count],
                logprobs=logprobs[at : at + count],
                destination=destination,
                fields=fields.get(row, {}),
                error=errors.get(row),
            )
        )
        at += count
    if at != tokens:
        raise ValueError(f"tokens: there are {tokens}; the results count {at}")
    stats = StepStats(compute_ms, engine_ms, *map(int, counts))
    if facts is not None:
        facts = LLMFacts(**{**facts, "eos_token_ids": tuple(facts["eos_token_ids"])})
    return StepResponse(results, stats, facts)


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() if value else b""


def _packed(layout: str, numbers: Sequence[float], text: bytes) -> Wire:
    """The vector of these numbers, in the layout of `struct`, and the text, padded. In one go: a numpy array for each
    part would take longer than all the rest."""
    padded = (len(text) + 3) // 4 * 4
    return np.frombuffer(bytearray(struct.pack(f"={layout}{padded}s", *numbers, text)), dtype=np.int32)


def _json(wire: Wire, at: int, size: int) -> dict[str, Any]:
    """The object whose text of `size` bytes begins at value `at`; empty = there is no text."""
    value: dict[str, Any] = json.loads(wire[at:].tobytes()[:size]) if size else {}
    return value


def _header(values: list[int], size: int) -> list[int]:
    """The header's counts, the version apart."""
    if len(values) < size or values[0] != _VERSION:
        raise ValueError(f"header: begins with {values[:1]}; this end speaks version {_VERSION} of the step contract")
    return values[1:size]


def _check_length(values: list[int], at_text: int, *counts: int) -> None:
    """counts: of the header, the last one that of the text, which begins at `at_text`."""
    if min(counts) < 0:
        raise ValueError(f"header: counts {counts}; must be 0 or more each")
    expected = at_text + (counts[-1] + 3) // 4
    if len(values) != expected:
        raise ValueError(f"length: {len(values)} values; the header counts {expected}")
