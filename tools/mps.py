# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Multi-Process Service, without which the processes of one GPU take turns and never overlap."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

from tools.errors import UserError

__all__ = ["Mps"]

_log = logging.getLogger("tokenrouter.mps")
_CONTROL = "nvidia-cuda-mps-control"
_TIMEOUT_S = 20.0


class Mps:
    """One daemon, for the processes of one run. folder: where its pipes and logs go, there as long as the daemon is:
    so it is found again when the process that started it was killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use it."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
        }

    def start(self) -> None:
        """Start the daemon, which goes into the background. Raises UserError when it can't be."""
        if shutil.which(_CONTROL) is None:
            raise UserError(f"server.mps: true; there is no {_CONTROL} on PATH, which comes with the GPU's driver")
        for folder in self.environment.values():
            Path(folder).mkdir(parents=True, exist_ok=True)
        if (failure := self._control(["-d"], "")) is not None:
            self._forget()
            raise UserError(f"server.mps: {_CONTROL} -d failed: {failure}")
        _log.info("MPS runs; its logs are in %s", self.environment["CUDA_MPS_LOG_DIRECTORY"])

    def stop(self) -> None:
        """End the daemon, if there is one. The processes that use it have to be gone."""
        if not self._folder.is_dir():
            return
        if (failure := self._control([], "quit\n")) is not None:
            _log.warning("MPS could not be ended: %s", failure)
        self._forget()

    def _forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _control(self, arguments: list[str], text: str) -> str | None:
        """Why it failed; None = it didn't."""
        # With it the daemon would renumber the GPUs, and its clients, which see the same variable, name others or none.
        inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        try:
            # the daemon keeps its parent's streams; a pipe would be waited for until its end
            with (self._folder / "control.log").open("w+", encoding="utf-8") as log:
                done = subprocess.run(
                    [_CONTROL, *arguments],
                    input=text,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=inherited | self.environment,
                    timeout=_TIMEOUT_S,
                    check=False,
                )
                log.seek(0)
                said = " ".join(log.read().split())
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return (said or str(done.returncode)) if done.returncode else None
