# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/clients.md, run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.supervisor import RunningServer

pytestmark = pytest.mark.triton

_PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_BLOCK = re.compile(r"^```(?P<language>python|bash)(?: name=(?P<name>\S+))?\n(?P<code>.*?)^```$", re.S | re.M)
_TIMEOUT_S = 30

# What each example prints, as regular expressions that must match its whole output.
EXPECTED = {
    "stream": r"(\[.*\] (['\"]).*\2\n)+(stop|length) \{'prompt_tokens': \d+, .*'handoffs': \d+\}\n",
    "cancel": r"first tokens: \[.*\]\nended with: StatusCode.CANCELLED\n",
    "own": r"(stop|length) \{.*\} TTFT \d+\.\d{3} s\nfirst tokens: \(.*\)\nINVALID_ARGUMENT max_tokens.*\n",
    "curl-stream": r'(data: \{.*"text_output":.*\}\n\n)*data: \{.*"finish_reason":"(stop|length)".*\}\n\n',
    "curl-whole": r'\{.*"finish_reason":"(stop|length)".*\}',
}


def examples() -> dict[str, tuple[str, str]]:
    """Name -> (language, code) of every fenced block of the page."""
    return {m["name"]: (m["language"], m["code"]) for m in _BLOCK.finditer(_PAGE.read_text(encoding="utf-8"))}


def test_every_block_of_the_page_is_run() -> None:
    assert set(examples()) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str, tiny_server: RunningServer) -> None:
    language, code = examples()[name]
    command = [sys.executable, "-W", "error", "-c", code] if language == "python" else ["bash", "-euc", code]
    environment = {**os.environ, "GRPC_URL": tiny_server.grpc_url, "HTTP_URL": tiny_server.http_url}
    done = subprocess.run(
        command, env=environment, cwd=_PAGE.parents[1], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(EXPECTED[name], done.stdout), done.stdout
