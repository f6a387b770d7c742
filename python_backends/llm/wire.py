# SPDX-License-Identifier: Apache-2.0
"""The step contract as Triton tensors: numpy arrays by tensor name, both directions, both ends.

Numbers travel as numbers, a few small tensors for each call (every tensor costs some 20 µs); what is
rare (opening a session, an error, fields for `send`, the facts) travels as one JSON string.

| tensor | type | what |
|---|---|---|
| in `sessions` | INT32 [n, 4] | session, start, number of tokens, sample (0 or 1) |
| in `token_ids` | INT32 [t] | the suffixes, one after another |
| in `call` | INT32 [1 + k] | max_steps, then the k sessions to free |
| in `control` | STRING [1] | JSON: `opens`, `hello`; "" = neither |
| out `results` | INT32 [n, 2] | number of tokens, destination |
| out `token_ids` | INT32 [t] | the sampled tokens, one session after another |
| out `logprobs` | FP32 [t] | of each |
| out `stats` | FP64 [5] | the fields of StepStats, in order |
| out `notes` | STRING [1] | JSON: `errors`, `fields` by row, `facts`; "" = none |
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple
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
    "REQUEST_TENSORS",
    "RESPONSE_TENSORS",
    "Tensors",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
]

Tensors: TypeAlias = dict[str, NDArray[Any]]

# name -> (Triton data type, dims), as config.pbtxt declares them
REQUEST_TENSORS = {
    "sessions": ("TYPE_INT32", (-1, 4)),
    "token_ids": ("TYPE_INT32", (-1,)),
    "call": ("TYPE_INT32", (-1,)),
    "control": ("TYPE_STRING", (1,)),
}
RESPONSE_TENSORS = {
    "results": ("TYPE_INT32", (-1, 2)),
    "token_ids": ("TYPE_INT32", (-1,)),
    "logprobs": ("TYPE_FP32", (-1,)),
    "stats": ("TYPE_FP64", (5,)),
    "notes": ("TYPE_STRING", (1,)),
}


def _text(value: dict[str, Any]) -> NDArray[Any]:
    return np.array([json.dumps(value).encode() if value else b""], dtype=np.object_)


def _json(tensor: NDArray[Any]) -> dict[str, Any]:
    raw = tensor.reshape(-1)[0]
    value: dict[str, Any] = json.loads(raw) if raw else {}
    return value


def encode_request(request: StepRequest) -> Tensors:
    """A StepRequest as the LLM model's input tensors."""
    control: dict[str, Any] = {}
    if request.opens:
        control["opens"] = [asdict(o) for o in request.opens]
    if request.hello:
        control["hello"] = True
    rows = [(s.session, s.start, len(s.token_ids), s.sample) for s in request.steps]
    return {
        "sessions": np.array(rows, dtype=np.int32).reshape(-1, 4),
        "token_ids": np.array([t for s in request.steps for t in s.token_ids], dtype=np.int32),
        "call": np.array([request.max_steps, *request.free], dtype=np.int32),
        "control": _text(control),
    }


def decode_request(tensors: Tensors) -> StepRequest:
    """The inverse of `encode_request`. Raises ValueError when the tensors contradict each other."""
    rows = tensors["sessions"].tolist()
    tokens = tensors["token_ids"].tolist()
    call = tensors["call"].tolist()
    control = _json(tensors["control"])
    if not call or call[0] < 1:
        raise ValueError(f"call: must begin with max_steps, 1 or more; got {call[:1]}")
    steps, at = [], 0
    for session, start, count, sample in rows:
        steps.append(SessionStep(session, start, tokens[at : at + count], bool(sample)))
        at += count
    if at != len(tokens):
        raise ValueError(f"token_ids: has {len(tokens)} tokens, `sessions` counts {at}")
    opens = [SessionOpen(**{**o, "sampling": SamplingParams(**o["sampling"])}) for o in control.get("opens", ())]
    return StepRequest(steps, opens, free=call[1:], max_steps=call[0], hello=control.get("hello", False))


def encode_response(response: StepResponse) -> Tensors:
    """A StepResponse as the LLM model's output tensors."""
    results = response.results
    notes: dict[str, Any] = {}
    if errors := {i: r.error for i, r in enumerate(results) if r.error is not None}:
        notes["errors"] = errors
    if fields := {i: r.fields for i, r in enumerate(results) if r.fields}:
        notes["fields"] = fields
    if response.facts is not None:
        notes["facts"] = asdict(response.facts)
    return {
        "results": np.array([(len(r.token_ids), r.destination) for r in results], dtype=np.int32).reshape(-1, 2),
        "token_ids": np.array([t for r in results for t in r.token_ids], dtype=np.int32),
        "logprobs": np.array([p for r in results for p in r.logprobs], dtype=np.float32),
        "stats": np.array(astuple(response.stats), dtype=np.float64),
        "notes": _text(notes),
    }


def decode_response(tensors: Tensors) -> StepResponse:
    """The inverse of `encode_response`."""
    tokens = tensors["token_ids"].tolist()
    logprobs = tensors["logprobs"].tolist()
    notes = _json(tensors["notes"])
    errors, fields = notes.get("errors", {}), notes.get("fields", {})
    results, at = [], 0
    for i, (count, destination) in enumerate(tensors["results"].tolist()):
        row = str(i)  # JSON's keys are strings
        results.append(
            SessionResult(
                token_ids=tokens[at : at + count],
                logprobs=logprobs[at : at + count],
                destination=destination,
                fields=fields.get(row, {}),
                error=errors.get(row),
            )
        )
        at += count
    compute_ms, engine_ms, steps, sessions, kv_tokens = tensors["stats"].tolist()
    stats = StepStats(compute_ms, engine_ms, int(steps), int(sessions), int(kv_tokens))
    facts = notes.get("facts")
    if facts is not None:
        facts = LLMFacts(**{**facts, "eos_token_ids": tuple(facts["eos_token_ids"])})
    return StepResponse(results, stats, facts)
