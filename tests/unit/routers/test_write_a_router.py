# SPDX-License-Identifier: Apache-2.0
"""docs/write_a_router.md: the part that needs no server."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from routers import OneTokenRouter
from routers.testing import RuleBroken, check_router
from tests.write_a_router import PAGE, blocks, run_example, write_files


def test_every_block_of_the_page_is_run() -> None:
    """Here and in tests/triton/test_write_a_router.py."""
    assert set(blocks("file")) == {"margin.py", "test_margin.py", "deployment.yaml"}
    assert set(blocks("name")) == {"test", "validate", "ask"}
    assert blocks(None) == {}


def test_the_router_is_about_thirty_lines_and_passes_its_test(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert len((tmp_path / "margin.py").read_text().splitlines()) <= 35
    assert re.search(r"^2 passed in ", run_example("test", tmp_path, timeout_s=60), re.M)


def test_what_the_page_says_of_a_broken_rule() -> None:
    page: dict[str, Any] = {}
    exec(blocks("file")["margin.py"][1], page)
    peer = type("DropsToo", (OneTokenRouter,), {"send": page["MarginSLM"].send})
    with pytest.raises(RuleBroken) as broken:
        check_router(replace(page["MARGIN"], peer=peer))
    assert f"`{broken.value}`" in PAGE.read_text(encoding="utf-8")
