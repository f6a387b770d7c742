# SPDX-License-Identifier: Apache-2.0
"""Every wrong input is refused by name, with its value and what is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from python_backends.token_router.config import LimitsConfig
from python_backends.token_router.errors import InvalidRequest
from python_backends.token_router.intake import Intake, Served
from python_backends.token_router.kv_budget import KvPool
from python_backends.token_router.params import GenerateParams
from python_backends.token_router.public import INPUTS, REFUSED_INPUTS
from routers import RouterConfig

SERVED = Served(
    context_tokens=100,
    vocab_size=50,
    max_sessions=4,
    eos_token_ids=frozenset({0}),
    greedy_only=(),
    pools=(KvPool("slm", 400, 1), KvPool("llm", 400, 1)),
)


class ByteTokenizer:
    """Every byte is a token; enough of a Tokenizer for the intake."""

    pieces = tuple(bytes([i]) for i in range(256))
    longest_piece = 2

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Any) -> list[int]:
        raise ValueError("messages: the chat template refuses them: no system role")

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode()


def _intake(tokenizer: Any = None, router: str = "rstitch") -> Intake:
    return Intake(tokenizer, RouterConfig(name=router), ["slm", "llm"], LimitsConfig(default_max_tokens=30))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "exactly one of text_input, messages and input_ids must be given; got none"),
        ({"input_ids": [1], "text_input": "x"}, "got text_input and input_ids"),
        ({"input_ids": []}, "input_ids: is empty"),
        ({"input_ids": [1, 50]}, "input_ids[1]: 50 is not in the vocabulary; allowed: 0 to 49"),
        ({"input_ids": [-1]}, "input_ids[0]: -1 is not in the vocabulary"),
        ({"input_ids": [1] * 100}, "prompt: 100 tokens leave no room"),
        ({"input_ids": [1], "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1, got 0"),
        ({"input_ids": [1], "max_tokens": -5}, "got -5"),
        ({"input_ids": [1], "max_tokens": 100}, "allowed: 1 to 99"),
        ({"input_ids": [1], "temperature": -0.5}, "temperature: Input should be greater than or equal to 0"),
        ({"input_ids": [1], "temperature": float("nan")}, "temperature"),
        ({"input_ids": [1], "top_p": 0.0}, "top_p: Input should be greater than 0"),
        ({"input_ids": [1], "top_p": 1.5}, "top_p: Input should be less than or equal to 1"),
        ({"input_ids": [1], "top_k": -1}, "top_k"),
        ({"input_ids": [1], "min_p": 2.0}, "min_p"),
        ({"input_ids": [1], "repetition_penalty": 0.0}, "repetition_penalty"),
        ({"input_ids": [1], "presence_penalty": 3.0}, "presence_penalty"),
        ({"input_ids": [1], "frequency_penalty": -3.0}, "frequency_penalty"),
        ({"input_ids": [1], "unknown": 1}, "unknown"),
        ({"input_ids": [1], "bad_words": ["x"]}, "bad_words is not supported"),
        ({"input_ids": [1], "beam_width": 4}, "beam_width is not supported"),
        ({"input_ids": [1], "stop_words": ["x"]}, "stop_words: this deployment has no tokenizer"),
        ({"input_ids": [1], "stop_words": ["x", ""]}, "empty string"),
        ({"input_ids": [1], "router_params": "[" * 100_000}, "router_params: Value error, must be JSON"),
        ({"input_ids": [1], "repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"input_ids": [1], "stop_words": ["x"] * 17}, "stop_words"),
        ({"input_ids": [1], "router_params": "{"}, "router_params: Value error, must be JSON"),
        ({"input_ids": [1], "router_params": "[]"}, "router_params"),
        ({"input_ids": [1], "router_params": '{"tau": 2}'}, "tau: Input should be less than or equal to 1, got 2"),
        ({"input_ids": [1], "router_params": '{"nope": 2}'}, "router_params: 'nope' can't be set by a request"),
        ({"input_ids": [1], "exclude_input_in_output": False}, "exclude_input_in_output: false needs a tokenizer"),
        ({"text_input": "x"}, "text_input: this deployment has no tokenizer; send input_ids"),
        ({"messages": '[{"role": "user", "content": "x"}]'}, "messages: this deployment has no tokenizer"),
    ],
)  # fmt: skip
def test_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        _intake().check(inputs, SERVED)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": ""}, "text_input: is empty"),
        ({"text_input": "x" * 201}, "201 bytes can't fit in the context of 100 tokens; allowed: at most 200 bytes"),
        ({"text_input": "x" * 100}, "prompt: 100 tokens"),
        ({"messages": "[]"}, "messages"),
        ({"messages": '[{"role": "user"}]'}, "messages.0.content: Field required"),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "messages: Value error, must be JSON"),
        ({"messages": '[{"role": "user", "content": "x"}]'}, "no system role"),
    ],
)
def test_refused_text(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        _intake(ByteTokenizer()).check(inputs, SERVED)
    assert message in str(refusal.value)


def test_an_engine_that_cannot_sample_takes_greedy_requests_only() -> None:
    served = replace(SERVED, greedy_only=("slm",))
    for field, value in (("temperature", 0.5), ("presence_penalty", 1.0), ("top_k", 5)):
        with pytest.raises(InvalidRequest, match="the engine of model 'slm' can't sample"):
            _intake().check({"input_ids": [1], field: value}, served)
    assert _intake().check({"input_ids": [1], "seed": 3}, served).seed == 3


def test_a_request_that_could_never_fit_in_the_kv_is_refused() -> None:
    """By the model that holds least: whole blocks of it, fewer than the context has."""
    served = replace(SERVED, pools=(KvPool("slm", 400, 1), KvPool("llm", 70, 16)))
    with pytest.raises(InvalidRequest) as refusal:
        _intake().check({"input_ids": [1] * 40, "max_tokens": 25}, served)
    assert str(refusal.value) == (
        "max_tokens: 25 with a prompt of 40 tokens is more than the KV of model 'llm' of 64; allowed: 1 to 24"
    )
    with pytest.raises(InvalidRequest, match="no room for an answer; the KV of model 'llm' holds 64 tokens"):
        _intake().check({"input_ids": [1] * 64}, served)
    assert _intake().check({"input_ids": [1] * 40, "max_tokens": 24}, served).limit == 64
    assert _intake().check({"input_ids": [1] * 40}, served).max_tokens == 24  # what the KV has left


def test_defaults() -> None:
    submission = _intake().check({"input_ids": [1, 2]}, SERVED)
    assert submission.max_tokens == 30  # LimitsConfig.default_max_tokens
    assert _intake().check({"input_ids": [1] * 90}, SERVED).max_tokens == 10  # what the context has left
    assert submission.eos_token_ids == {0}
    assert _intake().check({"input_ids": [1], "ignore_eos": True}, SERVED).eos_token_ids == frozenset()
    seeds = {_intake().check({"input_ids": [1]}, SERVED).seed for _ in range(5)}
    assert len(seeds) == 5


def test_the_declared_inputs_are_those_that_are_parsed() -> None:
    assert set(INPUTS) == set(GenerateParams.model_fields)
    assert not set(INPUTS) & set(REFUSED_INPUTS)


def test_values_that_ask_for_nothing_are_let_through() -> None:
    """NVIDIA's clients of the TensorRT-LLM templates send these with every request."""
    neutral = {
        "beam_width": 1, "num_return_sequences": 1, "bad_words": [""], "stop_words": [""], "min_length": 1,
        "return_context_logits": False, "return_generation_logits": False, "length_penalty": 1.0,
    }  # fmt: skip
    assert _intake().check({"input_ids": [1], **neutral}, SERVED).params.stop_words == []
    for name, refused in REFUSED_INPUTS.items():
        for value in refused.neutral:
            _intake().check({"input_ids": [1], name: [value] if refused.dims == (-1,) else value}, SERVED)
