# SPDX-License-Identifier: Apache-2.0
"""What lies in a download's folder, while it changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.models.progress import folder_bytes


def test_all_files_count(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "one").write_bytes(b"x" * 10)
    (tmp_path / "a" / "b" / "two").write_bytes(b"x" * 5)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert folder_bytes(tmp_path) == 15
    assert folder_bytes(tmp_path / "none") == 0


@pytest.mark.parametrize("goes", ["folder", "file"])
def test_what_goes_while_it_is_looked_at_is_passed_over(
    goes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's build folders do."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * 10)
    scandir, removed = os.scandir, []

    def scan(path: Any) -> Iterator[os.DirEntry[str]]:
        entries = scandir(path)
        if not isinstance(path, int) and Path(path).name in ("a", "b") and not removed:  # rmtree's are numbers
            gone = tmp_path / ("b" if Path(path).name == "a" else "a")
            removed.append(gone)
            shutil.rmtree(gone) if goes == "folder" else (gone / "file").unlink()
        return entries

    monkeypatch.setattr(os, "scandir", scan)
    assert folder_bytes(tmp_path) == 10
    assert removed
