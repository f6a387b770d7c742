# SPDX-License-Identifier: Apache-2.0
"""Checking models of the stock `tensorrtllm` backend against the files of their engines, and against this Triton."""

from __future__ import annotations

from collections.abc import Iterator

from python_backends.llm.engines.config import TensorRTLLMBackendConfig
from python_backends.llm.engines.stock_facts import engine_mismatches, stock_facts
from tools.deployment import Deployment
from tools.errors import UserError
from tools.problem import Problem
from tools.triton_install import find_triton

__all__ = ["stock_problems"]


def stock_problems(deployment: Deployment) -> Iterator[Problem]:
    """What keeps them from being loaded here, or from being what the deployment says they are."""
    engines = {index: deployment.models[index].engine for index in deployment.here}
    stock = {i: e for i, e in engines.items() if isinstance(e, TensorRTLLMBackendConfig)}
    if not stock:
        return
    if not _has_backend():
        yield Problem(
            f"models[{min(stock)}].engine.type",
            "'tensorrtllm'",
            "this Triton has no such backend",
            "images tritonserver:25.09 to 26.07-trtllm-python-py3 do; after TensorRT-LLM 1.2 it is gone:"
            " use the engine tensorrt_llm",
        )
    for index, engine in stock.items():
        where = f"models[{index}].engine"
        try:
            for field, value, allowed in engine_mismatches(engine):
                yield Problem(f"{where}.{field}", value, allowed)
            stock_facts(engine)
        except ValueError as error:
            yield Problem(f"{where}.engine_dir", repr(engine.engine_dir), str(error))


def _has_backend() -> bool:
    try:
        return find_triton().has_stock_backend
    except UserError:
        return True  # there is no Triton at all, which the start will say
