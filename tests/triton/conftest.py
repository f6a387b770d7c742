# SPDX-License-Identifier: Apache-2.0
"""Servers that several tests share: one start for each kind of deployment."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.triton.servers import ALGORITHMS, paced_deployment
from tools.deployment import Deployment
from tools.supervisor import RunningServer, running_server
from tools.tiny_models import ensure_tiny_models

_LOG_LINES = 60


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows the end of the logs of its fixtures' servers, which go with them."""
    report = yield
    if report.failed:
        fixtures: dict[str, Any] = getattr(item, "funcargs", {})
        for name, server in fixtures.items():
            if isinstance(server, RunningServer) and server.log_path.exists():
                lines = server.log_path.read_text(errors="replace").splitlines()
                report.sections.append((f"log of {name}", "\n".join(lines[-_LOG_LINES:])))
    return report


@pytest.fixture(scope="module")
def paced_server() -> Iterator[RunningServer]:
    """Two paced models under a router that fails where it is told to."""
    router = {"name": "faulty:FAULTY", "path": ALGORITHMS}
    with running_server(paced_deployment(router=router, limits={"max_live": 16, "max_queue": 64})) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Two random-weight llama.cpp models with one vocabulary, R-Stitch between them."""
    tiny = ensure_tiny_models(tmp_path_factory.mktemp("tiny"))
    return Deployment.model_validate(
        {
            "models": [
                {
                    "name": name,
                    "engine": {
                        "type": "llama_cpp", "weights": str(tiny[name]), "context_tokens": 512, "max_sessions": 16,
                        "prefill_chunk": 64,
                    },
                }
                for name in ("slm", "llm")
            ],
            "tokenizer": str(tiny["tokenizer"]),
            "router": {"name": "rstitch", "params": {"tau": 0.4}},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny_server(tiny_deployment: Deployment) -> Iterator[RunningServer]:
    with running_server(tiny_deployment) as server:
        yield server
