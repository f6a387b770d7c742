# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/clients.md, run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.deployment import Deployment
from tools.supervisor import RunningServer, running_server
from tools.tiny_models import ensure_tiny_models

pytestmark = pytest.mark.triton

_PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_BLOCK = re.compile(r"^```(?P<language>python|bash)(?: name=(?P<name>\S+))?\n(?P<code>.*?)^```$", re.S | re.M)
_TIMEOUT_S = 60

# What each example prints, as regular expressions that must match its whole output.
EXPECTED = {
    "stream": r"(\[.*\] '.*'\n)+(stop|length) \{'prompt_tokens': \d+, .*'handoffs': \d+\}\n",
    "cancel": r"first tokens: \[.*\]\nended with: StatusCode.CANCELLED\n",
    "own": r"(stop|length) \{.*\} TTFT \d+\.\d{3} s\nfirst tokens: \(.*\)\nINVALID_ARGUMENT max_tokens.*\n",
    "curl-stream": r'(data: \{.*"text_output":.*\}\n\n)*data: \{.*"finish_reason":"(stop|length)".*\}\n\n',
    "curl-whole": r'\{.*"finish_reason":"(stop|length)".*\}',
}


def examples() -> dict[str, tuple[str, str]]:
    """Name -> (language, code) of every fenced block of the page."""
    return {m["name"]: (m["language"], m["code"]) for m in _BLOCK.finditer(_PAGE.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two tiny models behind R-Stitch: text goes in and out, and what it says doesn't matter here."""
    tiny = ensure_tiny_models(tmp_path_factory.mktemp("tiny"))
    engine = {"type": "llama_cpp", "context_tokens": 2048, "max_sessions": 4}
    deployment = Deployment.model_validate(
        {
            "models": [{"name": name, "engine": {**engine, "weights": str(tiny[name])}} for name in ("slm", "llm")],
            "tokenizer": str(tiny["tokenizer"]),
            "router": {"name": "rstitch", "params": {"tau": 0.5}},
            "limits": {"max_live": 4, "default_max_tokens": 2000},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        }
    )
    with running_server(deployment) as running:
        yield running


def test_every_block_of_the_page_is_run() -> None:
    assert set(examples()) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str, server: RunningServer) -> None:
    language, code = examples()[name]
    command = [sys.executable, "-W", "error", "-c", code] if language == "python" else ["bash", "-euc", code]
    environment = {**os.environ, "GRPC_URL": server.grpc_url, "HTTP_URL": server.http_url}
    done = subprocess.run(
        command, env=environment, cwd=_PAGE.parents[1], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(EXPECTED[name], done.stdout), done.stdout
