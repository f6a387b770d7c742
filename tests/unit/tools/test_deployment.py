# SPDX-License-Identifier: Apache-2.0
"""A deployment file: what it gives, and what it says to each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_backends.llm.engines.config import LlamaCppConfig, TensorRTLLMConfig
from python_backends.token_router.config import RuntimeConfig
from tools.deployment import Deployment, load_deployment, shipped_deployments
from tools.errors import UserError

PACED = "models: [{name: slm, engine: {type: paced}}, {name: llm, engine: {type: paced}}]\n"
SIZE = "must be a size above 0, such as 80GiB (1024-based) or 80GB; a number alone is bytes"


def lines_of(path: Path, text: str) -> list[str]:
    """What loading this text says, without the file's name in front."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        load_deployment(path)
    prefix = f"{path}: "
    assert all(line.startswith(prefix) and "\n" not in line for line in raised.value.lines)
    return [line.removeprefix(prefix) for line in raised.value.lines]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("models: [", ["is not valid YAML: line 1, column 10: expected the node content, but found '<stream end>'"]),
        (
            "- slm",
            ["must be a mapping with the keys models, tokenizer, router, batching, limits, server, memory, transport"],
        ),
        (
            "",
            ["must be a mapping with the keys models, tokenizer, router, batching, limits, server, memory, transport"],
        ),
        ("tokenizer: smollm2", ["models: is missing"]),
        ("models: []", ["models: got []; list should have at least 1 item after validation, not 0"]),
        ("models: [{engine: {type: paced}}]", ["models[0].name: is missing"]),
        ("models: [{name: slm}]", ["models[0].engine: is missing"]),
        (
            "models: [{name: {{ model }}, engine: {type: paced}}]",
            ["is not valid YAML: line 1, column 18: found unhashable key"],
        ),
        ("x: 2024-13-45", ["has a value that can't be read: month must be in 1..12"]),
        (PACED + "models: []", ["is not valid YAML: line 2, column 1: key 'models' is given twice"]),
        (
            PACED + "limit: {max_live: 3}",
            [
                "limit: unknown key (did you mean 'limits'?); allowed: models, tokenizer, router, batching, limits,"
                " server, memory, transport"
            ],
        ),
        (
            PACED + "limits: {max_lives: 3}",
            [
                "limits.max_lives: unknown key (did you mean 'max_live'?); allowed: max_live, max_queue,"
                " default_max_tokens, step_timeout_s, silence_s"
            ],
        ),
        (
            "models: [{name: slm, engine: {type: paced, thread: 1, step_ms: -1}}]",
            [
                "models[0].engine.step_ms: got -1; input should be greater than or equal to 0",
                "models[0].engine.thread: unknown key; allowed: type, step_ms, prefill_token_ms, vocab_size, eos_every,"
                " context_tokens, max_sessions, kv_tokens, prefill_chunk",
            ],
        ),
        (
            "models: [{name: slm, engine: {type: llama}}]",
            ["models[0].engine.type: got 'llama'; allowed: 'llama_cpp', 'paced', 'tensorrtllm', 'tensorrt_llm'"],
        ),
        ("models: [{name: slm, engine: {step_ms: 1}}]", ["models[0].engine.type: is missing"]),
        ("models: [{name: slm, engine: {type: llama_cpp}}]", ["models[0].engine.weights: is missing"]),
        (
            "models: [{name: a b, engine: {type: paced}}]",
            ["models[0].name: got 'a b'; must be letters, digits, '_', '-' and '.', beginning with a letter or digit"],
        ),
        (
            "models: [{name: ensemble, engine: {type: paced}}]",
            ["models[0].name: got 'ensemble'; 'token_router' and 'ensemble' are the names of the public models"],
        ),
        (
            PACED + "memory: {device: {gpu0: 1GiB}}",
            [
                "memory.devices: is missing",
                "memory.device: unknown key (did you mean 'devices'?); allowed: devices, reserve",
            ],
        ),
        (
            PACED + "memory: {devices: {gpu0: 80 gigs}}",
            [f"memory.devices.gpu0: got '80 gigs'; {SIZE}"],
        ),
        (
            PACED + "memory: {devices: {a: 0, b: -80GiB, c: -1, d: null, e: true, f: .nan}}",
            [
                f"memory.devices.{name}: got {value}; {SIZE}"
                for name, value in zip("abcdef", (0, "'-80GiB'", -1, None, True, "nan"), strict=True)
            ],
        ),
        (
            PACED + "memory: {devices: {}}",
            ["memory.devices: got {}; dictionary should have at least 1 item after validation, not 0"],
        ),
        (
            PACED + "memory: {devices: {gpu0: 1GiB}, reserve: 1}",
            ["memory.reserve: got 1; input should be less than 1"],
        ),
        (
            "models: [{name: a, device: gpu0, engine: {type: paced}}]",
            ["models[0].device: unknown key (did you mean 'devices'?); allowed: name, engine, url, devices, build"],
        ),
        (
            "models: [{name: a, engine: {type: paced}, build: {weights: int8}}]",
            ["models[0].build.weights: got 'int8'; input should be '16bit', 'fp8' or 'int4_awq'"],
        ),
        (
            "models: [{name: a, engine: {type: paced}, build: {kv_cache: fp8}}]",
            ["models[0].build: kv_cache: got fp8 with weights: 16bit; KV blocks are reused with fp8 for both only"],
        ),
        (
            "models: [{name: a, engine: {type: tensorrt_llm, weights: x}, build: {weights: fp8}}]",
            ["models[0]: build: nothing is built for engine tensorrt_llm; allowed for: tensorrtllm"],
        ),
        (
            "models: [{name: a, engine: {type: llama_cpp, weights: x, max_sessions: 2, kv_tokens: 5000}}]",
            [
                "models[0].engine: kv_tokens: got 5000; with deterministic: true every session has a KV buffer of its"
                " own, max_sessions * context_tokens = 8192 together; lower max_sessions, or set deterministic: false"
            ],
        ),
        (
            "models: [{name: a, engine: {type: llama_cpp, weights: x, kv_tokens: 70000, deterministic: false}}]",
            ["models[0].engine: kv_tokens: got 70000; at most max_sessions * context_tokens = 65536 are used"],
        ),
        (
            "models: [{name: a, url: gpu2, engine: {type: paced}}]",
            ["models[0].url: got 'gpu2'; must be host:port of a gRPC endpoint, such as gpu2:8001"],
        ),
        (
            "models: [{name: a, url: 'gpu2:80010', engine: {type: paced}}]",
            ["models[0].url: got 'gpu2:80010'; must be host:port of a gRPC endpoint, such as gpu2:8001"],
        ),
        (
            "models: [{name: a, url: 'http://gpu2:8001', engine: {type: paced}}]",
            ["models[0].url: got 'http://gpu2:8001'; must be host:port of a gRPC endpoint, such as gpu2:8001"],
        ),
        (
            "models: [{name: a, engine: {type: paced}}, {name: a, engine: {type: paced}}]",
            ["models: each model needs a name of its own; given twice: a"],
        ),
        (
            PACED + "batching: {threshold: few}",
            [
                "batching.threshold: got 'few'; input should be a valid integer, unable to parse string as an integer"
                " or input should be 'auto' or input should be a valid list or input should be a valid dictionary"
            ],
        ),
        (PACED + "batching: often", ["batching: got 'often'; must be auto, or a section"]),
        (
            PACED + "batching: {threshold: auto, resume: false}",
            ["batching: threshold: auto needs resume: true; what it solves has no steps that prefill all again"],
        ),
        (
            PACED + "batching: {threshold: auto, policy: step_sync}",
            ["batching: threshold: has no meaning with policy step_sync; allowed with policy async"],
        ),
        (PACED + "batching: {threshold: [1, 0]}", ["batching.threshold[1]: got 0; input should be greater than 0"]),
        (
            PACED + "batching: {threshold: {4: [1, 0]}}",
            ["batching.threshold[4][1]: got 0; input should be greater than 0"],
        ),
        (PACED + "batching: {threshold: {}}", ["batching.threshold: got {}; a table by N needs at least one entry"]),
        (
            PACED + "batching: {llm_prefill: early}",
            ["batching.llm_prefill: got 'early'; input should be 'eager' or 'lazy'"],
        ),
        (PACED + "transport: shm", ["transport: got 'shm'; input should be 'socket' or 'bls'"]),
        (
            "models: [{name: a, url: 'gpu2:8001', engine: {type: paced}}]\ntransport: bls",
            ["the file: transport: is of models on this host, of other engines than tensorrtllm; there is none"],
        ),
        (
            PACED + "server: {http_port: 70000}",
            ["server.http_port: got 70000; input should be less than or equal to 65535"],
        ),
        (
            PACED + "server: {http_port: 9000, grpc_port: 9000}",
            ["server: http_port, grpc_port and metrics_port must differ"],
        ),
    ],
)
def test_each_mistake_is_one_line(tmp_path: Path, text: str, lines: list[str]) -> None:
    assert lines_of(tmp_path / "d.yaml", text) == lines


def test_a_missing_file_names_what_there_is() -> None:
    with pytest.raises(
        UserError, match=r"^smolm2: no such file \(did you mean 'smollm2'\?\); .* default, paced, smollm2$"
    ):
        load_deployment("smolm2")


def test_a_name_that_no_file_can_have_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^x{300}: can't be read: File name too long$"):
        load_deployment("x" * 300)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_bytes(b"models: \xff")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load_deployment(path)


def test_paths_are_taken_from_the_folder_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(
        "models: [{name: a, engine: {type: llama_cpp, weights: w/a.gguf}}]\ntokenizer: ./tok\nrouter: {path: r}\n"
    )
    deployment = load_deployment(path)
    assert deployment.router.path == str(tmp_path / "r")
    engine = deployment.models[0].engine
    assert isinstance(engine, LlamaCppConfig)
    assert (engine.weights, deployment.tokenizer) == (str(tmp_path / "w/a.gguf"), str(tmp_path / "tok"))


def test_a_folder_beside_the_file_is_a_path_and_anything_else_a_name(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(
        "models:\n"
        "  - {name: a, engine: {type: tensorrt_llm, weights: models/q}}\n"
        "  - {name: b, engine: {type: tensorrtllm, engine_dir: e}, build: {examples: x}}\n"
        "tokenizer: tok\n"
    )

    def paths() -> list[str | None]:
        deployment = load_deployment(path)
        engine = deployment.models[0].engine
        assert isinstance(engine, TensorRTLLMConfig)
        return [engine.weights, deployment.models[1].build.examples, deployment.tokenizer]

    assert paths() == ["models/q", str(tmp_path / "x"), "tok"]
    for folder in ("models/q", "tok"):
        (tmp_path / folder).mkdir(parents=True)
    assert paths() == [str(tmp_path / name) for name in ("models/q", "x", "tok")]


def test_names_of_the_catalogue_stay_names() -> None:
    default = load_deployment()
    engines = [m.engine for m in default.models]
    assert [e.weights for e in engines if isinstance(e, LlamaCppConfig)] == [
        "qwen2.5-coder-0.5b-q4_0",
        "qwen2.5-coder-1.5b-q4_0",
    ]
    assert default.tokenizer == "qwen2.5-coder"


@pytest.mark.parametrize("name", shipped_deployments())
def test_a_shipped_deployment_survives_its_own_dump(name: str) -> None:
    deployment = load_deployment(name)
    assert Deployment.model_validate(deployment.model_dump()) == deployment
    assert deployment.runtime().model_names == deployment.model_names == ["slm", "llm"]


@pytest.mark.parametrize("batching", ["auto", "{threshold: auto}"])
def test_auto_in_both_spellings(tmp_path: Path, batching: str) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(PACED + f"batching: {batching}\n")
    deployment = load_deployment(path)
    assert deployment.batching.threshold == "auto"
    # what token_router is told has it too
    told = RuntimeConfig.model_validate_json(deployment.runtime().model_dump_json())
    assert told.batching == deployment.batching
