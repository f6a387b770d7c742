# SPDX-License-Identifier: Apache-2.0
"""Wrong requests on a real server: a clear error each, nothing left, the next one served."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import grpc
import pytest

from tests.triton.servers import assert_clean_and_serving
from tools.client import Answer, GenerationError, TokenRouterClient
from tools.supervisor import RunningServer

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"text": ""}, "text_input: is empty"),
        ({"text": "word " * 600}, "leave no room for an answer; the context holds 512 tokens"),
        ({"text": "x", "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1, got 0"),
        ({"text": "x", "max_tokens": -1}, "max_tokens: Input should be greater than or equal to 1, got -1"),
        ({"text": "x", "max_tokens": 5000}, "allowed: 1 to "),
        ({"text": "x", "temperature": -1.0}, "temperature: Input should be greater than or equal to 0, got -1.0"),
        ({"text": "x", "top_p": 7.0}, "top_p: Input should be less than or equal to 1, got 7.0"),
        ({"text": "x", "top_k": -3}, "top_k"),
        ({"text": "x", "bad_words": ["y"]}, "bad_words is not supported"),
        ({"text": "x", "stop_words": ["y", ""]}, "stop_words"),
        ({"input_ids": [1, 2, 99999]}, "input_ids[2]: 99999 is not in the vocabulary; allowed: 0 to "),
        ({"input_ids": [-4]}, "input_ids[0]: -4 is not in the vocabulary"),
        ({"text": b"caf\xe9"}, "text_input: must be valid UTF-8"),
        ({"text": "x", "router_params": {"sigma": 1}}, "'sigma' can't be set by a request to router 'rstitch'"),
        ({"text": "x", "router_params": {"tau": 3}}, "tau: Input should be less than or equal to 1, got 3"),
        ({"text": "x", "router_params": "not json"}, "router_params: Value error, must be JSON"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        ({"messages": []}, "messages"),
        ({"text": "x", "input_ids": [1]}, "got text_input and input_ids"),
        ({}, "exactly one of text_input, messages and input_ids"),
    ],
)  # fmt: skip
def test_refused(tiny_server: RunningServer, request_: dict[str, Any], message: str) -> None:
    with TokenRouterClient(tiny_server.grpc_url) as client, pytest.raises(GenerationError) as refusal:
        Answer.of(client.generate(timeout_s=20, **request_))
    assert refusal.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert message in refusal.value.message
    assert_clean_and_serving(tiny_server)


def test_a_prompt_of_100_mb(tiny_server: RunningServer) -> None:
    with TokenRouterClient(tiny_server.grpc_url) as client, pytest.raises(GenerationError) as refusal:
        Answer.of(client.generate(text="x" * 100_000_000, timeout_s=60))
    assert refusal.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert "100000000 bytes can't fit in the context of 512 tokens" in refusal.value.message
    assert_clean_and_serving(tiny_server)


def test_over_http_an_error_has_a_status_and_a_message(tiny_server: RunningServer) -> None:
    body = json.dumps({"text_input": "x", "max_tokens": -1, "stream": True}).encode()
    url = f"http://{tiny_server.http_url}/v2/models/token_router/generate_stream"
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(urllib.request.Request(url, body), timeout=20)
    with refusal.value as answer:
        assert answer.code == 400
        assert "max_tokens" in json.loads(answer.read().removeprefix(b"data: "))["error"]


def test_what_an_engine_cannot_do_is_refused(paced_server: RunningServer) -> None:
    for request, message in (
        ({"temperature": 0.7}, "the engine of model 'slm' can't sample"),
        ({"stop_words": ["x"]}, "no tokenizer"),
    ):
        with TokenRouterClient(paced_server.grpc_url) as client, pytest.raises(GenerationError, match=message):
            Answer.of(client.generate(input_ids=[1], timeout_s=20, **request))
    assert_clean_and_serving(paced_server)
