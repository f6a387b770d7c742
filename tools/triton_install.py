# SPDX-License-Identifier: Apache-2.0
"""The Triton of this machine: the official image's, or the one inside the nvidia-pytriton wheel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tools.errors import UserError

__all__ = ["TritonInstall", "find_triton"]

_IMAGE = Path("/opt/tritonserver")  # where NVIDIA's containers have it
_BACKENDS = ("token_router", "llm")  # packages of python_backends
_STOCK = "tensorrtllm"  # NVIDIA's C++ backend, which images with TensorRT-LLM up to 1.2 have
_MORE_VARIABLE = "TOKENROUTER_BACKENDS"


@dataclass(frozen=True)
class TritonInstall:
    """binary: tritonserver. python_backend: the files of Triton's Python backend. libraries: folders that
    hold what they link to. others: folders of more backends, named as they are."""

    binary: Path
    python_backend: tuple[Path, ...]
    libraries: tuple[Path, ...]
    others: tuple[Path, ...] = ()

    @property
    def has_stock_backend(self) -> bool:
        """Whether models of the C++ backend `tensorrtllm` can be loaded."""
        return any(folder.name == _STOCK for folder in self.others)

    def make_backend_directory(self, folder: Path) -> None:
        """Fill `folder` with what --backend-directory needs: Triton's Python backend, and ours.

        The Python backend is copied: Triton refuses a symlinked library for backends that are written in
        Python, and the wheel keeps the stub apart from the library, where Triton doesn't look.
        """
        python = folder / "python"
        python.mkdir(parents=True)
        for file in self.python_backend:
            shutil.copy2(file, python)
        for name in _BACKENDS:
            (folder / name).symlink_to(_package_folder(f"python_backends.{name}"))
        for other in self.others:
            (folder / other.name).symlink_to(other)

    def environment(self) -> dict[str, str]:
        """What tritonserver and its stubs need on top of this process's environment.

        A stub runs the first python3 on PATH, isolated: PYTHONPATH doesn't reach it. Without LIBDIR it may
        load the system's libpython with another Python's standard library.
        """
        libraries = [*map(str, self.libraries), sysconfig.get_config_var("LIBDIR") or ""]
        return {
            "PATH": _joined([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "LD_LIBRARY_PATH": _joined([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        }


def find_triton() -> TritonInstall:
    """The official image's Triton when `tritonserver` is on PATH, else the wheel's.

    The environment variable TOKENROUTER_BACKENDS may name folders of more backends, with colons in between.
    Raises UserError when there is neither, or the wheel has no stub for this Python.
    """
    on_path = shutil.which("tritonserver")
    if on_path is not None and _IMAGE in Path(on_path).resolve().parents:
        files = tuple(p for p in (_IMAGE / "backends" / "python").iterdir() if p.is_file())
        stock = _IMAGE / "backends" / _STOCK
        others = (stock,) if stock.is_dir() else ()
        return TritonInstall(Path(on_path), files, (_IMAGE / "lib",), others + _more_backends())
    return _from_wheel()


def _more_backends() -> tuple[Path, ...]:
    """Raises UserError for one that isn't there."""
    folders = tuple(Path(f).resolve() for f in os.environ.get(_MORE_VARIABLE, "").split(os.pathsep) if f)
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{_MORE_VARIABLE}: {folder} is no folder")
    return folders


def _from_wheel() -> TritonInstall:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise UserError("there is no Triton: run inside NVIDIA's tritonserver image, or install tokenrouter[cpu]")
    root = Path(spec.origin).parent / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise UserError(f"the Triton of nvidia-pytriton has no stub for Python {version}")
    backend = root / "backends" / "python"
    return TritonInstall(
        binary=root / "bin" / "tritonserver",
        python_backend=(backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub),
        libraries=(root.parents[1] / "nvidia_pytriton.libs",),
        others=_more_backends(),
    )


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"package {name} is not installed: run `pip install .` in the repository")
    return Path(next(iter(spec.submodule_search_locations)))


def _joined(folders: list[str]) -> str:
    return os.pathsep.join(f for f in folders if f)
