# SPDX-License-Identifier: Apache-2.0
"""A package `tensorrt_llm` with the real one's names and signatures, as far as the engine uses them, over a toy model.

Logits are a function of the tokens whose KV is held, so a step that drops, doubles or forgets one shows in every token
after it. Buffers are overwritten by the next step, as the real ones are.
"""

from __future__ import annotations

import inspect
import pickle
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from python_backends.llm.engines.paced import PrefixHash

VOCAB = 50
EOS = 2
CHUNK = 8  # tokens of one step of the fake's own chunked prefill


def toy_logits(kv: Sequence[int]) -> torch.Tensor:
    """FP32 [VOCAB] after these tokens."""
    prefix = PrefixHash("toy")
    prefix.extend(kv)
    generator = torch.Generator().manual_seed(prefix.next_token(1 << 31, 0))
    return torch.randn(VOCAB, generator=generator) * 3


class RequestError(RuntimeError):
    """executor/utils.py."""


@dataclass
class Fake:
    """What the engine did, and what is to go wrong.

    sent: prompt, SamplingParams and retention of each request. computed: tokens that each took, KV reused or not.
    steps: rows (context, generation) of each forward step of kept sessions. held: sequences that hold KV now.
    apart: passes by which the executor takes each request later than the one sent before it.
    stream: the executor's own (1.2), None without a GPU. order: "forward" for each forward step, and what a test adds.
    """

    version: str
    sent: list[SimpleNamespace] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    held: dict[int, list[int]] = field(default_factory=dict)
    stored: set[tuple[int, ...]] = field(default_factory=set)
    llm_arguments: dict[str, Any] = field(default_factory=dict)
    shut_down: int = 0
    aborted: int = 0
    refuse: set[int] = field(default_factory=set)
    refuse_at_once: set[int] = field(default_factory=set)
    break_at: set[int] = field(default_factory=set)
    load_error: Exception | None = None
    processes_logits: bool = True
    pool_tokens: int = 10_000
    apart: int = 0
    stream: Any = None
    order: list[str] = field(default_factory=list)

    def reused(self, tokens: Sequence[int]) -> int:
        """Of the front of a sequence; its last token is always computed."""
        return max((n for n in range(len(tokens)) if tuple(tokens[:n]) in self.stored), default=0)

    def store(self, tokens: Sequence[int]) -> None:
        self.stored |= {tuple(tokens[:n]) for n in range(1, len(tokens) + 1)}


def install(monkeypatch: pytest.MonkeyPatch, version: str = "1.2.1") -> Fake:
    """Put the package into sys.modules for this test."""
    fake = Fake(version)
    for name, module in _modules(fake).items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def _modules(fake: Fake) -> dict[str, ModuleType]:
    public, private = _public(fake), _private(fake)
    names: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {"__version__": fake.version, "LLM": public["LLM"], "SamplingParams": public["SamplingParams"]},
        "tensorrt_llm.llmapi": {k: public[k] for k in _LLMAPI},
        "tensorrt_llm.llmapi.llm_args": {"TorchLlmArgs": public["TorchLlmArgs"]},
        "tensorrt_llm.sampling_params": {"LogitsProcessor": public["LogitsProcessor"]},
        "tensorrt_llm.executor": {},
        "tensorrt_llm.executor.result": {"CompletionOutput": CompletionOutput},
        "tensorrt_llm.executor.utils": {"RequestError": RequestError},
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.pyexecutor": {},
        "tensorrt_llm._torch.pyexecutor.scheduler": {"ScheduledRequests": private["ScheduledRequests"]},
        "tensorrt_llm._torch.pyexecutor.model_engine": {"ModelEngine": private["ModelEngine"]},
        "tensorrt_llm._torch.pyexecutor.resource_manager": {"ResourceManager": private["ResourceManager"]},
        "tensorrt_llm._torch.pyexecutor.py_executor": {"PyExecutor": private["PyExecutor"]},
        "tensorrt_llm._torch.pyexecutor.llm_request": {
            k: private[k] for k in ("LlmRequest", "LlmRequestState", "SamplingConfig")
        },
    }
    modules = {name: ModuleType(name) for name in names}
    for name, values in names.items():
        vars(modules[name]).update(values)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, modules[name])
    public["executor_of"].append(private["executor"])
    return modules


_LLMAPI = ("RequestOutput", "KvCacheConfig", "CudaGraphConfig", "KvCacheRetentionConfig")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class CudaGraphConfig(_Strict):
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


class KvCacheConfigWithoutBlocks(_Strict):
    """As of 1.0."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    host_cache_size: int | None = None
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    dtype: str = "auto"


class KvCacheConfig(KvCacheConfigWithoutBlocks):
    tokens_per_block: int = 32


class TorchLlmArgs(_Strict):
    model: str
    skip_tokenizer_init: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    kv_cache_config: Any = None
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = 8192
    enable_chunked_prefill: bool = False
    cuda_graph_config: CudaGraphConfig | None = None
    disable_overlap_scheduler: bool = False
    gather_generation_logits: bool = False


@dataclass(slots=True)
class CompletionOutput:
    token_ids: list[int]
    generation_logits: torch.Tensor | None = None


class KvCacheRetentionConfig:
    @dataclass(slots=True)
    class TokenRangeRetentionConfig:
        token_start: int
        token_end: int | None
        priority: int
        duration_ms: Any = None

    def __init__(self, token_range_retention_configs: list[Any], decode_retention_priority: int, *more: Any) -> None:
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    logits_processor: Any = None
    top_k: int | None = None
    return_generation_logits: bool = False
    ignore_eos: bool = False
    detokenize: bool = True

    def _get_sampling_config(self) -> object:
        return object()


class LogitsProcessor:
    def __call__(
        self, req_id: int, logits: torch.Tensor, token_ids: Any, stream_ptr: int | None, client_id: int | None
    ) -> None: ...


def _public(fake: Fake) -> dict[str, Any]:
    buffer = torch.zeros(1, 1, VOCAB)  # one for all requests
    executor_of: list[Any] = []

    active: list[RequestOutput] = []

    class RequestOutput:
        def __init__(self, sent: SimpleNamespace) -> None:
            self._sent = sent
            self._taken: list[int] = []
            self._waits = fake.apart * len(active)
            pickle.dumps(sent.params.logits_processor)  # for ranks that aren't there
            self._error: Exception | None = None
            self._done = False
            self._outputs = [CompletionOutput(self._taken)]
            active.append(self)

        @property
        def outputs(self) -> list[CompletionOutput]:
            return self._outputs

        @property
        def finished(self) -> bool:
            return self._done

        def result(self, timeout: float | None = None) -> RequestOutput:
            if not self._done:
                executor = threading.Thread(target=self._passes)  # the processors run in its thread, not in ours
                executor.start()
                executor.join()
            if self._error is not None:
                raise self._error
            return self

        def _passes(self) -> None:
            """Of the executor, over all requests that it has, until this one has ended or a pass has failed."""
            with torch.inference_mode():
                while not self._done and self._error is None:
                    for request in list(active):
                        request._step()
                        if isinstance(request._error, RuntimeError) and not isinstance(request._error, RequestError):
                            self._error = request._error
                            break

        def _step(self) -> None:
            """A forward pass's part of it, and what the sampler does."""
            if self._waits:
                self._waits -= 1
                return
            params, tokens = self._sent.params, [*self._sent.tokens, *self._taken]
            if tokens[-1] in fake.break_at:
                self._error = RuntimeError("CUDA error:\nan illegal memory access")
                return
            if tokens[-1] in fake.refuse:
                self._error = RequestError(f"token {tokens[-1]} isn't liked")
                self._end()
                return
            begin = len(tokens) - 1 if self._taken else fake.reused(tokens)
            fake.computed.append(len(tokens) - begin)
            for end in (*range(begin + CHUNK, len(tokens), CHUNK), len(tokens)):
                buffer.copy_(toy_logits(tokens[:end]))
                if params.logits_processor is not None and fake.processes_logits:
                    assert 4 <= len(inspect.signature(params.logits_processor).parameters) <= 5
                    params.logits_processor(7, buffer, [tokens], None, None)
            if params.return_generation_logits:
                self.outputs[0].generation_logits = toy_logits(tokens)[None].half()
            self._taken.append(int(buffer.argmax()))
            buffer.fill_(torch.nan)
            fake.store(tokens)  # all but the token just taken
            if len(self._taken) == params.max_tokens or (self._taken[-1] == params.end_id and not params.ignore_eos):
                self._end()

        def _end(self) -> None:
            self._done = True
            active.remove(self)

        def abort(self) -> None:
            fake.aborted += 1
            active.remove(self)

    class LLM:
        def __init__(
            self,
            model: str,
            tokenizer: Any = None,
            tokenizer_mode: str = "auto",
            skip_tokenizer_init: bool = False,
            trust_remote_code: bool = False,
            tensor_parallel_size: int = 1,
            dtype: str = "auto",
            revision: str | None = None,
            tokenizer_revision: str | None = None,
            **kwargs: Any,
        ) -> None:
            if fake.load_error is not None:
                raise fake.load_error
            self.args = TorchLlmArgs(
                model=model,
                skip_tokenizer_init=skip_tokenizer_init,
                tensor_parallel_size=tensor_parallel_size,
                dtype=dtype,
                **kwargs,
            )
            fake.llm_arguments = dict(self.args)
            self._executor = SimpleNamespace(engine=executor_of[0])

        def generate_async(
            self,
            inputs: Any,
            sampling_params: SamplingParams | None = None,
            lora_request: Any = None,
            prompt_adapter_request: Any = None,
            streaming: bool = False,
            kv_cache_retention_config: Any = None,
            disaggregated_params: Any = None,
            _postproc_params: Any = None,
            scheduling_params: Any = None,
            cache_salt: str | None = None,
        ) -> RequestOutput:
            tokens = inputs["prompt_token_ids"]
            assert isinstance(tokens, list) and sampling_params is not None
            assert sampling_params.end_id is not None  # no tokenizer, no default
            assert len(tokens) + sampling_params.max_tokens <= (self.args.max_seq_len or 0)
            assert self.args.tensor_parallel_size == 1 or sampling_params.logits_processor is None
            assert not sampling_params.return_generation_logits or self.args.gather_generation_logits
            if tokens[-1] in fake.refuse_at_once:
                raise RequestError(f"token {tokens[-1]} isn't taken")
            sent = SimpleNamespace(tokens=tokens, params=sampling_params, retention=kv_cache_retention_config)
            fake.sent.append(sent)
            return RequestOutput(sent)

        def shutdown(self) -> None:
            fake.shut_down += 1

    return {
        "LLM": LLM,
        "SamplingParams": SamplingParams,
        "RequestOutput": RequestOutput,
        "KvCacheConfig": KvCacheConfigWithoutBlocks if fake.version.startswith("1.0") else KvCacheConfig,
        "CudaGraphConfig": CudaGraphConfig,
        "KvCacheRetentionConfig": KvCacheRetentionConfig,
        "TorchLlmArgs": TorchLlmArgs,
        "LogitsProcessor": LogitsProcessor,
        "executor_of": executor_of,
    }


class LlmRequestState(Enum):
    CONTEXT_INIT = 2
    GENERATION_IN_PROGRESS = 3


class LlmRequest:
    """The C++ request's part of it: tokens, and where its context stands. No slot, no KV: those are the managers'."""

    state: LlmRequestState = LlmRequestState.CONTEXT_INIT
    context_current_position = 0
    context_chunk_size = 0
    prompt_len = 0

    def __init__(
        self, *, request_id: int, max_new_tokens: int, input_tokens: list[int], sampling_config: Any, is_streaming: bool
    ) -> None:
        self.py_request_id = request_id
        self.tokens = list(input_tokens)
        self.prompt_len = len(input_tokens)

    def add_new_token(self, token: int, beam: int) -> None:
        assert beam == 0 and self.state is LlmRequestState.GENERATION_IN_PROGRESS
        self.tokens.append(token)

    def move_to_next_context_chunk(self) -> None:
        self.context_current_position += self.context_chunk_size


class SamplingConfig:
    def __init__(self, config: object) -> None: ...


class ScheduledRequests:
    def __init__(self) -> None:
        self.context_requests: list[LlmRequest] = []
        self.generation_requests: list[LlmRequest] = []
        self.paused_requests: list[LlmRequest] = []


def _private(fake: Fake) -> dict[str, Any]:
    class ResourceManager:
        def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
            for request in scheduled_batch.context_requests:
                assert request.py_request_id not in fake.held
                request.context_current_position = fake.reused(request.tokens)
                fake.held[request.py_request_id] = request.tokens[: request.context_current_position]
            for request in scheduled_batch.generation_requests:
                assert len(fake.held[request.py_request_id]) == len(request.tokens) - 1
            new = sum(len(r.tokens) for r in scheduled_batch.context_requests)
            if new + sum(map(len, fake.held.values())) > fake.pool_tokens:
                raise RuntimeError("Can't allocate new blocks. No free blocks left.")

        def update_resources(
            self, scheduled_batch: ScheduledRequests, attn_metadata: Any = None, kv_cache_dtype_byte_size: Any = None
        ) -> None:
            for request in scheduled_batch.context_requests:
                assert request.context_current_position == request.prompt_len
                fake.store(request.tokens)

        def free_resources(self, request: LlmRequest) -> None:
            fake.store(fake.held.pop(request.py_request_id)[:-1])

    class ModelEngine:
        def forward(
            self,
            scheduled_requests: ScheduledRequests,
            resource_manager: ResourceManager,
            new_tensors_device: Any,
            gather_context_logits: bool = False,
            cache_indirection_buffer: Any = None,
            num_accepted_tokens_device: Any = None,
        ) -> dict[str, torch.Tensor]:
            assert new_tensors_device is None
            fake.order.append("forward")
            rows = []
            for request in scheduled_requests.context_requests:
                begin = request.context_current_position
                new = request.tokens[begin : begin + request.context_chunk_size]
                fake.computed.append(len(new))
                fake.held[request.py_request_id] += new
                rows.append(toy_logits(fake.held[request.py_request_id]))
            for request in scheduled_requests.generation_requests:
                if request.tokens[-1] in fake.break_at:
                    raise RuntimeError("CUDA error")
                fake.computed.append(1)
                fake.held[request.py_request_id].append(request.tokens[-1])
                rows.append(toy_logits(fake.held[request.py_request_id]))
            fake.steps.append((len(scheduled_requests.context_requests), len(scheduled_requests.generation_requests)))
            return {"logits": torch.stack([*rows, torch.full((VOCAB,), torch.nan)])}  # padded for a CUDA graph

    class PyExecutor:
        def __init__(
            self,
            resource_manager: Any,
            scheduler: Any,
            model_engine: Any,
            sampler: Any,
            dist: Any,
            max_num_sequences: int,
            disable_overlap_scheduler: bool = False,
            execution_stream: Any = None,
        ) -> None:
            self.resource_manager = resource_manager
            self.model_engine = model_engine

        if fake.version.startswith("1.2"):
            execution_stream = property(lambda self: fake.stream)

    return {
        "ResourceManager": ResourceManager,
        "ModelEngine": ModelEngine,
        "PyExecutor": PyExecutor,
        "ScheduledRequests": ScheduledRequests,
        "LlmRequest": LlmRequest,
        "LlmRequestState": LlmRequestState,
        "SamplingConfig": SamplingConfig,
        "executor": PyExecutor(ResourceManager(), None, ModelEngine(), None, None, 8),
    }
