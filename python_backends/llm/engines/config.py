# SPDX-License-Identifier: Apache-2.0
"""The `engine` section of a model: which engine, with which settings. Every default stands here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from python_backends.llm.engines.stock_parameters import FIELDS, PARAMETERS

__all__ = [
    "CALL_THREADS",
    "EngineConfig",
    "LlamaCppConfig",
    "PacedConfig",
    "TensorRTLLMBackendConfig",
    "TensorRTLLMConfig",
]

CALL_THREADS = 128  # that the server has for calls between models, and for answers to clients


def _each_once(gpus: list[int]) -> list[int]:
    if len(set(gpus)) != len(gpus):
        raise ValueError(f"got {gpus}; must name each GPU once")
    return gpus


_Gpus = Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_each_once)]


class _Config(BaseModel):
    """provides: what the engine can give a router at most (`Capacity.provides`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    provides: ClassVar[frozenset[str]] = frozenset()


class LlamaCppConfig(_Config):
    """llama.cpp, through llama-cpp-python."""

    provides = frozenset({"logits", "hidden_states", "embeddings", "token_bytes", "sampling"})

    type: Literal["llama_cpp"]
    weights: str = Field(description="a name of `tokenrouter models list`, or the path of a .gguf file")
    threads: PositiveInt = Field(
        1, description="CPU threads of a step; with 1 each, two LLMs don't slow each other on 2 cores"
    )
    gpu_layers: int = Field(0, ge=-1, description="layers on the GPU of a GPU build; -1 = all")
    context_tokens: PositiveInt = Field(4096, description="of one session, prompt and output together")
    max_sessions: int = Field(16, ge=1, le=256, description="sessions held at once (llama.cpp: up to 256)")
    kv_tokens: PositiveInt | None = Field(
        None,
        description="of all sessions together; null = max_sessions * context_tokens. Less only with deterministic:"
        " false, where all sessions share one buffer",
    )
    prefill_chunk: int = Field(128, ge=64, le=512, description="prompt tokens of one session in one step")
    deterministic: bool = Field(
        True,
        description="a greedy answer never depends on who else is served: prompts are prefilled in calls of"
        " their own, and every session has a KV buffer of its own",
    )

    @model_validator(mode="after")
    def _own_buffers(self) -> LlamaCppConfig:
        full = self.max_sessions * self.context_tokens
        if self.deterministic and self.kv_tokens not in (None, full):
            raise ValueError(
                f"kv_tokens: got {self.kv_tokens}; with deterministic: true every session has a KV buffer of its own,"
                f" max_sessions * context_tokens = {full} together; lower max_sessions, or set deterministic: false"
            )
        if self.kv_tokens is not None and self.kv_tokens > full:
            raise ValueError(
                f"kv_tokens: got {self.kv_tokens}; at most max_sessions * context_tokens = {full} are used"
            )
        return self

    @property
    def all_kv_tokens(self) -> int:
        """Of all sessions together."""
        return self.max_sessions * self.context_tokens if self.kv_tokens is None else self.kv_tokens


class PacedConfig(_Config):
    """No weights: each step takes a given time, the next token is a fixed function of the whole prefix."""

    type: Literal["paced"]
    step_ms: NonNegativeFloat = Field(5.0, description="time of one step")
    prefill_token_ms: NonNegativeFloat = Field(
        0.0, description="added for each token of a session beyond its first in a step"
    )
    vocab_size: int = Field(1000, ge=2)
    eos_every: int = Field(0, ge=0, description="on average every how many tokens the end of sequence comes; 0 = never")
    context_tokens: PositiveInt = 4096
    max_sessions: PositiveInt = 256
    kv_tokens: PositiveInt | None = Field(
        None, description="of all sessions together, for admission; null = max_sessions * context_tokens"
    )
    prefill_chunk: PositiveInt = 512


class TensorRTLLMBackendConfig(_Config):
    """A stock model of NVIDIA's C++ backend `tensorrtllm` (TensorRT-LLM up to 1.2), called by token_router itself.

    What the model can't be asked (vocab_size, context_tokens, eos_token_ids) is read from the files of the engine and
    of its checkpoint where it isn't given here (`stock_facts`). Settings of the backend that have no field of their
    own are given in `parameters`.
    """

    provides = frozenset({"logits", "sampling"})  # with return_logits

    type: Literal["tensorrtllm"]
    engine_dir: str = Field(description="folder of the engine that trtllm-build made")
    checkpoint: str | None = Field(
        None,
        description="folder of the Hugging Face checkpoint, for what isn't given here",
    )
    vocab_size: int | None = Field(None, ge=2, description="null = the engine's, else the checkpoint's")
    context_tokens: PositiveInt | None = Field(
        None, description="of one session, prompt and output together; null = the engine's max_seq_len"
    )
    eos_token_ids: list[NonNegativeInt] | None = Field(
        None, description="tokens that end a generation; null = the checkpoint's"
    )
    max_sessions: PositiveInt = Field(16, description="sessions held at once; at most the engine's max_batch_size")
    prefill_chunk: PositiveInt = Field(512, description="prompt tokens of one session in one step; whole blocks")
    tokens_per_block: PositiveInt = Field(32, description="of the engine's KV: what is reused")
    logits_dtype: Literal["fp32", "fp16"] = Field("fp32", description="as the engine was built: --logits_dtype")
    return_logits: bool = Field(
        True,
        description="false: no logits cross from the model, and it takes greedy requests only, under routers"
        " that need none",
    )
    run_tokens: int = Field(
        1,
        ge=1,
        le=64,
        description="tokens of one request; more than 1 only with return_logits: false. What a"
        " request makes after its session has left is thrown away",
    )
    calls_at_once: int = Field(
        32,
        ge=1,
        le=CALL_THREADS,
        description=f"requests of one step under way together; all models share the {CALL_THREADS} threads that"
        " the server has for such calls, and some must be left for others",
    )
    max_tokens: PositiveInt | None = Field(None, description="tokens in the paged KV; null = by the fraction")
    kv_cache_free_gpu_mem_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="of the GPU memory left at load for the KV; null = the backend's default, 0.9."
        " With two models on one GPU the first one loaded would leave little: give max_tokens",
    )
    kv_cache_host_memory_bytes: NonNegativeInt = Field(0, description="host memory for blocks evicted from the GPU")
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    cancellation_check_period_ms: PositiveInt = Field(5, description="how late a cancelled request may be noticed")
    gpu_device_ids: _Gpus | None = Field(
        None,
        description="of the GPUs that the server sees, by number: one for each rank of the engine, in order; null ="
        " one rank, on the first",
    )
    max_queue_delay_microseconds: NonNegativeInt = Field(0, description="Triton's, before it hands a request over")
    max_queue_size: NonNegativeInt = Field(0, description="requests that may wait in the executor; 0 = any number")
    retention_priority: int = Field(
        100, ge=0, le=100, description="of the KV blocks of sessions; others' have 35 unless they say so"
    )
    retention_ms: PositiveInt | None = Field(
        60_000, description="after so long without use a session's blocks have the priority of others'; null = never"
    )
    parameters: dict[str, str | bool | int | float] = Field(
        {}, description="more parameters of the backend, by its own names"
    )

    @field_validator("parameters")
    @classmethod
    def _known(cls, parameters: dict[str, str | bool | int | float]) -> dict[str, str | bool | int | float]:
        for name in parameters:
            if name in FIELDS:
                raise ValueError(f"{name}: is set by the field {FIELDS[name]}")
            if name not in PARAMETERS:
                raise ValueError(f"{name}: is no parameter of the backend; allowed: {', '.join(sorted(PARAMETERS))}")
        return parameters

    @model_validator(mode="after")
    def _fits(self) -> TensorRTLLMBackendConfig:
        if self.run_tokens > 1 and self.return_logits:
            raise ValueError(f"run_tokens: got {self.run_tokens}; must be 1 with return_logits: true")
        if self.prefill_chunk % self.tokens_per_block:
            raise ValueError(
                f"prefill_chunk: got {self.prefill_chunk}; must be a multiple of tokens_per_block"
                f" ({self.tokens_per_block}), or every chunk would compute the end of the one before it again"
            )
        return self

    @property
    def gpus(self) -> tuple[int, ...]:
        """Of those that the server sees: that of each rank, in order."""
        return tuple(self.gpu_device_ids or (0,))

    @property
    def tensor_parallel(self) -> int:
        """Ranks of the engine, as far as gpu_device_ids says."""
        return len(self.gpus)


class TensorRTLLMConfig(_Config):
    """TensorRT-LLM's PyTorch flow, through its Python LLM API: in the official Triton image, on NVIDIA GPUs."""

    provides = frozenset({"logits", "sampling"})

    type: Literal["tensorrt_llm"]
    weights: str = Field(description="a Hugging Face model: its folder, or its name, to be downloaded")
    tensor_parallel: PositiveInt = Field(
        1, description="GPUs that share the model; left out, as many as gpu_device_ids"
    )
    gpu_device_ids: _Gpus | None = Field(
        None,
        description="of the GPUs that the server sees, by number: one for each rank, in order; null = the first ones",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field("auto", description="auto = the model's")
    max_tokens: PositiveInt | None = Field(
        None,
        description="of KV, of all sessions together; null = as many as free_memory_fraction gives, or as the"
        " deployment's section memory says",
    )
    free_memory_fraction: float = Field(
        0.9, gt=0, lt=1, description="of the GPU memory that is free when it loads, for KV; with max_tokens, the less"
    )
    host_cache_bytes: NonNegativeInt = Field(0, description="of host memory, for KV blocks that the GPU has evicted")
    tokens_per_block: int = Field(32, ge=8, le=128, description="of KV; a power of two. A session takes whole blocks")
    context_tokens: PositiveInt = Field(4096, description="of one session, prompt and output together")
    max_sessions: int = Field(64, ge=1, le=2048, description="sessions held at once")
    prefill_chunk: PositiveInt = Field(
        512, description="prompt tokens of one session in one step; a multiple of tokens_per_block"
    )
    cuda_graphs: bool = Field(True, description="for steps in which every session brings one token to KV that is held")
    retention_priority: int = Field(
        100, ge=0, le=100, description="of a session's blocks among those that may be evicted (reuse); others' have 35"
    )
    pending: Literal["reuse", "kept"] = Field(
        "reuse",
        description="what holds a session between its steps: blocks that are reused, through the public API, or a"
        " request that keeps its KV (needs max_tokens, and tensor_parallel: 1), through names that TensorRT-LLM may"
        " change: where they have changed, reuse",
    )

    @model_validator(mode="before")
    @classmethod
    def _a_rank_on_each_gpu(cls, values: Any) -> Any:
        gpus = values.get("gpu_device_ids") if isinstance(values, dict) else None
        return {"tensor_parallel": len(gpus), **values} if isinstance(gpus, list) and gpus else values

    @model_validator(mode="after")
    def _one_gpu_for_each_rank(self) -> TensorRTLLMConfig:
        if len(self.gpus) != self.tensor_parallel:
            raise ValueError(
                f"gpu_device_ids: got {self.gpu_device_ids}; must name {self.tensor_parallel}: one for each rank"
                " (tensor_parallel)"
            )
        return self

    @model_validator(mode="after")
    def _whole_blocks(self) -> TensorRTLLMConfig:
        block = self.tokens_per_block
        if block & (block - 1):
            raise ValueError(f"tokens_per_block: got {block}; allowed: 8, 16, 32, 64, 128")
        if self.prefill_chunk % block:
            raise ValueError(
                f"prefill_chunk: got {self.prefill_chunk}; must be a multiple of tokens_per_block ({block})"
            )
        if self.max_tokens is not None and self.max_tokens < self.context_tokens:
            raise ValueError(
                f"max_tokens: got {self.max_tokens}; must hold one session at least: context_tokens"
                f" ({self.context_tokens})"
            )
        return self

    @property
    def gpus(self) -> tuple[int, ...]:
        """Of those that the server sees: that of each rank, in order."""
        return tuple(self.gpu_device_ids or range(self.tensor_parallel))

    @property
    def max_step_tokens(self) -> int:
        """Of one forward step: a whole context beside one token of every session."""
        return max(8192, self.context_tokens + self.max_sessions)


EngineConfig = Annotated[
    LlamaCppConfig | PacedConfig | TensorRTLLMBackendConfig | TensorRTLLMConfig, Field(discriminator="type")
]
