# SPDX-License-Identifier: Apache-2.0
"""The public model's tensors: the names of TensorRT-LLM's `tensorrt_llm_bls`, so that NVIDIA's OpenAI
front end and its load generators work unchanged, and our own beside them.

The model has max_batch_size 1: a tensor of dims [d] travels as [1, d], as those clients send it.
`tokenrouter prepare` renders config.pbtxt from these tables.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["INPUTS", "OUTPUTS", "REFUSED_INPUTS", "Refused", "Tensor"]


class Tensor(NamedTuple):
    """data_type and dims as in config.pbtxt; every input is optional."""

    data_type: str
    dims: tuple[int, ...]
    meaning: str


class Refused(NamedTuple):
    """An input that can't be honoured: why, and the values that ask for nothing."""

    data_type: str
    dims: tuple[int, ...]
    reason: str
    neutral: tuple[str | bool | float, ...]


_NO_LOGITS = "is not supported: logits stay in the LLM's process"
_FIXED_LENGTH = "is not supported; ignore_eos with max_tokens gives a fixed length"

INPUTS: dict[str, Tensor] = {
    "text_input": Tensor("TYPE_STRING", (1,), "the prompt as text, UTF-8; one of text_input, messages, input_ids"),
    "messages": Tensor(
        "TYPE_STRING", (1,), "the conversation as JSON, [{role, content}, ...]; the chat template is applied"
    ),
    "input_ids": Tensor("TYPE_INT32", (-1,), "the prompt as token ids"),
    "max_tokens": Tensor("TYPE_INT32", (1,), "most tokens of the answer"),
    "stream": Tensor("TYPE_BOOL", (1,), "true: a response for each token or few; false (default): one response"),
    "stop_words": Tensor("TYPE_STRING", (-1,), "strings that end the answer; they are not part of it"),
    "temperature": Tensor("TYPE_FP32", (1,), "0 (default) = greedy"),
    "top_k": Tensor("TYPE_INT32", (1,), "0 (default) = off"),
    "top_p": Tensor("TYPE_FP32", (1,), "1 (default) = off"),
    "min_p": Tensor("TYPE_FP32", (1,), "0 (default) = off"),
    "repetition_penalty": Tensor("TYPE_FP32", (1,), "1 (default) = off; over prompt and answer"),
    "presence_penalty": Tensor("TYPE_FP32", (1,), "0 (default) = off; over the answer"),
    "frequency_penalty": Tensor("TYPE_FP32", (1,), "0 (default) = off; over the answer"),
    "seed": Tensor("TYPE_UINT64", (1,), "of sampling and of the router's draws; default: a new one for each request"),
    "ignore_eos": Tensor("TYPE_BOOL", (1,), "true: the end-of-sequence token doesn't end the answer"),
    "exclude_input_in_output": Tensor("TYPE_BOOL", (1,), "true (default); false: the prompt's text comes first"),
    "return_log_probs": Tensor("TYPE_BOOL", (1,), "true: output_log_probs is filled"),
    "return_num_input_tokens": Tensor("TYPE_BOOL", (1,), "accepted for compatibility: the counts always come"),
    "return_num_output_tokens": Tensor("TYPE_BOOL", (1,), "accepted for compatibility: the counts always come"),
    "router_params": Tensor("TYPE_STRING", (1,), "JSON: the router's parameters that this request overrides"),
}

# Declared because clients of the TensorRT-LLM templates may send them. A value that asks for nothing is let
# through; any other is refused by name, with the reason.
REFUSED_INPUTS: dict[str, Refused] = {
    "bad_words": Refused("TYPE_STRING", (-1,), "is not supported", ("",)),
    "end_id": Refused("TYPE_INT32", (1,), "is not supported: the models' own end-of-sequence tokens are used", ()),
    "pad_id": Refused("TYPE_INT32", (1,), "is not supported: nothing is padded", ()),
    "min_tokens": Refused("TYPE_INT32", (1,), _FIXED_LENGTH, (0, 1)),
    "min_length": Refused("TYPE_INT32", (1,), _FIXED_LENGTH, (0, 1)),
    "length_penalty": Refused("TYPE_FP32", (1,), "is not supported: it belongs to beam search", (0.0, 1.0)),
    "beam_width": Refused("TYPE_INT32", (1,), "is not supported: routed decoding has one beam", (1,)),
    "num_return_sequences": Refused("TYPE_INT32", (1,), "is not supported: send one request for each", (1,)),
    "return_context_logits": Refused("TYPE_BOOL", (1,), _NO_LOGITS, (False,)),
    "return_generation_logits": Refused("TYPE_BOOL", (1,), _NO_LOGITS, (False,)),
    "return_perf_metrics": Refused("TYPE_BOOL", (1,), "is not supported", (False,)),
    "guided_decoding_guide": Refused("TYPE_STRING", (1,), "is not supported", ("",)),
    "guided_decoding_guide_type": Refused("TYPE_STRING", (1,), "is not supported", ("",)),
    "lora_task_id": Refused("TYPE_UINT64", (1,), "is not supported", (0,)),
}

OUTPUTS: dict[str, Tensor] = {
    "text_output": Tensor("TYPE_STRING", (1,), "the new text; with stream=false the whole"),
    "output_ids": Tensor("TYPE_INT32", (-1,), "the new token ids"),
    "output_models": Tensor(
        "TYPE_STRING", (-1,), "for each of them the model that made it; while streaming, one model a response"
    ),
    "output_log_probs": Tensor(
        "TYPE_FP32", (-1,), "for each of them, when asked for: its log-probability under that model"
    ),
    "num_input_tokens": Tensor("TYPE_INT32", (1,), "the prompt's tokens"),
    "num_output_tokens": Tensor("TYPE_INT32", (1,), "the new tokens in this response"),
    "finish_reason": Tensor("TYPE_STRING", (1,), "in the last response: stop or length; before it empty"),
    "usage": Tensor(
        "TYPE_STRING",
        (1,),
        "in the last response, JSON: prompt_tokens, completion_tokens, completion_tokens_by_model, handoffs",
    ),
}
