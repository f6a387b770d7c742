# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Multi-Process Service, without which the processes of one GPU take turns and never overlap."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from python_backends.llm.engines.config import LlamaCppConfig, PacedConfig
from tools.deployment import Deployment
from tools.errors import UserError

__all__ = ["Mps", "shares_a_gpu"]

_log = logging.getLogger("tokenrouter.mps")
_CONTROL = "nvidia-cuda-mps-control"
_TIMEOUT_S = 20.0


class Mps:
    """One daemon, for the processes of one run. folder: where its pipes and logs go; made if it isn't there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = False

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
        try:
            done = self._control(["-d"], "")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"server.mps: {_CONTROL} -d failed: {error}") from error
        if done.returncode:
            raise UserError(f"server.mps: {_CONTROL} -d failed: {' '.join(done.stderr.split()) or done.returncode}")
        self._runs = True
        _log.info("MPS runs; its logs are in %s", self.environment["CUDA_MPS_LOG_DIRECTORY"])

    def stop(self) -> None:
        """End the daemon, if it was started. The processes that use it have to be gone."""
        if not self._runs:
            return
        self._runs = False
        try:
            done = self._control([], "quit\n")
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.warning("MPS could not be ended: %s", error)
            return
        if done.returncode:
            _log.warning("MPS could not be ended: %s", " ".join(done.stderr.split()))

    def _control(self, arguments: list[str], text: str) -> subprocess.CompletedProcess[str]:
        # the daemon keeps its parent's streams; a pipe would be waited for until its end
        with (self._folder / "control.log").open("w+", encoding="utf-8") as log:
            done = subprocess.run(
                [_CONTROL, *arguments],
                input=text,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | self.environment,
                timeout=_TIMEOUT_S,
                check=False,
            )
            log.seek(0)
            done.stderr = log.read()
        return done


def shares_a_gpu(deployment: Deployment) -> bool:
    """Whether two models of this host are on one GPU: by `memory.devices` where they are given; without them, all
    that use a GPU are taken to be on the same."""
    models = [deployment.models[index] for index in deployment.here]
    on_gpu = [m for m in models if not isinstance(m.engine, PacedConfig) and _uses_gpu(m.engine)]
    if deployment.memory is None:
        return len(on_gpu) > 1
    placed = Counter(device for model in on_gpu for device in set(model.placed_on(deployment.memory)))
    return any(count > 1 for count in placed.values())


def _uses_gpu(engine: object) -> bool:
    return not isinstance(engine, LlamaCppConfig) or engine.gpu_layers != 0
