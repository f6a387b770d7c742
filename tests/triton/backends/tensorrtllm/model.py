# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NVIDIA's C++ backend `tensorrtllm`: its tensors and its errors, on our own engines.

It loads the config.pbtxt that `tokenrouter prepare` renders for the real one, unchanged. The engine's folder has the
config.json that trtllm-build writes, as far as it is read, and stand_in.json: the `engine` section of one of ours.
Error texts are those of TensorRT-LLM 1.0 to 1.2 (utils.cc, model_instance_state.cc, llmRequest.h, executorImpl.cpp).
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

sys.path.insert(0, str(Path(__file__).parent))  # a stub doesn't look there

from block_cache import DEFAULT_PRIORITY, BlockCache, Retention
from inflight import Inflight, Job

from python_backends.llm.engines import build_engine, parse_engine_config
from python_backends.stub import exit_with_parent

_NO_END = -1
_DONE = {  # inputs that the stand-in acts on; of the others, a value that asks for something is refused
    "input_ids", "input_lengths", "request_output_len", "end_id", "pad_id", "runtime_top_k", "return_generation_logits",
    "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output", "stop",
    "streaming", "beam_width", "retention_token_range_starts", "retention_token_range_ends",
    "retention_token_range_priorities", "retention_token_range_durations_ms", "retention_decode_priority",
    "retention_decode_duration_ms",
}  # fmt: skip


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        exit_with_parent()
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._check(parameters)
        folder = Path(parameters["gpt_model_path"])
        build = json.loads((folder / "config.json").read_text())["build_config"]
        engine = parse_engine_config(json.loads((folder / "stand_in.json").read_text()))
        self._engine = build_engine(engine, config["name"], False)
        size = build["plugin_config"]["tokens_per_block"]
        kv_tokens = int(parameters.get("max_tokens_in_paged_kv_cache", engine.max_sessions * engine.context_tokens))
        self._gathers = build["gather_generation_logits"]
        self._max_input_len = build["max_seq_len"] - 1
        if parameters.get("enable_chunked_context") != "true":
            self._max_input_len = min(self._max_input_len, build["max_num_tokens"])
        self._max_seq_len = build["max_seq_len"]
        self._excludes_input = parameters.get("exclude_input_in_output") == "true"
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        (logits,) = (o for o in config["output"] if o["name"] == "generation_logits")
        self._logits_type = pb.triton_string_to_numpy(logits["data_type"])
        reuse = parameters.get("enable_kv_cache_reuse") == "true"
        cache = BlockCache(kv_tokens // size, size, time.monotonic, reuse)
        self._inflight = Inflight(self._engine, cache, exact=getattr(engine, "deterministic", False))
        self._running: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def _check(self, parameters: dict[str, str]) -> None:
        if parameters.get("gpt_model_type") not in ("V1", "v1", "inflight_batching", "inflight_fused_batching"):
            raise pb.TritonModelException(
                "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching."
            )
        for name in ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend"):
            if name not in parameters:
                raise pb.TritonModelException(f"Cannot find parameter with name: {name}")
        path = parameters.get("gpt_model_path", "")
        if not Path(path).exists():
            raise pb.TritonModelException("Both encoder and decoder model paths are empty")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except (ValueError, RuntimeError) as error:
                _refuse(sender, str(error))

    def finalize(self) -> None:
        self._inflight.close()
        self._engine.close()

    def _take(self, request: Any, sender: Any) -> None:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if _flag(inputs, "stop"):
            self._stop(request.request_id())
            sender.send(pb.InferenceResponse([]), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        job = self._job(inputs)
        wanted = set(request.requested_output_names())
        flags = {name: _flag(inputs, name) for name in ("return_perf_metrics", "return_num_input_tokens",
                                                        "return_num_output_tokens")}  # fmt: skip
        excludes = _flag(inputs, "exclude_input_in_output", self._excludes_input)
        number = next(self._numbers)
        job.request_id = request.request_id()

        def done(job: Job) -> None:
            with self._lock:
                if self._running.get(job.request_id) is job:
                    del self._running[job.request_id]
            if job.error is not None:
                _refuse(sender, f"Executor failed process requestId {number} due to the following error: {job.error}")
                return
            for name in ("output_ids", "sequence_length"):
                if name not in wanted:
                    text = f"{name} tensor must be present in list of output tensors (model_instance_state.cc:1)\n1 ..."
                    _refuse(sender, f"Error encountered while populating response: {text}")
                    return
            outputs = [pb.Tensor(n, v) for n, v in self._outputs(job, wanted, flags, excludes).items()]
            sender.send(pb.InferenceResponse(outputs), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

        job.done = done
        if len(job.prompt) > self._max_input_len:
            job.error = (
                "Encountered an error when fetching new request: "
                f"Prompt length ({len(job.prompt)}) exceeds maximum input length ({self._max_input_len}). Set log level"
                " to info and check TRTGptModel logs for how maximum input length is set"
                " (/app/tensorrt_llm/include/tensorrt_llm/batch_manager/llmRequest.h:1)\n1 0x0 ..."
            )
            job.done(job)
            return
        job.max_tokens = min(job.max_tokens, self._max_seq_len - len(job.prompt))
        with self._lock:
            if job.request_id:
                self._running[job.request_id] = job
        self._inflight.submit(job)

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise RuntimeError("Trying to stop a request but request ID is not provided")
        with self._lock:
            if (job := self._running.get(request_id)) is not None:
                job.stopped = True

    def _job(self, inputs: dict[str, np.ndarray]) -> Job:
        """Raises RuntimeError with the text of the backend."""
        if len(inputs.get("input_ids", [0])) > 1:
            raise RuntimeError(
                "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
            )
        if _flag(inputs, "streaming") and not self._decoupled:
            raise RuntimeError("Streaming is only supported if model is deployed using decoupled mode.")
        if "input_ids" not in inputs:
            raise RuntimeError("input_ids or encoder_input_features is not present in the request.")
        if _number(inputs, "beam_width", 1) > 1:
            raise RuntimeError("the stand-in has no beam search")
        if others := [n for n in inputs if n not in _DONE]:
            raise RuntimeError(f"the stand-in doesn't do {', '.join(others)}")
        return Job(
            prompt=inputs["input_ids"].reshape(-1).tolist(),
            max_tokens=_number(inputs, "request_output_len", 1),
            end_id=_number(inputs, "end_id", None),
            wants_logits=self._gathers and _flag(inputs, "return_generation_logits"),
            prefills=self._gathers and not _flag(inputs, "return_generation_logits"),
            retention=_retention(inputs),
            done=lambda job: None,
        )

    def _outputs(self, job: Job, wanted: set[str], flags: dict[str, bool], excludes: bool) -> dict[str, np.ndarray]:
        assert job.lease is not None or job.stopped
        ids = job.output if excludes else [*job.prompt, *job.output]
        outputs = {
            "output_ids": np.array([[ids]], np.int32).reshape(1, 1, len(ids)),
            "sequence_length": np.array([[len(ids)]], np.int32),
        }
        if "generation_logits" in wanted and job.logits:
            outputs["generation_logits"] = np.array([[job.logits]], self._logits_type)
        for kind, count in (("input", len(job.prompt)), ("output", len(ids))):
            if flags[f"return_num_{kind}_tokens"] and f"num_{kind}_tokens" in wanted:
                outputs[f"num_{kind}_tokens"] = np.array([[count]], np.int32)
        if flags["return_perf_metrics"] and job.lease is not None:
            lease = job.lease
            for name, value in {
                "kv_cache_alloc_new_blocks": lease.new, "kv_cache_reused_blocks": lease.reused,
                "kv_cache_alloc_total_blocks": lease.new, "total_accepted_draft_tokens": 0, "total_draft_tokens": 0,
            }.items():  # fmt: skip
                outputs[name] = np.array([[value]], np.int32)
            for name in ("arrival", "first_scheduled", "first_token", "last_token"):
                outputs[f"{name}_time_ns"] = np.array([[job.times_ns.get(name, 0)]], np.int64)
            outputs["acceptance_rate"] = np.zeros((1, 1), np.float32)
        return outputs


def _refuse(sender: Any, message: str) -> None:
    error = pb.TritonError(message, pb.TritonError.INTERNAL)
    sender.send(pb.InferenceResponse([], error=error), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _flag(inputs: dict[str, np.ndarray], name: str, default: bool = False) -> bool:
    return bool(inputs[name].reshape(-1)[0]) if name in inputs else default


def _number(inputs: dict[str, np.ndarray], name: str, default: Any) -> Any:
    return int(inputs[name].reshape(-1)[0]) if name in inputs else default


def _retention(inputs: dict[str, np.ndarray]) -> Retention:
    """Of the first range, which has to begin the prompt and end with it: more isn't done here."""
    if "retention_token_range_starts" not in inputs:
        return Retention()
    values = {}
    for part in ("starts", "ends", "priorities", "durations_ms"):
        name = f"retention_token_range_{part}"
        if name not in inputs and part == "durations_ms":
            continue
        values[part] = inputs[name].reshape(-1).tolist() if name in inputs else []
        if len(values[part]) != len(values["starts"]):
            must = "must have" if part == "durations_ms" else "must be provided, and have"
            raise RuntimeError(f"{name} {must} the same length as retention_token_range_starts")
    if values["starts"] != [0] or values["ends"] != [_NO_END]:
        raise RuntimeError("the stand-in knows one retention range, from 0 to the prompt's end")
    if not 0 <= values["priorities"][0] <= 100:
        raise RuntimeError("the stand-in takes retention priorities from 0 to 100")
    return Retention(
        values["priorities"][0],
        _number(inputs, "retention_decode_priority", DEFAULT_PRIORITY),
        values.get("durations_ms", [None])[0],
    )
