# SPDX-License-Identifier: Apache-2.0
"""The installed `tensorrt_llm`: whether there is one, of which version, and its modules."""

from __future__ import annotations

import importlib
import importlib.util
import os
from importlib import metadata
from typing import Any

from python_backends.llm.engines.base import EngineError

__all__ = ["SUPPORTED", "import_package", "minor_version", "package_problem"]

SUPPORTED = ("1.0", "1.1", "1.2")

_IMAGE = "tritonserver:26.07-trtllm-python-py3 has 1.2.1"
_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # an MPI launcher has started this process
_LAUNCHER = ("OMPI_", "PMIX_", "PMI_")
_ALLOWS = "OMPI_ALLOW_"  # said by a person, not by a launcher


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


def import_package(tensor_parallel: int) -> Any:
    """The module `tensorrt_llm`. Raises EngineError, one line, when it isn't installed or can't be imported.

    The environment is set first, for the package looks at it when it is imported and when an LLM is made:

    - One rank runs in this process, not in a worker process (executor/executor.py, 1.1.0rc6: read as
      TLLM_WORKER_USE_SINGLE_PROCESS): only so can logits stay on the GPU.
    - More ranks are spawned by mpi4py from this process, if it is alone in its MPI world (llmapi/mpi_session.py,
      need_spawn_mpi_workers). So it must not look as if mpirun had started it: what an mpirun of the server left
      is taken out, as NVIDIA's llmapi/model.py for Triton does.
    """
    if tensor_parallel == 1:
        os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] = "1"
    if any(name in os.environ for name in _RANK):
        for name in [n for n in os.environ if n.startswith(_LAUNCHER) and not n.startswith(_ALLOWS)]:
            del os.environ[name]
    try:
        return importlib.import_module("tensorrt_llm")
    except ModuleNotFoundError as error:
        if error.name == "tensorrt_llm":
            raise EngineError(f"tensorrt_llm isn't installed in this process's Python; the image {_IMAGE}") from None
        raise EngineError(f"tensorrt_llm can't be imported: {error}") from error
    except (ImportError, OSError, RuntimeError) as error:  # no driver, no libraries, MPI that can't start
        raise EngineError(f"tensorrt_llm can't be imported: {' '.join(str(error).split())}") from error
