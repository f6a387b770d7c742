# SPDX-License-Identifier: Apache-2.0
"""The step contract survives the wire, and tensors that contradict each other are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from python_backends.llm.wire import (
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)

ids = st.integers(0, 2**31 - 1)
token_lists = st.lists(ids, max_size=5)
floats = st.floats(allow_nan=False)
json_objects = st.dictionaries(st.text(), st.none() | ids | floats | st.text() | token_lists, max_size=2)
sampling = st.builds(SamplingParams, temperature=floats, top_k=ids, top_p=floats, seed=st.integers(0, 2**64 - 1))
steps = st.builds(SessionStep, ids, ids, st.lists(ids, min_size=1, max_size=5), st.booleans())
opens = st.builds(SessionOpen, ids, ids, ids, sampling, st.booleans(), json_objects)
requests = st.builds(
    StepRequest,
    st.lists(steps, max_size=3),
    st.lists(opens, max_size=2),
    token_lists,
    st.integers(1, 2**31 - 1),
    ids,
    ids,
    token_lists,
    st.integers(1, 2**31 - 1),
    st.booleans(),
)
sampled = st.lists(st.tuples(ids, st.floats(width=32, allow_nan=False)), max_size=4)
results = st.builds(
    lambda tokens, destination, fields: SessionResult(
        [t for t, _ in tokens], [p for _, p in tokens], destination, fields
    ),
    sampled,
    ids,
    json_objects,
) | st.builds(SessionResult, error=st.text())
stats = st.builds(StepStats, floats, floats, ids, ids, ids)
facts = st.builds(
    LLMFacts, st.text(), st.text(), ids, ids, ids, ids, ids, st.lists(ids, max_size=3).map(tuple), st.booleans()
)
responses = st.builds(StepResponse, st.lists(results, max_size=3), stats, st.none() | facts)


@given(requests)
def test_a_request_comes_through(request: StepRequest) -> None:
    wire = encode_request(request)
    assert wire.dtype == np.int32 and wire.ndim == 1
    assert decode_request(wire) == request


@given(responses)
def test_a_response_comes_through(response: StepResponse) -> None:
    wire = encode_response(response)
    assert wire.dtype == np.int32 and wire.ndim == 1
    assert decode_response(wire) == response


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 2, "header: begins with \\[2\\]; this end speaks version 5"),
        (1, 0, "max_steps: 0; allowed: 1 or more"),
        (2, -1, "max_leaves: -1; allowed: 0 or more"),
        (4, 0, "at_least: 0; allowed: 1 or more"),
        (8, 2, "length: 17 values; the header counts 16"),
        (12, 2, "tokens: there are 3; the sessions count 2"),
        (9, 9, "length: 17 values; the header counts 20"),
        (6, -1, "header: counts \\(1, -1, 0, 3, 0\\); must be 0 or more each"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(place: int, value: int, message: str) -> None:
    wire = encode_request(StepRequest([SessionStep(1, 0, [1, 2, 3])]))
    wire[place] = value
    with pytest.raises(ValueError, match=message):
        decode_request(wire)


def test_a_response_that_contradicts_itself_is_refused() -> None:
    wire = encode_response(StepResponse([SessionResult([1], [0.5])]))
    for place, value, message in (
        (1, 2, "length"),
        (2, -2, "header: counts \\(1, -2, 0\\)"),
        (4, 2, "tokens: there are 1; the results count 2"),
    ):
        wrong = wire.copy()
        wrong[place] = value
        with pytest.raises(ValueError, match=message):
            decode_response(wrong)


def test_a_cut_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        decode_request(encode_request(StepRequest([SessionStep(1, 0, [1, 2, 3])]))[:-1])
    with pytest.raises(ValueError, match="length"):
        decode_response(encode_response(StepResponse([SessionResult([1], [0.5])]))[:-1])
    with pytest.raises(ValueError, match="header"):
        decode_response(np.array([], dtype=np.int32))
