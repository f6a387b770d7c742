# SPDX-License-Identifier: Apache-2.0
"""The rendered stock model against a record of the backend's own template: none missing, none of another shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from python_backends.llm.engines.stock_parameters import FIELDS, PARAMETERS
from tools.deployment import Deployment
from tools.repository import configs

RECORD = json.loads((Path(__file__).parent / "stock_tensors.json").read_text())
# the placeholders for data types of the template
LOGITS = {"fp32": "TYPE_FP32", "fp16": "TYPE_FP16"}
TYPES = {"encoder_input_features_data_type": "TYPE_FP16", "prompt_embedding_table_data_type": "TYPE_FP16"}
FACTS = {"vocab_size": 100, "context_tokens": 64, "eos_token_ids": [0]}


def rendered(**engine: Any) -> Any:
    """The stock model of a deployment, as Triton's own message."""
    engine = {"type": "tensorrtllm", "engine_dir": "/engines/slm", **FACTS} | engine
    deployment = Deployment.model_validate(
        {"models": [{"name": "slm", "engine": engine}], "router": {"name": "single"}}
    )
    return text_format.Parse(configs(deployment)["slm"], model_config_pb2.ModelConfig())


def data_type(tensor: Any) -> str:
    return str(model_config_pb2.DataType.Name(tensor.data_type))


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


@pytest.mark.parametrize("logits", list(LOGITS))
def test_the_tensors_are_those_of_the_template(logits: str) -> None:
    config, types = rendered(logits_dtype=logits), TYPES | {"logits_datatype": LOGITS[logits]}
    inputs = [
        {
            "name": t.name,
            "data_type": data_type(t),
            "dims": list(t.dims),
            "reshape": list(t.reshape.shape) if t.HasField("reshape") else None,
            "optional": t.optional,
            "allow_ragged_batch": t.allow_ragged_batch,
        }
        for t in config.input
    ]
    outputs = [{"name": t.name, "data_type": data_type(t), "dims": list(t.dims)} for t in config.output]
    for ours, theirs in ((inputs, RECORD["input"]), (outputs, RECORD["output"])):
        assert ours == [t | {"data_type": types.get(t["data_type"], t["data_type"])} for t in theirs]


def test_the_head_of_the_file() -> None:
    config = rendered(max_sessions=24, max_queue_delay_microseconds=7, max_queue_size=9)
    assert (config.name, config.backend, config.max_batch_size) == ("slm", "tensorrtllm", 24)
    assert not config.model_transaction_policy.decoupled
    batching = config.dynamic_batching
    assert list(batching.preferred_batch_size) == [24]
    assert (batching.max_queue_delay_microseconds, batching.default_queue_policy.max_queue_size) == (7, 9)
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)


def test_every_parameter_of_the_template_can_be_set() -> None:
    assert {*FIELDS, *PARAMETERS} == set(RECORD["parameters"])
    fields = {
        "max_tokens": 4096, "kv_cache_free_gpu_mem_fraction": 0.25, "kv_cache_host_memory_bytes": 1 << 30,
        "batch_scheduler_policy": "max_utilization", "cancellation_check_period_ms": 2, "gpu_device_ids": [2, 3],
        "engine_dir": "/engines/x",
    }  # fmt: skip
    others = {name: f"value of {name}" for name in PARAMETERS}
    set_ = parameters(rendered(**fields, parameters=others))
    expected = {
        "max_tokens_in_paged_kv_cache": "4096", "kv_cache_free_gpu_mem_fraction": "0.25",
        "kv_cache_host_memory_bytes": "1073741824", "batch_scheduler_policy": "max_utilization",
        "cancellation_check_period_ms": "2", "gpu_device_ids": "2,3", "gpt_model_path": "/engines/x",
    }  # fmt: skip
    assert set_ == expected | others


def test_what_is_set_unless_the_deployment_says_otherwise() -> None:
    set_ = parameters(rendered())
    assert set_["enable_kv_cache_reuse"] == set_["enable_chunked_context"] == set_["exclude_input_in_output"] == "true"
    assert (set_["gpt_model_type"], set_["batch_scheduler_policy"]) == (
        "inflight_fused_batching",
        "guaranteed_no_evict",
    )
    assert int(set_["cancellation_check_period_ms"]) <= 5
    # the backend doesn't load a model that lacks one of these (getGuidedDecodingConfigFromParams)
    assert {"tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"} <= set(set_)
    assert "max_tokens_in_paged_kv_cache" not in set_ and "gpu_device_ids" not in set_
    assert parameters(rendered(parameters={"enable_kv_cache_reuse": False, "num_nodes": 2})) == set_ | {
        "enable_kv_cache_reuse": "false",
        "num_nodes": "2",
    }


def test_a_value_with_quotes_and_backslashes_arrives() -> None:
    assert parameters(rendered(engine_dir='/a "b"\\c'))["gpt_model_path"] == '/a "b"\\c'


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"parameters": {"gpt_model_path": "/x"}}, "gpt_model_path: is set by the field engine_dir"),
        ({"parameters": {"decoupled": True}}, "decoupled: is no parameter of the backend"),
        ({"run_tokens": 4}, "run_tokens: got 4; must be 1 with return_logits: true"),
        ({"prefill_chunk": 100}, "prefill_chunk: got 100; must be a multiple of tokens_per_block"),
        ({"retention_priority": 101}, "retention_priority"),
        ({"logits_dtype": "bf16"}, "logits_dtype"),
    ],
)
def test_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorRTLLMBackendConfig.model_validate({"type": "tensorrtllm", "engine_dir": "/e", **FACTS} | engine)
