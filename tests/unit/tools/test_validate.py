# SPDX-License-Identifier: Apache-2.0
"""What `check` says of deployments whose parts don't fit each other or this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import llama_cpp
import psutil
import pytest

from python_backends.llm.gguf_header import read_gguf_header
from routers import ALGORITHMS, networks
from routers.weights import RouterHeader, save_router
from tools.deployment import Deployment, load_deployment, shipped_deployments
from tools.machine import machine_problems, machine_warnings, memory_needed
from tools.tiny_models import ensure_tiny_models, tiny_vocabulary
from tools.validate import check, config_problems

PACED = {"type": "paced", "max_sessions": 16}
RANDOM = {"name": "random"}


def deployment(*engines: dict[str, Any], **sections: Any) -> Deployment:
    models = [{"name": f"m{i}", "engine": engine} for i, engine in enumerate(engines)]
    return Deployment.model_validate({"models": models, **sections})


def llama(path: Path, **settings: Any) -> dict[str, Any]:
    return {"type": "llama_cpp", "weights": str(path), "context_tokens": 128, **settings}


def write_header(path: Path, tokens: list[str], eos: int = 1, **shape: int) -> Path:
    """A GGUF file of metadata only."""
    writer = gguf.GGUFWriter(path, "llama")
    if "file_type" in shape:
        writer.add_file_type(shape["file_type"])
    writer.add_block_count(shape.get("layers", 2))
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list(tokens)
    writer.add_token_scores([0.5] * len(tokens))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(eos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", shipped_deployments())
def test_the_shipped_deployments_are_consistent(name: str) -> None:
    assert config_problems(load_deployment(name)) == []


@pytest.mark.parametrize(
    ("engines", "sections", "problem"),
    [
        (
            [PACED, PACED],
            {"router": {"name": "rsitch"}},
            f"router.name: got 'rsitch'; no router 'rsitch'; there are {', '.join(sorted(ALGORITHMS))}, and your own by"
            " a dotted path, 'package.module:ALGORITHM'",
        ),
        (
            [PACED],
            {"router": RANDOM},
            "models: got ['m0']; router 'random' routes between 2 models; the deployment has 1 (m0)",
        ),
        (
            [PACED, PACED],
            {"router": {"name": "random", "params": {"p": 2}}},
            "router.params: got {'p': 2}; router 'random': p: Input should be less than or equal to 1, got 2",
        ),
        (
            [PACED, PACED],
            {"router": RANDOM, "batching": {"threshold": [1]}},
            "batching.threshold: got [1]; must have one number for each of the 2 models",
        ),
        (
            [PACED, PACED],
            {"router": RANDOM, "batching": {"threshold": {2: [1, 1], 8: [1, 1, 2]}}},
            "batching.threshold.8: got [1, 1, 2]; must have one number for each of the 2 models",
        ),
        (
            [PACED] * 9,
            {
                "router": {"name": "markov", "params": {"p": [[1 / 9] * 9] * 9, "c": [[1] * 9] * 9}},
                "batching": "auto",
            },
            "batching.threshold: got 'auto'; solves for at most 8 models; there are 9",
        ),
        (
            [PACED, {"type": "paced", "max_sessions": 4}],
            {"router": RANDOM, "limits": {"max_live": 5}},
            "limits.max_live: got 5; model 'm1' holds 4 sessions at once"
            " (lower it, or raise models[1].engine.max_sessions)",
        ),
        (
            [PACED, {"type": "paced", "vocab_size": 10}],
            {"router": RANDOM},
            "models[1].engine.vocab_size: got a vocabulary of 10; must have that of models[0].engine.vocab_size, 1000",
        ),
        (
            [PACED],
            {"router": {"name": "single"}, "tokenizer": "qwen"},
            "tokenizer: got 'qwen'; tokenizer 'qwen' is neither a folder nor one of: ",
        ),
        (
            [llama(Path("nowhere.gguf"))],
            {"router": {"name": "single"}},
            "models[0].engine.weights: got 'nowhere.gguf'; weights 'nowhere.gguf': no such file",
        ),
    ],
)
def test_each_problem_is_named_with_its_key(
    engines: list[dict[str, Any]], sections: dict[str, Any], problem: str
) -> None:
    (found,) = check(deployment(*engines, **sections))
    assert str(found).startswith(problem)


def test_a_router_that_reads_logits_needs_an_engine_that_has_them() -> None:
    found = config_problems(deployment(PACED, PACED, router={"name": "rstitch"}))
    assert [p.path for p in found] == ["models[0].engine.type", "models[1].engine.type"]
    assert found[0].allowed == (
        "router 'rstitch' needs logits, which this engine doesn't give; allowed: llama_cpp, tensorrt_llm, tensorrtllm"
    )


@pytest.mark.parametrize(
    "engine", [{"type": "tensorrt_llm", "weights": "x"}, {"type": "tensorrtllm", "engine_dir": "x"}]
)
def test_a_router_that_reads_texts_needs_an_engine_that_knows_them(engine: dict[str, Any]) -> None:
    found = config_problems(deployment(engine, engine, router={"name": "glimp"}))
    assert [p.path for p in found] == ["models[0].engine.type", "models[1].engine.type"]
    assert found[1].allowed == "router 'glimp' needs token_bytes, which this engine doesn't give; allowed: llama_cpp"


def test_real_files_that_fit(tmp_path: Path) -> None:
    made = ensure_tiny_models(tmp_path)
    pair = deployment(llama(made["slm"]), llama(made["llm"]), tokenizer=str(made["tokenizer"]))
    assert check(pair) == []


def test_weights_that_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is no model, but long enough for a header")
    whole = write_header(tmp_path / "whole.gguf", ["a", "b"]).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:200])
    (tmp_path / "empty.gguf").write_bytes(b"")
    names = ["text", "cut", "empty"]
    tokens = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8  # past the types
    for number, length in enumerate((whole.index(b"general.architecture") - 8, tokens, tokens + 8)):
        names.append(f"length{number}")  # beyond what an index can be: of a key, of the tokens, of a token
        (tmp_path / f"{names[-1]}.gguf").write_bytes(whole[:length] + b"\xff" * 8 + whole[length + 8 :])
    found = machine_problems(deployment(*(llama(tmp_path / f"{name}.gguf") for name in names)))
    assert [p.path for p in found] == [f"models[{i}].engine.weights" for i in range(len(names))]
    assert "not a GGUF file of version 2 or 3" in found[0].allowed
    assert all("must be a GGUF file" in p.allowed for p in found)


@pytest.mark.parametrize(
    ("tokens", "eos", "problem"),
    [
        (["a", "b", "c"], 1, "models[1].engine.weights: got a vocabulary of 3; must have that of"),
        (["a", "x"], 1, "models[1].engine.weights: got '{file}'; must have the vocabulary of models[0].engine.weights"),
        (["a", "b"], 0, "models[1].engine.weights: got tokenizer.ggml.eos_token_id 0; must be 1, as in"),
    ],
)
def test_models_must_share_vocabulary_and_special_tokens(
    tmp_path: Path, tokens: list[str], eos: int, problem: str
) -> None:
    first = write_header(tmp_path / "first.gguf", ["a", "b"])
    other = write_header(tmp_path / "other.gguf", tokens, eos)
    (found,) = machine_problems(deployment(llama(first), llama(other)))
    assert str(found).startswith(problem.format(file=other))


def test_a_tokenizer_must_not_exceed_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = ensure_tiny_models(tmp_path / "tiny")["tokenizer"]
    (found,) = machine_problems(deployment({"type": "paced", "vocab_size": 100}, tokenizer=str(tokenizer)))
    assert found.path == "tokenizer"
    assert found.allowed == "at most 100, the vocabulary of models[0].engine.vocab_size"


def test_a_tokenizer_must_be_that_of_the_weights(tmp_path: Path) -> None:
    tiny = ensure_tiny_models(tmp_path / "tiny")
    spelling = list(tiny_vocabulary().tokens)
    spelling[7], spelling[8] = spelling[8], spelling[7]
    other = write_header(tmp_path / "other.gguf", spelling, eos=3)
    (found,) = machine_problems(deployment(llama(other), tokenizer=str(tiny["tokenizer"])))
    assert found.path == "tokenizer"
    assert found.value.endswith(f"where token 7 is {spelling[8]!r}")
    assert found.allowed == f"in models[0].engine.weights it is {spelling[7]!r}"


def test_a_tokenizer_may_lack_what_fills_up_the_vocabulary(tmp_path: Path) -> None:
    tiny = ensure_tiny_models(tmp_path / "tiny")
    padded = write_header(tmp_path / "padded.gguf", [*tiny_vocabulary().tokens, "[PAD]"])
    assert machine_problems(deployment(llama(padded), tokenizer=str(tiny["tokenizer"]))) == []


@pytest.mark.parametrize(
    ("gpu_layers", "offloads", "refused"), [(-1, False, True), (-1, True, False), (0, False, False)]
)
def test_layers_on_a_gpu_need_a_build_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_layers: int, offloads: bool, refused: bool
) -> None:
    weights = write_header(tmp_path / "a.gguf", ["a", "b"])
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: offloads)
    found = machine_problems(deployment(llama(weights, gpu_layers=gpu_layers)))
    assert [(p.path, p.value) for p in found] == [("models[0].engine.gpu_layers", "-1")] * refused


def test_a_gpu_is_not_asked_for_without_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = write_header(tmp_path / "a.gguf", ["a", "b"])
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert machine_problems(deployment(llama(weights, gpu_layers=-1))) == []


@pytest.mark.parametrize(
    ("kind", "deterministic", "warned"),
    [
        (gguf.LlamaFileType.MOSTLY_Q4_K_M, True, True),
        (gguf.LlamaFileType.MOSTLY_Q4_K_M, False, False),
        (gguf.LlamaFileType.MOSTLY_Q4_0, True, False),
        (gguf.LlamaFileType.MOSTLY_Q8_0, True, False),
        (None, True, False),
    ],
)
def test_weights_whose_sums_depend_on_the_batch_are_warned_of(
    tmp_path: Path, kind: int | None, deterministic: bool, warned: bool
) -> None:
    weights = write_header(tmp_path / "a.gguf", ["a", "b"], **({} if kind is None else {"file_type": kind}))
    found = machine_warnings(deployment(llama(weights, deterministic=deterministic)))
    assert [line.split(":")[0] for line in found] == ["models[0].engine.deterministic"] * warned


@pytest.mark.parametrize(
    "engine", [{"type": "tensorrt_llm", "weights": "w"}, {"type": "tensorrtllm", "engine_dir": "e"}]
)
def test_kv_that_nobody_has_counted_is_warned_of(engine: dict[str, Any]) -> None:
    """Of these engines it is what the GPU has left."""
    (warning,) = machine_warnings(deployment({**engine, "max_sessions": 7}))
    assert warning.startswith("models[0].engine.max_tokens: null; admission counts with a full context for each of 7 ")
    assert machine_warnings(deployment({**engine, "max_tokens": 8192})) == []


def test_a_context_is_at_most_what_the_weights_were_trained_for(tmp_path: Path) -> None:
    weights = write_header(tmp_path / "a.gguf", ["a", "b"])
    (found,) = machine_problems(deployment(llama(weights, context_tokens=257)))
    assert (found.path, found.value) == ("models[0].engine.context_tokens", "257")


def test_memory_grows_with_the_contexts_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = write_header(tmp_path / "a.gguf", ["a", "b"])
    one, ten = (deployment(llama(weights, max_sessions=n)) for n in (1, 10))
    # 2 layers x 2 KV heads x 16 numbers x (key, value) x 2 bytes, for 9 more sessions with 256 places for 128 tokens
    assert memory_needed(ten) - memory_needed(one) == 2 * 2 * 16 * 2 * 2 * 256 * 9
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    (found,) = machine_problems(one)
    assert str(found).startswith("models: got about 0.59 GiB of memory needed; 1,048,576 bytes are available (lower")


def test_what_is_on_a_gpu_takes_no_memory_of_the_host(tmp_path: Path) -> None:
    weights = write_header(tmp_path / "a.gguf", ["a", "b"])
    few, many = (deployment(llama(weights, max_sessions=n, gpu_layers=-1)) for n in (1, 64))
    assert memory_needed(few) == memory_needed(many) == memory_needed(deployment(PACED))


def test_the_header_is_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    header = read_gguf_header(write_header(tmp_path / "a.gguf", ["a", "é", ""]))
    assert header.values["general.architecture"] == "llama"
    assert header.values["tokenizer.ggml.eos_token_id"] == 1
    assert header.of_architecture("attention.head_count_kv") == 2
    assert {name: array.length for name, array in header.arrays.items()} == {
        "tokenizer.ggml.tokens": 3,
        "tokenizer.ggml.scores": 3,
    }


def _trained(tmp_path: Path, slm: Path, llm: Path, algorithm: str = "r2r", **header: Any) -> dict[str, Any]:
    """The router section of a trained router for a pair of `write_header`'s files."""
    path = tmp_path / "own" / f"{algorithm}.safetensors"
    path.parent.mkdir(exist_ok=True)
    module = networks.R2RNetwork(64, 64, width=8, blocks=1, top_logits=2)
    arguments = {"hidden_size": 64, "embedding_size": 64, "width": 8, "blocks": 1, "top_logits": 2}
    values = {
        "algorithm": algorithm,
        "models": [slm.stem, llm.stem],
        "hidden_size": 64,
        "vocab_size": 2,
        "threshold": 0.5,
        "network": {**arguments, "hidden_size": header.get("hidden_size", 64)},
    }
    save_router(path, RouterHeader.model_validate({**values, **header}), module.state_dict())
    return {"name": "r2r", "params": {"weights": str(path)}}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({}, None),
        ({"models": ["first", "another"]}, "models[1]: trained for another, model 'm1' has other; other_models: true"),
        ({"models": ["another", "other"]}, "models[0]: trained for another, model 'm0' has first"),
        ({"vocab_size": 3}, "vocab_size: trained for 3, model 'm0' has 2"),
        ({"hidden_size": 65}, "hidden_size: trained for 65, model 'm0' has 64"),
        ({"algorithm": "citer"}, "algorithm: got 'citer'; allowed: 'r2r'"),
    ],
)
def test_a_trained_router_must_be_for_these_weights(
    tmp_path: Path, header: dict[str, Any], problem: str | None
) -> None:
    first, other = (write_header(tmp_path / f"{name}.gguf", ["a", "b"]) for name in ("first", "other"))
    router = _trained(tmp_path, first, other, **header)
    found = check(deployment(llama(first), llama(other), router=router))
    assert [p.path for p in found] == ["router.params"] * (problem is not None)
    assert problem is None or problem in str(found[0])


def test_a_trained_routers_file_must_be_there(tmp_path: Path) -> None:
    first, other = (write_header(tmp_path / f"{name}.gguf", ["a", "b"]) for name in ("first", "other"))
    router = {"name": "co_llm", "params": {"weights": str(tmp_path / "none.safetensors")}}
    (found,) = check(deployment(llama(first), llama(other), router=router))
    assert found.path == "router.params" and "none.safetensors: no such file" in found.allowed


def test_a_trained_router_needs_an_engine_with_hidden_states(tmp_path: Path) -> None:
    router = _trained(tmp_path, Path("a"), Path("b"))
    found = config_problems(deployment(PACED, PACED, router=router))
    assert [p.path for p in found] == ["models[0].engine.type"] * 3
    assert [p.allowed.split(",")[0] for p in found] == [
        f"router 'r2r' needs {what}" for what in ("logits", "hidden_states", "embeddings")
    ]


def test_a_trained_routers_relative_path_is_the_deployment_files(tmp_path: Path) -> None:
    text = "models: [{name: a, engine: {type: paced}}, {name: b, engine: {type: paced}}]\n"
    (tmp_path / "d.yaml").write_text(text + "router: {name: citer, params: {weights: own/citer.safetensors}}\n")
    loaded = load_deployment(tmp_path / "d.yaml")
    assert loaded.router.params == {"weights": str(tmp_path / "own" / "citer.safetensors")}
    (tmp_path / "d.yaml").write_text(text + "router: {name: citer, params: {weights: shipped-name}}\n")
    assert load_deployment(tmp_path / "d.yaml").router.params == {"weights": "shipped-name"}
