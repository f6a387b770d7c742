# SPDX-License-Identifier: Apache-2.0
"""Every wrong input is refused by name, with its value and what is allowed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from python_backends.token_router.config import LimitsConfig
from python_backends.token_router.errors import InvalidRequest
from python_backends.token_router.intake import Intake, Served
from python_backends.token_router.kv_budget import KvPool
from python_backends.token_router.params import GenerateParams
from python_backends.token_router.public import INPUTS, REFUSED_INPUTS
from python_backends.token_router.tokenizer import Tokenizer
from routers import RouterConfig
from tools.models.vocabulary import write_tokenizer
from tools.tiny_models import make_tiny_tokenizer, tiny_vocabulary

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

    def encode(self, text: str, rendered: bool = False) -> list[int]:
        assert len(text.encode()) <= 200, "it would take long to find out that this is too long"
        return list(text.encode())

    def render_chat(self, messages: Any) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("messages: the chat template refuses them: no system role")
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode()


def _messages(count: int, role: str, content: str) -> str:
    return json.dumps([{"role": role, "content": content}] * count)


def _intake(tokenizer: Any = None, router: str = "rstitch") -> Intake:
    return Intake(tokenizer, RouterConfig(name=router), ["slm", "llm"], LimitsConfig(default_max_tokens=30))


def _sampling_intake() -> Intake:
    router = RouterConfig(name="me", params={"weights": [0.5, 0.5]})
    return Intake(None, router, ["slm", "llm"], LimitsConfig(default_max_tokens=30))


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
        ({"messages": '[{"role": "system", "content": "x"}]'}, "no system role"),
        ({"messages": _messages(1, "user", "x" * 195)}, "messages: 201 bytes can't fit in the context of 100 tokens"),
        ({"messages": _messages(1, "x" * 200, "")}, "messages: 202 bytes can't fit"),
        ({"messages": _messages(60, "user", "")}, "messages: 360 bytes can't fit"),
        ({"messages": _messages(101, "", "")}, "messages: 101 of them can't fit in the context of 100 tokens"),
    ],
)
def test_refused_text(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        _intake(ByteTokenizer()).check(inputs, SERVED)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("inputs", "begins"),
    [
        ({"input_ids": [1], "router_params": {"tau": "x" * 10**5}}, "router_params: router 'rstitch': tau: Input"),
        ({"input_ids": [1], "router_params": {"y" * 10**5: 1}}, "router_params: 'yyy"),
        ({"input_ids": [1], "router_params": json.dumps(["x"] * 10**5)}, "router_params: Input should be a valid dict"),
        ({"input_ids": [1], "z" * 10**5: 1}, "zzz"),
        ({"input_ids": [1], "pad_id": "x" * 10**5}, "pad_id is not supported"),
        ({"messages": json.dumps([{}] * 5000)}, "messages.0.role: Field required"),
    ],
)
def test_what_is_told_of_a_wrong_input_is_short(inputs: dict[str, Any], begins: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        _intake(ByteTokenizer()).check(inputs, SERVED)
    assert str(refusal.value).startswith(begins)
    assert len(str(refusal.value)) < 800


def test_so_is_what_a_chat_template_says(tmp_path: Path) -> None:
    template = "{{ raise_exception('unknown role ' + messages[0]['role']) }}"
    write_tokenizer(replace(tiny_vocabulary(), chat_template=template), tmp_path)
    with pytest.raises(InvalidRequest) as refusal:
        _intake(Tokenizer(tmp_path)).check({"messages": _messages(1, "x" * 10**5, "")}, SERVED)
    assert str(refusal.value).startswith("messages: the chat template refuses them: unknown role xxx")
    assert len(str(refusal.value)) < 200


def test_special_tokens_written_out_are_not_too_long(tmp_path: Path) -> None:
    """They are longer than any piece of text of this vocabulary."""
    make_tiny_tokenizer(tmp_path)
    intake, served = _intake(Tokenizer(tmp_path)), replace(SERVED, vocab_size=1000)
    assert len(intake.check({"text_input": "<|startoftext|>" * 99}, served).prompt_ids) == 99
    assert len(intake.check({"messages": _messages(1, "user", "<|startoftext|>" * 90)}, served).prompt_ids) < 100


def test_an_engine_that_cannot_sample_takes_greedy_requests_only() -> None:
    served = replace(SERVED, greedy_only=("slm",))
    for field, value in (("temperature", 0.5), ("presence_penalty", 1.0), ("repetition_penalty", 1.1)):
        with pytest.raises(InvalidRequest, match="the engine of model 'slm' can't sample"):
            _intake().check({"input_ids": [1], field: value}, served)
    assert _intake().check({"input_ids": [1], "seed": 3}, served).seed == 3
    _intake().check({"input_ids": [1], "temperature": 0.0, "top_p": 0.95}, served)  # greedy all the same


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({}, "temperature: router 'me' must sample; allowed: 1e-05 or more, got 0"),
        ({"temperature": 9e-6}, "temperature: router 'me' must sample; allowed: 1e-05 or more, got 9e-06"),
        ({"temperature": 1, "top_k": 1}, "top_k: router 'me' must sample; allowed: 0 (off), or 2 or more, got 1"),
        ({"temperature": 1, "top_p": 0.02}, "top_p: router 'me' must sample; allowed: above 0.02, got 0.02"),
        ({"temperature": 1, "top_p": 1e-9}, "top_p: router 'me' must sample; allowed: above 0.02, got 1e-09"),
        ({"temperature": 1, "min_p": 1.0}, "min_p: router 'me' must sample; allowed: below 1, got 1"),
    ],
)
def test_a_router_that_must_sample_takes_nothing_that_always_leaves_one_token(
    sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        _sampling_intake().check({"input_ids": [1], **sampling}, SERVED)
    assert str(refusal.value) == message
    _intake().check({"input_ids": [1], **sampling}, SERVED)  # any other router takes it


@pytest.mark.parametrize("sampling", [{}, {"top_k": 2}, {"top_p": 0.021}, {"min_p": 0.99}, {"presence_penalty": 1.0}])
def test_a_router_that_must_sample_takes_what_leaves_a_choice(sampling: dict[str, Any]) -> None:
    _sampling_intake().check({"input_ids": [1], "temperature": 1e-5, **sampling}, SERVED)


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
