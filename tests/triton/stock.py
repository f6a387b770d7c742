# SPDX-License-Identifier: Apache-2.0
"""Deployments of stock `tensorrtllm` models: on the stand-in here, or on the real backend.

With TOKENROUTER_STOCK_DEPLOYMENT, the path of a deployment file with two such models, the tests run on the Triton that
is there and on those engines (`make test-gpu`, docs/tensorrt_llm.md). Without it, on the stand-in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from python_backends.llm.engines.config import EngineConfig, TensorRTLLMBackendConfig
from tools.deployment import Deployment, load_deployment
from tools.supervisor import RunningServer, running_server

BACKEND = Path(__file__).parent / "backends" / "tensorrtllm"
REAL = os.environ.get("TOKENROUTER_STOCK_DEPLOYMENT")
TOKENS_PER_BLOCK = 16
_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}


def engine_folder(folder: Path, engine: Mapping[str, Any], vocab_size: int, **build: Any) -> Path:
    """What trtllm-build would leave, as far as it is read, around one of our engines. build: of `build_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "pretrained_config": {"vocab_size": vocab_size, "logits_dtype": "float32"},
        "build_config": {
            "max_batch_size": 64,
            "max_seq_len": engine["context_tokens"],
            "max_num_tokens": 8192,
            "gather_generation_logits": engine["type"] != "paced",
            "plugin_config": {"tokens_per_block": TOKENS_PER_BLOCK, "use_paged_context_fmha": True},
        }
        | build,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "stand_in.json").write_text(json.dumps(dict(engine)))
    return folder


def stock_engine(folder: Path, **settings: Any) -> dict[str, Any]:
    """The `engine` section of a stock model with that engine."""
    return {
        "type": "tensorrtllm", "engine_dir": str(folder), "tokens_per_block": TOKENS_PER_BLOCK, "prefill_chunk": 256,
    } | settings  # fmt: skip


def max_seq_len(engine: EngineConfig) -> int:
    """The longest sequence that the engine of a stock model was built for, as its own file says."""
    assert isinstance(engine, TensorRTLLMBackendConfig)
    build = json.loads((Path(engine.engine_dir) / "config.json").read_text())["build_config"]
    longest: int = build["max_seq_len"]
    return longest


@contextmanager
def stock_server(deployment: Deployment) -> Iterator[RunningServer]:
    """The deployment served, on the stand-in unless the real backend is meant."""
    before = os.environ.get("TOKENROUTER_BACKENDS")
    if REAL is None:
        os.environ["TOKENROUTER_BACKENDS"] = str(BACKEND)
    try:
        with running_server(deployment) as server:
            yield server
    finally:
        if before is None:
            os.environ.pop("TOKENROUTER_BACKENDS", None)
        else:
            os.environ["TOKENROUTER_BACKENDS"] = before


def real_deployment(**parts: Any) -> Deployment:
    """The deployment of TOKENROUTER_STOCK_DEPLOYMENT on free ports. parts: sections to replace."""
    assert REAL is not None
    deployment = load_deployment(REAL)
    data = deployment.model_dump() | parts
    data["server"] = deployment.server.model_dump() | _PORTS
    return Deployment.model_validate(data)


def infer(
    server: RunningServer,
    model: str,
    outputs: tuple[str, ...] = ("output_ids", "sequence_length"),
    request_id: str = "",
    **inputs: Any,
) -> triton.InferResult:
    """One request to the stock model itself, as its own clients send it."""
    types = {"stop": bool, "streaming": bool, "return_perf_metrics": bool, "return_generation_logits": bool}
    tensors = []
    for name, value in inputs.items():
        array = np.array([value], types.get(name, np.int32)).reshape(1, -1)
        tensor = triton.InferInput(name, list(array.shape), "BOOL" if array.dtype == bool else "INT32")
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    with triton.InferenceServerClient(server.grpc_url) as client:
        return client.infer(
            model, tensors, outputs=[triton.InferRequestedOutput(n) for n in outputs], request_id=request_id
        )


def requests_made(server: RunningServer, model: str) -> int:
    with triton.InferenceServerClient(server.grpc_url) as client:
        (stats,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return int(stats["inference_count"])
