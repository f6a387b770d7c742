# SPDX-License-Identifier: Apache-2.0
"""The engine tensorrt_llm over the fake package: what its sessions see, what it asks for, and how it fails."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from python_backends.llm.contract import SamplingParams, SessionOpen, SessionResult, SessionStep, StepRequest
from python_backends.llm.engines import EngineError, build_engine, parse_engine_config
from python_backends.llm.engines.tensorrt_llm.engine import TensorRTLLMEngine
from python_backends.llm.runner import LLMRunner, check_compatible
from routers import Algorithm, LogitsOutput, RouterConfig, StepResult
from routers.rstitch import RSTITCH
from tests.unit.llm import fake_tensorrt_llm
from tests.unit.llm.fake_tensorrt_llm import EOS, VOCAB, Fake, toy_logits
from tests.unit.llm.fakes import FakeParams, FakeRouter

FAKE = Algorithm(name="fake", params=FakeParams, entry=FakeRouter, peer=FakeRouter)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


@pytest.fixture
def weights(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 1]}))
    return str(tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "0")  # so that monkeypatch puts back what the engine sets
    return fake_tensorrt_llm.install(monkeypatch)


class Rig:
    """A runner over the engine, and the calls a test makes of it."""

    def __init__(self, weights: str, **settings: Any) -> None:
        values = {"type": "tensorrt_llm", "weights": weights, "max_sessions": 4, "context_tokens": 60, **settings}
        engine = build_engine(parse_engine_config(values), "slm", hidden_states=False)
        assert isinstance(engine, TensorRTLLMEngine)
        self.engine = engine
        self.router = FakeRouter(FakeParams(), ("slm", "llm"), 0)
        self.runner = LLMRunner("slm", 0, engine, self.router, RouterConfig(name=f"{__name__}:FAKE"))

    def call(
        self, *steps: SessionStep, opens: dict[int, dict[str, Any]] | None = None, **more: Any
    ) -> list[SessionResult]:
        opened = [
            SessionOpen(**{"session": s, "prompt_tokens": len(PROMPT), "limit": 60, "stop_at_eos": False, **o})
            for s, o in (opens or {}).items()
        ]
        return self.runner.execute(StepRequest(list(steps), opened, **more)).results


def kept(weights: str, **settings: Any) -> Rig:
    return Rig(weights, pending="kept", max_tokens=240, **settings)


def plain(prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of a loop on the toy model itself."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens).argmax()))
    return tokens[len(prompt) :]


both = pytest.mark.parametrize("make", [Rig, kept], ids=["reuse", "kept"])


@both
def test_tokens_are_those_of_a_plain_loop(fake: Fake, weights: str, make: Any) -> None:
    rig = make(weights)
    prompts = {1: PROMPT, 2: PROMPT[:4], 3: [20]}
    steps = [SessionStep(s, 0, p) for s, p in prompts.items()]
    results = rig.call(*steps, opens={s: {} for s in prompts}, max_steps=9)
    assert [r.token_ids for r in results] == [plain(p, 9) for p in prompts.values()]
    assert results[0].logprobs[0] == pytest.approx(float(toy_logits(PROMPT).log_softmax(-1).max()))
    assert rig.engine.pending == ("kept" if make is kept else "reuse")


@both
def test_a_resumed_session_computes_what_is_new(fake: Fake, weights: str, make: Any) -> None:
    rig = make(weights)
    rig.call(SessionStep(1, 0, PROMPT), opens={1: {}})
    rig.call(SessionStep(2, 0, [30, 31]), opens={2: {}})  # others go on meanwhile
    fake.computed.clear()
    (one,) = rig.call(SessionStep(1, len(PROMPT), [40]))
    (many,) = rig.call(SessionStep(1, len(PROMPT) + 1, [41, 42, 43]))
    assert one.token_ids == plain([*PROMPT, 40], 1) and many.token_ids == plain([*PROMPT, 40, 41, 42, 43], 1)
    assert fake.computed[0] == 1 and fake.computed[1] in (3, 4)  # what is freed leaves all but its last token


@both
def test_a_rejected_tail_is_gone(fake: Fake, weights: str, make: Any) -> None:
    rig = make(weights)
    rig.call(SessionStep(1, 0, PROMPT), opens={1: {}}, max_steps=4)
    (result,) = rig.call(SessionStep(1, len(PROMPT) + 1, [40]))  # of the three tokens held, two are dropped
    assert result.token_ids == plain([*PROMPT, *plain(PROMPT, 1), 40], 1)
    (result,) = rig.call(SessionStep(1, 3, [41, 42]))  # into the prompt
    assert result.token_ids == plain([*PROMPT[:3], 41, 42], 1)


@both
def test_a_prompt_comes_in_chunks(fake: Fake, weights: str, make: Any) -> None:
    rig = make(weights)
    (first,) = rig.call(SessionStep(1, 0, PROMPT[:8], sample=False), opens={1: {}})
    assert first == SessionResult()
    (second,) = rig.call(SessionStep(1, 8, PROMPT[8:]))
    assert second.token_ids == plain(PROMPT, 1)
    assert fake.computed[0] == 8 and fake.computed[1] <= 4


@both
def test_who_is_freed_leaves_nothing_and_makes_room(fake: Fake, weights: str, make: Any) -> None:
    rig = make(weights)
    rig.call(*(SessionStep(s, 0, [s + 3]) for s in range(4)), opens={s: {} for s in range(4)})
    (refused,) = rig.call(SessionStep(9, 0, [9]), opens={9: {}})
    assert refused.error == "max_sessions = 4 sessions are held already"
    (result,) = rig.call(SessionStep(9, 0, [9]), opens={9: {}}, free=[0, 1, 77])
    assert result.token_ids == plain([9], 1)
    rig.call(free=[2, 3, 9])
    assert fake.held == {}


@both
def test_what_does_not_fit_fails_alone(fake: Fake, weights: str, make: Any) -> None:
    rig = make(weights)
    steps = [SessionStep(1, 0, [3] * 61), SessionStep(2, 0, [VOCAB]), SessionStep(3, 0, PROMPT)]
    long, unknown, good = rig.call(*steps, opens={1: {}, 2: {}, 3: {}})
    assert long.error == "token_ids: would make the sequence 61 tokens long; at most 60"
    assert unknown.error == f"token_ids: {VOCAB} is not a token; allowed: 0 to {VOCAB - 1}"
    assert good.token_ids == plain(PROMPT, 1)


@both
def test_a_step_that_breaks_fails_its_sessions_and_the_model_goes_on(fake: Fake, weights: str, make: Any) -> None:
    rig = make(weights)
    rig.call(SessionStep(1, 0, PROMPT), SessionStep(2, 0, [30]), opens={1: {}, 2: {}})
    fake.break_at = {40}
    results = rig.call(SessionStep(1, len(PROMPT), [40]), SessionStep(2, 1, [31]))
    assert all(r.error is not None and r.error.startswith("tensorrt_llm: RuntimeError: CUDA error") for r in results)
    assert all("\n" not in r.error for r in results if r.error)
    (result,) = rig.call(SessionStep(3, 0, PROMPT), opens={3: {}}, free=[1, 2])
    assert result.token_ids == plain(PROMPT, 1)
    rig.call(free=[3])
    assert fake.held == {}


def test_reuse_fails_a_request_alone_and_stops_the_others_of_a_broken_step(fake: Fake, weights: str) -> None:
    rig = Rig(weights)
    fake.refuse = {30}
    refused, good = rig.call(SessionStep(1, 0, [30]), SessionStep(2, 0, PROMPT), opens={1: {}, 2: {}})
    assert refused.error == "token 30 isn't liked" and good.token_ids == plain(PROMPT, 1)
    fake.break_at = {40}
    rig.call(SessionStep(3, 0, [40]), SessionStep(2, len(PROMPT), [41]), opens={3: {}})
    assert fake.aborted == 2


def test_a_request_that_is_refused_at_once_fails_alone(fake: Fake, weights: str) -> None:
    rig = Rig(weights)
    fake.refuse_at_once = {30}
    refused, good = rig.call(SessionStep(1, 0, [30]), SessionStep(2, 0, PROMPT), opens={1: {}, 2: {}})
    assert refused.error == "token 30 isn't taken" and good.token_ids == plain(PROMPT, 1)
    assert len(fake.sent) == 1 and fake.aborted == 0


def test_a_processor_that_is_not_called_is_an_error(fake: Fake, weights: str) -> None:
    fake.processes_logits = False
    (result,) = Rig(weights).call(SessionStep(1, 0, PROMPT), opens={1: {}})
    assert "without calling its logits processor" in str(result.error)


def test_reuse_asks_for_one_token_and_its_retention(fake: Fake, weights: str) -> None:
    rig = Rig(weights, retention_priority=80)
    rig.call(SessionStep(1, 0, PROMPT), opens={1: {}})
    rig.call(SessionStep(1, len(PROMPT), plain(PROMPT, 1)))
    assert [s.tokens for s in fake.sent] == [PROMPT, [*PROMPT, *plain(PROMPT, 1)]]
    (blocks,) = fake.sent[0].retention.token_range_retention_configs
    assert (blocks.token_start, blocks.token_end, blocks.priority, blocks.duration_ms) == (0, None, 80, None)
    assert fake.sent[0].retention.decode_retention_priority == 80
    params = fake.sent[0].params
    assert (params.max_tokens, params.detokenize, params.ignore_eos, params.end_id) == (1, False, True, EOS)


def test_kept_sessions_decode_together_in_steps_of_theirs_alone(fake: Fake, weights: str) -> None:
    rig = kept(weights)
    rig.call(SessionStep(1, 0, PROMPT), SessionStep(2, 0, [30]), opens={1: {}, 2: {}})
    rig.call(SessionStep(1, len(PROMPT), [40]), SessionStep(2, 1, [31]))
    rig.call(SessionStep(3, 0, [33]), SessionStep(2, 2, [32]), opens={3: {}})
    assert fake.steps == [(2, 0), (0, 2), (1, 1)]
    assert fake.sent == []  # the executor of the LLM is left idle
    assert [len(h) for h in fake.held.values()] == [len(PROMPT) + 1, 3, 1]


def test_kept_sessions_split_a_step_that_is_too_long_for_the_model(fake: Fake, weights: str) -> None:
    rig = Rig(weights, pending="kept", max_tokens=20_000, context_tokens=8000, max_sessions=4)
    fake.pool_tokens = 40_000
    prompts = {1: [3] * 5000, 2: [4] * 5000, 3: [5]}
    opens: dict[int, dict[str, Any]] = {s: {"limit": 8000} for s in prompts}
    results = rig.call(*(SessionStep(s, 0, p) for s, p in prompts.items()), opens=opens)
    assert [r.token_ids for r in results] == [plain(p, 1) for p in prompts.values()]
    assert fake.steps == [(1, 0), (2, 0)]


def test_kept_sessions_without_memory_fail_and_give_back_what_they_held(fake: Fake, weights: str) -> None:
    rig = kept(weights)
    rig.call(SessionStep(1, 0, PROMPT), opens={1: {}})
    fake.pool_tokens = len(PROMPT) + 20
    steps = [SessionStep(2, 0, [3] * 30), SessionStep(1, len(PROMPT), [40])]
    results = rig.call(*steps, opens={2: {}})
    assert all("No free blocks left" in str(r.error) for r in results)
    assert fake.held == {}
    (result,) = rig.call(SessionStep(3, 0, [9]), opens={3: {}}, free=[1, 2])
    assert result.token_ids == plain([9], 1)


def test_kept_falls_back_to_reuse_with_a_warning(
    fake: Fake, weights: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tensorrt_llm._torch.pyexecutor.llm_request.LlmRequest.add_new_token")
    with caplog.at_level(logging.WARNING):
        rig = kept(weights)
    assert rig.engine.pending == "reuse"
    (line,) = caplog.messages
    assert line.startswith("pending: reuse instead of kept with tensorrt_llm 1.2.1: ")
    assert "llm_request.LlmRequest.add_new_token: found nothing" in line and "expected attribute" in line
    assert rig.call(SessionStep(1, 0, PROMPT), opens={1: {}})[0].token_ids == plain(PROMPT, 1)


def test_an_executor_built_otherwise_falls_back_too(
    fake: Fake, weights: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = sys.modules["tensorrt_llm"].LLM.__init__

    def without_engine(self: Any, model: str, *args: Any, **kwargs: Any) -> None:
        init(self, model, *args, **kwargs)
        del self._executor.engine

    monkeypatch.setattr("tensorrt_llm.LLM.__init__", without_engine)
    assert kept(weights).engine.pending == "reuse"
    assert "LLM._executor.engine: found a NoneType without model_engine and resource_manager" in caplog.text


def test_several_ranks_send_their_logits(fake: Fake, weights: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = kept(weights, tensor_parallel=2)
    assert rig.engine.pending == "reuse" and "tensor_parallel: got 2" in caplog.text
    (result,) = rig.call(SessionStep(1, 0, PROMPT), opens={1: {}})
    assert result.token_ids == plain(PROMPT, 1)
    assert fake.llm_arguments["gather_generation_logits"] and fake.llm_arguments["tensor_parallel_size"] == 2
    assert rig.router.seen[0].logits.dtype == torch.float32
    assert os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] == "0"  # as the test set it


def test_the_process_is_made_ready_before_the_package_is_imported(fake: Fake, weights: str) -> None:
    Rig(weights)
    assert os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] == "1"


def test_what_an_mpi_launcher_left_is_taken_out(monkeypatch: pytest.MonkeyPatch, fake: Fake, weights: str) -> None:
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_BTL"):
        monkeypatch.setenv(name, "1")
    Rig(weights)
    assert os.environ["OMPI_MCA_BTL"] == "1"  # nobody launched this process: these are a person's own
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        monkeypatch.setenv(name, "0")
    Rig(weights)
    assert [name for name in os.environ if name.startswith(("OMPI_", "PMIX_"))] == ["OMPI_ALLOW_RUN_AS_ROOT"]


@pytest.mark.parametrize(
    ("visible", "gpus", "seen"),
    [
        (None, [1], "1"),
        (None, [3, 2], "3,2"),
        ("4, 6,GPU-5f,-1,7", [2, 0], "GPU-5f,4"),  # numbers count among those that the server sees
        ("4,6", None, "4,6"),
    ],
)
def test_a_model_sees_the_gpus_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
    fake: Fake,
    weights: str,
    visible: str | None,
    gpus: list[int] | None,
    seen: str,
) -> None:
    """As many ranks as GPUs, unless it says otherwise."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")  # so that monkeypatch puts back what the engine sets
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    Rig(weights, gpu_device_ids=gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
    assert fake.llm_arguments["tensor_parallel_size"] == len(gpus or [0])


def test_gpus_are_chosen_before_the_package_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: str
) -> None:
    (tmp_path / "tensorrt_llm.py").write_text("import os\nraise ImportError(os.environ['CUDA_VISIBLE_DEVICES'])")
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match=r"can't be imported: 9$"):
        Rig(weights, gpu_device_ids=[1])


def test_gpus_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, fake: Fake, weights: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(ValueError, match=r"gpu_device_ids: got \[2\]; CUDA_VISIBLE_DEVICES=4,6 lets the server see 2,"):
        Rig(weights, gpu_device_ids=[2])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # in use before, with both
    with pytest.raises(
        ValueError, match=r"gpu_device_ids: got \[1\]; CUDA sees 2 with CUDA_VISIBLE_DEVICES=6; allowed"
    ):
        Rig(weights, gpu_device_ids=[1])


def test_the_settings_reach_the_package(fake: Fake, weights: str) -> None:
    Rig(
        weights,
        kv_cache_dtype="fp8",
        max_tokens=640,
        free_memory_fraction=0.4,
        host_cache_bytes=1000,
        tokens_per_block=16,
    )
    arguments = fake.llm_arguments
    assert (arguments["model"], arguments["skip_tokenizer_init"]) == (weights, True)
    assert (arguments["max_batch_size"], arguments["max_seq_len"], arguments["max_num_tokens"]) == (5, 61, 8192)
    assert arguments["enable_chunked_prefill"] and arguments["disable_overlap_scheduler"]
    assert arguments["cuda_graph_config"].model_dump(exclude_none=True) == {"max_batch_size": 4, "enable_padding": True}
    kv = arguments["kv_cache_config"]
    assert (kv.max_tokens, kv.free_gpu_memory_fraction, kv.host_cache_size) == (640, 0.4, 1000)
    assert (kv.tokens_per_block, kv.dtype) == (16, "fp8")
    assert kv.enable_block_reuse and kv.enable_partial_reuse and kv.copy_on_partial_reuse
    assert Rig(weights, cuda_graphs=False) and fake.llm_arguments["cuda_graph_config"] is None


@pytest.mark.parametrize("version", ["1.0.0", "1.1.0", "1.2.0"])
def test_every_supported_version_can_keep_sessions(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, weights: str, version: str
) -> None:
    fake_tensorrt_llm.install(monkeypatch, version)
    rig = kept(weights)
    assert rig.engine.pending == "kept"
    assert rig.call(SessionStep(1, 0, PROMPT), opens={1: {}}, max_steps=3)[0].token_ids == plain(PROMPT, 3)


class Stream:
    """A CUDA stream's name, and what it was told to wait for."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self._order = name, order

    def wait_stream(self, other: Stream) -> None:
        self._order.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("version", ["1.0.0", "1.1.0", "1.2.1"])
def test_kept_sessions_are_computed_on_the_stream_that_the_executor_has_for_it(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, weights: str, version: str
) -> None:
    fake = fake_tensorrt_llm.install(monkeypatch, version)
    fake.stream = Stream("executor", fake.order)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        fake.order.append(f"on {stream.name}")
        yield
        fake.order.append("back")

    monkeypatch.setattr("torch.cuda.current_stream", lambda: Stream("ours", fake.order))
    monkeypatch.setattr("torch.cuda.stream", on)
    assert kept(weights).call(SessionStep(1, 0, PROMPT), opens={1: {}})[0].token_ids == plain(PROMPT, 1)
    there = ["executor waits for ours", "on executor", "forward", "back", "ours waits for executor"]
    assert fake.order == (there if version == "1.2.1" else ["forward"])


def test_a_version_with_one_size_of_blocks(monkeypatch: pytest.MonkeyPatch, fake: Fake, weights: str) -> None:
    fake_tensorrt_llm.install(monkeypatch, "1.0.0")
    assert Rig(weights).call(SessionStep(1, 0, PROMPT), opens={1: {}})[0].token_ids == plain(PROMPT, 1)
    with pytest.raises(ValueError, match=r"tokens_per_block: got 64; tensorrt_llm 1\.0\.0 allows 32 only"):
        Rig(weights, tokens_per_block=64)
    for version in ("1.1.0", "1.2.0"):
        other = fake_tensorrt_llm.install(monkeypatch, version)
        assert Rig(weights, tokens_per_block=64) and other.llm_arguments["kv_cache_config"].tokens_per_block == 64


def test_capacity(fake: Fake, weights: str) -> None:
    capacity = Rig(weights, max_tokens=128, tokens_per_block=16).engine.capacity()
    assert (capacity.vocab_size, capacity.eos_token_ids) == (VOCAB, (EOS, 1))
    assert (capacity.kv_tokens, capacity.kv_block) == (128, 16)
    check_compatible(RSTITCH.entry(RSTITCH.params(), ("slm", "llm"), 0), capacity)


def test_close_shuts_the_package_down(fake: Fake, weights: str) -> None:
    rig = kept(weights)
    rig.call(SessionStep(1, 0, PROMPT), opens={1: {}})
    rig.engine.close()
    assert fake.shut_down == 1 and fake.held == {}


def test_sampling_with_penalties_sees_the_raw_logits(fake: Fake, weights: str) -> None:
    rig = Rig(weights)
    sampling = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.3, seed=11)
    rig.call(SessionStep(1, 0, PROMPT), opens={1: {"sampling": sampling}})
    (seen,) = rig.router.seen
    assert torch.equal(seen.logits[0], toy_logits(PROMPT))


def test_what_route_is_given_stands_where_the_step_was_computed() -> None:
    step = StepResult(
        LogitsOutput(torch.empty(1, 9, device="meta"), None),
        [4], [3], [[1, 2, 3]], [2], [7], [FakeParams(leave_at=4)], lambda _: 0.5, [{}],
    )  # fmt: skip
    assert step.param("leave_at").device.type == step.next_token_ids.device.type == "meta"


def test_kept_sessions_need_a_limit_for_admission(fake: Fake, weights: str) -> None:
    with pytest.raises(ValueError, match="max_tokens: must be given with pending: kept"):
        Rig(weights, pending="kept")


def test_a_model_of_the_stock_backend_is_no_engine_of_this_one() -> None:
    config = parse_engine_config({"type": "tensorrtllm", "engine_dir": "/engines/slm"})
    with pytest.raises(ValueError, match="tensorrtllm is a Triton backend of its own"):
        build_engine(config, "slm", hidden_states=False)


@pytest.mark.parametrize(("gpus", "threads"), [(1, []), (2, [1]), (0, [1])])
def test_torch_keeps_its_threads_where_a_gpu_samples_and_routes(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, weights: str, gpus: int, threads: list[int]
) -> None:
    """Logits of several ranks come to the CPU, where a signal's last bit would depend on how many rows there are."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    monkeypatch.setitem(sys.modules, "python_backends.llm.model", ModuleType("unused"))  # so that it is taken out again
    del sys.modules["python_backends.llm.model"]
    model = importlib.import_module("python_backends.llm.model")
    set_to: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", set_to.append)
    engine = {"type": "tensorrt_llm", "weights": weights, "tensor_parallel": gpus} if gpus else {"type": "paced"}
    parameters = {"engine": json.dumps(engine), "router": '{"name": "single"}', "models": '["slm"]', "index": "0"}
    model._build("slm", parameters)
    assert set_to == threads


def test_hidden_states_are_refused_by_name(fake: Fake, weights: str) -> None:
    with pytest.raises(ValueError, match=r"tensorrt_llm has no hidden states.*use llama_cpp"):
        build_engine(parse_engine_config({"type": "tensorrt_llm", "weights": weights}), "slm", hidden_states=True)


def test_loading_that_fails_is_one_line(fake: Fake, weights: str) -> None:
    fake.load_error = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
    with pytest.raises(EngineError, match=r"OutOfMemoryError: CUDA out of memory\. Tried to allocate"):
        Rig(weights)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["config.json can't be read", "allowed: a Hugging Face model's folder or name"]),
        ({"config.json": "{"}, ["config.json isn't JSON"]),
        ({"config.json": "[]"}, ["config.json must hold a JSON object"]),
        ({"config.json": "{}"}, ["gives no vocab_size"]),
        ({"config.json": '{"vocab_size": 9}'}, ["gives an eos_token_id"]),
        ({"config.json": '{"vocab_size": 9, "eos_token_id": []}'}, ["gives an eos_token_id"]),
    ],
)
def test_a_checkpoint_that_says_too_little(fake: Fake, tmp_path: Path, files: dict[str, str], words: list[str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        Rig(str(tmp_path))
    assert all(word in str(caught.value) for word in ["weights: ", *words])


def test_a_checkpoint_with_a_text_model_of_its_own(fake: Fake, tmp_path: Path) -> None:
    config = {"text_config": {"vocab_size": VOCAB, "eos_token_id": 4}, "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Rig(str(tmp_path)).engine.capacity().eos_token_ids == (4,)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["weights", "required"]),
        ({"weights": "x", "tokens_per_block": 24}, ["tokens_per_block: got 24", "8, 16, 32, 64, 128"]),
        ({"weights": "x", "tokens_per_block": 256}, ["tokens_per_block", "128"]),
        ({"weights": "x", "prefill_chunk": 100}, ["prefill_chunk: got 100", "multiple of tokens_per_block (32)"]),
        ({"weights": "x", "max_tokens": 100}, ["max_tokens: got 100", "context_tokens (4096)"]),
        ({"weights": "x", "pending": "true"}, ["pending", "reuse", "kept"]),
        ({"weights": "x", "free_memory_fraction": 1}, ["free_memory_fraction", "less than 1"]),
        ({"weights": "x", "retention_priority": 101}, ["retention_priority", "100"]),
        ({"weights": "x", "tensor_parallel": 0}, ["tensor_parallel", "greater than 0"]),
        ({"weights": "x", "gpu_device_ids": [1, 1]}, ["gpu_device_ids", "got [1, 1]; must name each GPU once"]),
        ({"weights": "x", "gpu_device_ids": []}, ["gpu_device_ids", "at least 1"]),
        ({"weights": "x", "gpu_device_ids": [-1]}, ["gpu_device_ids.0", "greater than or equal to 0"]),
        (
            {"weights": "x", "gpu_device_ids": [2, 3], "tensor_parallel": 4},
            ["gpu_device_ids: got [2, 3]", "must name 4: one for each rank"],
        ),
    ],
)
def test_a_wrong_configuration_is_named(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_engine_config({"type": "tensorrt_llm", **settings})
    assert all(word in str(caught.value) for word in words)


def test_a_name_is_looked_up_where_transformers_keeps_models(
    fake: Fake, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def cached_file(name: str, file: str) -> str:
        asked.append((name, file))
        if file != "config.json":
            raise OSError("no such file")
        return f"{weights}/{file}"

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    assert Rig("Qwen/Qwen3-8B").engine.capacity().eos_token_ids == (1,)  # there is no generation_config.json
    assert asked == [("Qwen/Qwen3-8B", "config.json"), ("Qwen/Qwen3-8B", "generation_config.json")]
    assert fake.llm_arguments["model"] == "Qwen/Qwen3-8B"
