# SPDX-License-Identifier: Apache-2.0
"""The installed `tensorrt_llm`: whether there is one, of which version, and its modules."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from importlib import metadata
from itertools import takewhile
from typing import Any

from python_backends.llm.engines.base import EngineError

__all__ = ["SUPPORTED", "import_package", "minor_version", "package_problem"]

SUPPORTED = ("1.0", "1.1", "1.2")

_IMAGE = "tritonserver:26.07-trtllm-python-py3 has 1.2.1"
_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # an MPI launcher has started this process
_LAUNCHER = ("OMPI_", "PMIX_", "PMI_")
_ALLOWS = "OMPI_ALLOW_"  # said by a person, not by a launcher
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def minor_version(version: str) -> str:
    """The recorded version that this one is of: "1.2.1" -> "1.2". Raises EngineError when it is of none.

    A pre-release is of none: names moved between those.
    """
    minor = ".".join(version.split(".")[:2])
    if minor not in SUPPORTED or any(c.isalpha() for c in version.split("+", maxsplit=1)[0].replace("post", "")):
        raise EngineError(
            f"tensorrt_llm: version {version} is installed; allowed: {', '.join(f'{v}.x' for v in SUPPORTED)}"
            f" (the image {_IMAGE})"
        )
    return minor


def package_problem() -> str | None:
    """Why the engine couldn't start here, in one line, without importing the package (that takes seconds and a GPU)."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        return f"tensorrt_llm isn't installed here; the image {_IMAGE}"
    try:
        minor_version(metadata.version("tensorrt_llm"))
    except metadata.PackageNotFoundError:
        return None  # there without its metadata: the engine looks at it when it starts
    except EngineError as error:
        return str(error)
    return None


def import_package(tensor_parallel: int, gpu_device_ids: Sequence[int] | None = None) -> Any:
    """The module `tensorrt_llm`. Raises EngineError, one line, when it isn't installed or can't be imported, ValueError
    for GPUs that aren't there.

    The environment is set first, for the package looks at it when it is imported and when an LLM is made:

    - One rank runs in this process, not in a worker process (executor/executor.py, 1.1.0rc6: read as
      TLLM_WORKER_USE_SINGLE_PROCESS): only so can logits stay on the GPU.
    - More ranks are spawned by mpi4py from this process, if it is alone in its MPI world (llmapi/mpi_session.py,
      need_spawn_mpi_workers). So it must not look as if mpirun had started it: what an mpirun of the server left
      is taken out, as NVIDIA's llmapi/model.py for Triton does.
    - Rank r takes GPU r modulo their number (executor/base_worker.py, a copy of 1.2's time; worker.py, one before 1.0).
      So only the model's own are made visible, and spawned ranks inherit that.
    """
    if gpu_device_ids is not None:
        _see_only(gpu_device_ids)
    if tensor_parallel == 1:
        os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] = "1"
    if any(name in os.environ for name in _RANK):
        for name in [n for n in os.environ if n.startswith(_LAUNCHER) and not n.startswith(_ALLOWS)]:
            del os.environ[name]
    package = _imported()
    if gpu_device_ids is not None:
        _require_seen(gpu_device_ids)
    return package


def _see_only(gpus: Sequence[int]) -> None:
    """Let this process, and those that it starts, see only these of the GPUs that it sees, in this order. CUDA looks at
    that once, when it is first used. Raises ValueError when there is no such GPU."""
    said = os.environ.get(_VISIBLE)
    if said is None:
        os.environ[_VISIBLE] = ",".join(map(str, gpus))
        return
    # CUDA's own reading: it ends at the first entry that is none
    seen = list(takewhile(lambda name: name and not name.startswith("-"), (name.strip() for name in said.split(","))))
    if max(gpus) >= len(seen):
        raise ValueError(
            f"gpu_device_ids: got {list(gpus)}; {_VISIBLE}={said} lets the server see {len(seen)}, numbered from 0"
        )
    os.environ[_VISIBLE] = ",".join(seen[gpu] for gpu in gpus)


def _require_seen(gpus: Sequence[int]) -> None:
    """Raises ValueError when CUDA sees another number of GPUs: there are fewer, or it was in use before `_see_only`."""
    import torch

    if (count := torch.cuda.device_count()) != len(gpus):
        raise ValueError(
            f"gpu_device_ids: got {list(gpus)}; CUDA sees {count} with {_VISIBLE}={os.environ[_VISIBLE]}; allowed: GPUs"
            " that nvidia-smi lists"
        )


def _imported() -> Any:
    try:
        return importlib.import_module("tensorrt_llm")
    except ModuleNotFoundError as error:
        if error.name == "tensorrt_llm":
            raise EngineError(f"tensorrt_llm isn't installed in this process's Python; the image {_IMAGE}") from None
        raise EngineError(f"tensorrt_llm can't be imported: {error}") from error
    except (ImportError, OSError, RuntimeError) as error:  # no driver, no libraries, MPI that can't start
        raise EngineError(f"tensorrt_llm can't be imported: {' '.join(str(error).split())}") from error
