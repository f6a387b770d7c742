# SPDX-License-Identifier: Apache-2.0
"""The largest common capacity of a deployment, and what its engines are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from python_backends.llm.engines.config import LlamaCppConfig
from tests.unit.sizing.models import write_checkpoint
from tests.unit.tools.test_validate import write_header
from tools.cli import main
from tools.deployment import Deployment
from tools.errors import UserError
from tools.repository import configs
from tools.sizing.joint import Plan, joint_plan, sized
from tools.sizing.placement import placement_problems
from tools.validate import check, config_problems


def deployment(models: list[dict[str, Any]], **memory: Any) -> Deployment:
    """Models named slm, llm, xl under a router that takes any number."""
    named = [{"name": name, **model} for name, model in zip(("slm", "llm", "xl"), models, strict=False)]
    weights = [1.0 / len(models)] * len(models)
    return Deployment.model_validate(
        {
            "models": named,
            "router": {
                "name": "markov",
                "params": {"p": [weights] * len(models), "c": [[1] * len(models)] * len(models)},
            },
            "limits": {"max_live": 1},
            **({"memory": memory} if memory else {}),
        }
    )


def pytorch(folder: Path, name: str, devices: list[str] | None = None, **engine: Any) -> dict[str, Any]:
    path = write_checkpoint(folder, name)
    return {
        "engine": {"type": "tensorrt_llm", "weights": str(path), "tensor_parallel": len(devices or [1]), **engine},
        "devices": devices or [],
    }


def stock(folder: Path, name: str, devices: list[str], build: dict[str, Any] | None = None) -> dict[str, Any]:
    engine = {
        "type": "tensorrtllm", "engine_dir": str(folder / "engine"), "checkpoint": str(write_checkpoint(folder, name)),
        "gpu_device_ids": list(range(len(devices))),
    }  # fmt: skip
    return {"engine": engine, "devices": devices, "build": build or {}}


def given(plan: Plan) -> list[int | None]:
    return [getattr(m.engine, "max_tokens", None) for m in plan.deployment.models]


def test_a_pair_on_one_gpu(tmp_path: Path) -> None:
    """0.9 * 80 GiB = 77,309,411,328 (rounded down); less the weights 1,192,099,840 + 65,524,246,528, 10,593,064,960;
    over 114,688 + 262,144 for a token: 28,110.9. In blocks of 32: 28,096."""
    plan = joint_plan(
        deployment([pytorch(tmp_path, "Qwen3-0.6B"), pytorch(tmp_path, "Qwen3-32B")], devices={"gpu0": "80GiB"})
    )
    assert plan.tokens == 28_110
    assert given(plan) == [28_096, 28_096]


def test_keys_and_values_in_8_bits(tmp_path: Path) -> None:
    """10,593,064,960 over 57,344 + 131,072: 56,221.7."""
    models = [pytorch(tmp_path, name, kv_cache_dtype="fp8") for name in ("Qwen3-0.6B", "Qwen3-32B")]
    plan = joint_plan(deployment(models, devices={"gpu0": "80GiB"}))
    assert (plan.tokens, given(plan)) == (56_221, [56_192, 56_192])


def test_the_device_with_least_room_bounds_all(tmp_path: Path) -> None:
    """gpu0 has the SLM and half of the LLM: 77,309,411,328 - 1,192,099,840 - 32,762,800,128 = 43,354,511,360, over
    114,688 + 131,072: 176,409.9. gpu1 would have room for (77,309,411,328 - 32,762,800,128) / 131,072 = 339,863.6."""
    plan = joint_plan(
        deployment(
            [pytorch(tmp_path, "Qwen3-0.6B", ["gpu0"]), pytorch(tmp_path, "Qwen3-32B", ["gpu0", "gpu1"])],
            devices={"gpu0": "80GiB", "gpu1": "80GiB"},
        )
    )
    assert plan.tokens == 176_409
    assert {name: use.fits for name, use in plan.devices.items()} == {"gpu0": 176_409, "gpu1": 339_863}


def test_three_models_over_eight_gpus(tmp_path: Path) -> None:
    """Each of them over all: 0.8 * 24 GiB = 20,615,843,020 (.8); less 149,127,168 + 2,048,223,232 + 8,191,715,328,
    10,226,777,292; over 14,336 + 18,432 + 32,768 = 65,536: 156,048.2."""
    gpus = [f"gpu{i}" for i in range(8)]
    models = [pytorch(tmp_path, name, gpus) for name in ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B")]
    plan = joint_plan(deployment(models, devices=dict.fromkeys(gpus, "24GiB"), reserve=0.2))
    assert (plan.tokens, given(plan)) == (156_048, [156_032] * 3)


def test_an_engine_of_the_stock_backend_is_sized_as_it_is_built(tmp_path: Path) -> None:
    """FP8 weights and KV on one GPU: 77,309,411,328 - 34,318,624,768 = 42,990,786,560, over 131,072: 327,993.6."""
    model = stock(tmp_path, "Qwen3-32B", ["gpu0"], {"weights": "fp8", "kv_cache": "fp8"})
    plan = joint_plan(deployment([model], devices={"gpu0": "80GiB"}))
    assert (plan.tokens, given(plan)) == (327_993, [327_968])


def test_a_quantised_checkpoint_is_as_large_as_its_files(tmp_path: Path) -> None:
    model = pytorch(tmp_path, "Qwen3-8B", ["gpu0", "gpu1"])
    write_checkpoint(tmp_path, "Qwen3-8B", quantization_config={"quant_method": "fp8"})
    (tmp_path / "Qwen3-8B" / "model.safetensors").write_bytes(bytes(1001))
    plan = joint_plan(deployment([model], devices={"gpu0": "1GiB", "gpu1": "2GiB"}, reserve=0))
    assert [use.weights for use in plan.devices.values()] == [501, 501]


def test_kv_in_8_bits_because_the_checkpoint_says_so(tmp_path: Path) -> None:
    """Qwen3-8B: 2 * 36 layers * 8 KV heads * 128 numbers of one byte."""
    model = pytorch(tmp_path, "Qwen3-8B")
    made = deployment([model], devices={"gpu0": "1GiB"}, reserve=0)
    (tmp_path / "Qwen3-8B" / "model.safetensors").write_bytes(bytes(1000))
    for algorithm, size in ((None, 147_456), ("FP8", 73_728)):
        quantised = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": algorithm}}
        (tmp_path / "Qwen3-8B" / "hf_quant_config.json").write_text(json.dumps(quantised))
        assert joint_plan(made).devices["gpu0"].kv_token == size
    (tmp_path / "Qwen3-8B" / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "INT8"}}')
    with pytest.raises(UserError, match="kv_cache_quant_algo: got 'INT8'"):
        joint_plan(made)


def test_a_checkpoint_of_32_bits_is_refused_by_the_pytorch_flow_alone(tmp_path: Path) -> None:
    """An engine is built in 16 bits, whatever the checkpoint has."""
    for model in (pytorch(tmp_path, "Qwen3-8B"), stock(tmp_path, "Qwen3-8B", ["gpu0"])):
        write_checkpoint(tmp_path, "Qwen3-8B", torch_dtype="float32")
        made = deployment([model], devices={"gpu0": "80GiB"})
        if model["engine"]["type"] == "tensorrt_llm":
            with pytest.raises(UserError, match="torch_dtype: got 'float32'"):
                joint_plan(made)
        else:
            assert joint_plan(made).devices["gpu0"].kv_token == 147_456


def test_a_quantised_checkpoint_without_its_files_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    model = pytorch(tmp_path, "Qwen3-8B")
    write_checkpoint(tmp_path, "Qwen3-8B", quantization_config={"quant_method": "fp8"})
    made = deployment([model], devices={"gpu0": "80GiB"})
    with pytest.raises(UserError, match=r"engine\.weights: .* is quantised, and has no \*\.safetensors"):
        joint_plan(made)
    file = tmp_path / "Qwen3-8B" / "model.safetensors"
    file.symlink_to(tmp_path / "evicted from the cache")
    with pytest.raises(UserError, match=r"engine\.weights: .*model\.safetensors can't be read: No such file"):
        joint_plan(made)


def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    gpus = ["a", "b", "c"]
    memory = dict.fromkeys(gpus, "80GiB")
    with pytest.raises(UserError, match=r"model 'slm': engine\.tensor_parallel: got 3 ranks; must divide .* 16 "):
        joint_plan(deployment([pytorch(tmp_path, "Qwen3-0.6B", gpus)], devices=memory))
    with pytest.raises(UserError, match=r"model 'slm': engine\.gpu_device_ids: got 3 ranks; must divide .* 16 "):
        joint_plan(deployment([stock(tmp_path, "Qwen3-0.6B", gpus)], devices=memory))


def test_what_an_engine_says_itself_is_the_most_that_it_gets(tmp_path: Path) -> None:
    """77,309,411,328 - 1,192,099,840 - 16,381,470,720 over 114,688 + 147,456: 227,874.1."""
    models = [pytorch(tmp_path, "Qwen3-0.6B", max_tokens=8192), pytorch(tmp_path, "Qwen3-8B")]
    plan = joint_plan(deployment(models, devices={"gpu0": "80GiB"}))
    assert (plan.tokens, plan.held, given(plan)) == (227_874, 8192, [8192, 227_872])


def llama(path: Path, **engine: Any) -> dict[str, Any]:
    return {"engine": {"type": "llama_cpp", "weights": str(path), "context_tokens": 200, **engine}}


def test_llama_cpp_gets_tokens_or_sessions(tmp_path: Path) -> None:
    """2 layers * 2 KV heads * 16 numbers * (key and value) * 2 bytes = 256 bytes a token; a session's own buffer of 200
    tokens has 256 places. 4 models' tokens take 256 KiB for 1024 tokens each; the files are a few hundred bytes."""
    weights = write_header(tmp_path / "a.gguf", ["a", "b"])
    size = weights.stat().st_size
    models = [llama(weights, max_sessions=8, deterministic=False), llama(weights, max_sessions=8)]
    memory = 2 * size + 2 * 1024 * 256 + 300
    plan = joint_plan(deployment(models, devices={"host": memory}, reserve=0))
    assert (plan.tokens, plan.held) == (1024, 4 * 200)
    slm, llm = (m.engine for m in plan.deployment.models)
    assert isinstance(slm, LlamaCppConfig) and isinstance(llm, LlamaCppConfig)
    assert (slm.kv_tokens, slm.max_sessions) == (1024, 8)
    assert (llm.kv_tokens, llm.max_sessions) == (None, 4)
    LlamaCppConfig.model_validate(slm.model_dump())
    much = joint_plan(deployment(models, devices={"host": "1GiB"})).deployment.models
    assert [getattr(m.engine, "kv_tokens", 0) for m in much] == [1600, None]  # all that 8 sessions of 200 can use
    assert [m.engine.max_sessions for m in much] == [8, 8]


def test_without_memory_nothing_is_changed(tmp_path: Path) -> None:
    made = deployment([pytorch(tmp_path, "Qwen3-8B")])
    assert sized(made) is made
    with pytest.raises(UserError, match="memory: is missing"):
        joint_plan(made)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    models = [pytorch(tmp_path, "Qwen3-0.6B"), pytorch(tmp_path, "Qwen3-32B")]
    made = deployment(models, devices={"gpu0": "64GiB"})
    message = (
        "memory.devices.gpu0: 64.00 GiB with reserve 0.1 leave 57.60 GiB; the weights take 62.13 GiB: 'slm' 1.11 GiB,"
        " 'llm' 61.02 GiB"
    )
    with pytest.raises(UserError) as error:
        joint_plan(made)
    assert error.value.lines == [message]


def test_too_little_for_one_session(tmp_path: Path) -> None:
    weights = write_header(tmp_path / "a.gguf", ["a", "b"])
    with pytest.raises(UserError, match=r"too few for one session of engine\.context_tokens = 200 of model 'slm'"):
        joint_plan(deployment([llama(weights)], devices={"host": weights.stat().st_size + 1000}, reserve=0))
    with pytest.raises(UserError, match=r"3 tokens fit on every model; too few for one block of 256 tokens"):
        joint_plan(
            deployment(
                [llama(weights, deterministic=False)], devices={"host": weights.stat().st_size + 1000}, reserve=0
            )
        )


def test_the_pytorch_engine_wants_room_for_one_session(tmp_path: Path) -> None:
    """1 GiB over 147,456: 7281.8 tokens beside the weights."""
    model = pytorch(tmp_path, "Qwen3-8B", context_tokens=8192)
    with pytest.raises(UserError, match=r"7281 tokens fit .*too few for one session of engine\.context_tokens = 8192"):
        joint_plan(deployment([model], devices={"gpu0": 16_381_470_720 + (1 << 30)}, reserve=0))


@pytest.mark.parametrize(
    ("devices", "names", "message"),
    [
        (["gpu0"], [], "models[0].devices: got ['gpu0']; are names of memory.devices, and there is no memory"),
        (
            ["gpu2"],
            ["gpu0", "gpu1"],
            "models[0].devices: got ['gpu2']; 'gpu2' is not in memory.devices (did you mean 'gpu1'?); allowed: gpu0,"
            " gpu1",
        ),
        (["gpu0", "gpu0"], ["gpu0"], "models[0].devices: got ['gpu0', 'gpu0']; must name each device once"),
        ([], ["gpu0", "gpu1"], "models[0].devices: got []; must name 1 of gpu0, gpu1: one for each rank of the engine"),
    ],
)
def test_a_wrong_placement_is_named(tmp_path: Path, devices: list[str], names: list[str], message: str) -> None:
    model = pytorch(tmp_path, "Qwen3-0.6B", devices)
    memory: dict[str, Any] = {"devices": dict.fromkeys(names, "80GiB")} if names else {}
    found = [str(problem) for problem in config_problems(deployment([model], **memory))]
    assert message in found


ON_GPU_0 = "is on GPU 0 for device 'gpu1', and model 'slm' for device 'gpu0'; allowed: a GPU of its own for each device"
NULL = " (null is [0])"
LLM = "models[1].engine.gpu_device_ids: got"


@pytest.mark.parametrize("make", ["tensorrt_llm", "tensorrtllm"])
@pytest.mark.parametrize(
    ("slm", "llm", "message"),
    [
        # what no model says follows from the order of the GPUs
        ((["gpu0"], None), (["gpu0"], None), None),
        ((["gpu0"], None), (["gpu1"], [1]), None),
        ((["gpu0"], [3]), (["gpu1"], None), None),
        ((["gpu0"], [0]), (["gpu0", "gpu1"], [0, 1]), None),
        ((["gpu1"], [1]), (["gpu1", "gpu0"], [1, 0]), None),
        ((["gpu0"], None), (["gpu1"], None), f"{LLM} null; {ON_GPU_0}{NULL}"),
        ((["gpu0"], None), (["gpu1"], [0]), f"{LLM} [0]; {ON_GPU_0}"),
        ((["gpu0"], [1]), (["gpu0"], None), f"{LLM} null; is on GPU 0 for device 'gpu0', which is GPU 1 for model"
         f" 'slm'; allowed: 1{NULL}"),
        ((["gpu1"], [1]), (["gpu0", "gpu1"], [1, 0]), f"{LLM} [1, 0]; is on GPU 1 for device 'gpu0', and model 'slm'"
         " for device 'gpu1'; allowed: a GPU of its own for each device"),
    ],
)  # fmt: skip
def test_a_device_is_one_gpu(
    tmp_path: Path,
    make: str,
    slm: tuple[list[str], list[int] | None],
    llm: tuple[list[str], list[int] | None],
    message: str | None,
) -> None:
    models = []
    for devices, gpus in (slm, llm):
        model = (pytorch if make == "tensorrt_llm" else stock)(tmp_path, "Qwen3-0.6B", devices)
        models.append({**model, "engine": {**model["engine"], "gpu_device_ids": gpus}})
    made = deployment(models, devices=dict.fromkeys(("gpu0", "gpu1"), "80GiB"))
    found = [str(problem) for problem in placement_problems(made)]
    assert found == ([] if message is None else [message])


def test_gpus_are_counted_on_each_host_for_itself(tmp_path: Path) -> None:
    models = [pytorch(tmp_path, "Qwen3-0.6B", [gpu]) for gpu in ("gpu0", "gpu1", "gpu2")]
    memory = dict.fromkeys(("gpu0", "gpu1", "gpu2"), "80GiB")
    apart = [{**model, "url": url} for model, url in zip(models, (None, "a:8001", "b:8001"), strict=True)]
    assert list(placement_problems(deployment(apart, devices=memory))) == []
    together = [{**model, "url": url} for model, url in zip(models, (None, "a:8001", "a:8001"), strict=True)]
    (problem,) = placement_problems(deployment(together, devices=memory))
    assert problem.path == "models[2].engine.gpu_device_ids"


def test_the_gpu_of_a_model_is_written_for_its_engine(tmp_path: Path) -> None:
    models = [stock(tmp_path, "Qwen3-0.6B", ["gpu0"]), pytorch(tmp_path, "Qwen3-8B", ["gpu1"], gpu_device_ids=[1])]
    made = deployment(models, devices=dict.fromkeys(("gpu0", "gpu1"), "80GiB"))
    assert config_problems(made) == []
    texts = configs(sized(made))
    assert '"gpu_device_ids" value { string_value: "0" }' in texts["slm"]
    assert '"gpu_device_ids":[1]' in texts["llm"]


def test_prepare_writes_what_was_sized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the models' config.pbtxt, and into what token_router is told of a stock model."""
    models = [stock(tmp_path, "Qwen3-0.6B", ["gpu0"]), pytorch(tmp_path, "Qwen3-32B")]
    made = deployment(models, devices={"gpu0": "80GiB"})
    config = tmp_path / "d.yaml"
    config.write_text(json.dumps(made.model_dump(mode="json")))
    monkeypatch.setattr("sys.argv", ["tokenrouter", "prepare", str(config), "--output", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    # 77,309,411,328 - 1,503,264,768 - 65,524,246,528 over 376,832: 27,285.1
    assert '"max_tokens":27264' in (tmp_path / "r" / "llm" / "config.pbtxt").read_text()
    assert '"max_tokens":27264' in (tmp_path / "r" / "token_router" / "config.pbtxt").read_text()
    assert '"27264"' in (tmp_path / "r" / "slm" / "config.pbtxt").read_text()  # max_tokens_in_paged_kv_cache


def test_validate_says_what_does_not_fit(tmp_path: Path) -> None:
    weights = write_header(tmp_path / "a.gguf", ["a", "b"])
    (found,) = check(deployment([llama(weights)], devices={"host": 10}))
    assert str(found).startswith(
        "memory: got what the models take; memory.devices.host: 10 bytes with reserve 0.1 leave 9 bytes; the weights"
    )


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = deployment(
        [pytorch(tmp_path, "Qwen3-0.6B"), pytorch(tmp_path, "Qwen3-32B")], devices={"gpu0": "80GiB"}
    ).model_dump(mode="json")
    config = tmp_path / "d.yaml"
    config.write_text(json.dumps(made))  # JSON is YAML
    monkeypatch.setattr("sys.argv", ["tokenrouter", "plan", str(config)])
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert "28,110 *" in out and "max_tokens 28,096" in out and "every model can hold 28,096 tokens" in out
    monkeypatch.setattr("sys.argv", ["tokenrouter", "plan", str(config), "--json"])
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["held"]) == (28_110, 28_096)
    assert found["models"]["llm"]["given"] == {"max_tokens": 28_096}
    assert found["devices"]["gpu0"]["kv_token"] == 376_832
