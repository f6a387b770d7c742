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
    REQUEST_TENSORS,
    RESPONSE_TENSORS,
    Tensors,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)

NUMPY_TYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_FP64": np.float64, "TYPE_STRING": np.object_}

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


def check_tensors(tensors: Tensors, declared: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    assert set(tensors) == set(declared)
    for name, (data_type, dims) in declared.items():
        assert tensors[name].dtype == NUMPY_TYPES[data_type]
        assert len(tensors[name].shape) == len(dims)
        assert all(d in (-1, actual) for d, actual in zip(dims, tensors[name].shape, strict=True))


@given(requests)
def test_a_request_comes_through(request: StepRequest) -> None:
    tensors = encode_request(request)
    check_tensors(tensors, REQUEST_TENSORS)
    assert decode_request(tensors) == request


@given(responses)
def test_a_response_comes_through(response: StepResponse) -> None:
    tensors = encode_response(response)
    check_tensors(tensors, RESPONSE_TENSORS)
    assert decode_response(tensors) == response


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("call", [], "call: must begin with max_steps"),
        ("call", [0], "got \\[0\\]"),
        ("token_ids", [1, 2], "has 2 tokens, `sessions` counts 3"),
        ("token_ids", [1, 2, 3, 4], "has 4 tokens, `sessions` counts 3"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(name: str, value: list[int], message: str) -> None:
    tensors = encode_request(StepRequest([SessionStep(1, 0, [1, 2, 3])]))
    tensors[name] = np.array(value, dtype=np.int32)
    with pytest.raises(ValueError, match=message):
        decode_request(tensors)
