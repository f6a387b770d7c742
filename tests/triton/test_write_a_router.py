# SPDX-License-Identifier: Apache-2.0
"""docs/write_a_router.md: its deployment, validated and served, and its client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.write_a_router import run_example, write_files
from tools.deployment import Deployment, load_deployment
from tools.supervisor import RunningServer, running_server

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tiny_deployment: Deployment) -> Iterator[RunningServer]:
    """The page's router between tiny models: what it shows is the same."""
    router = load_deployment(folder / "deployment.yaml").router
    with running_server(tiny_deployment.model_copy(update={"router": router})) as running:
        yield running


def test_the_client_sees_the_margins(folder: Path, server: RunningServer) -> None:
    printed = run_example("ask", folder, timeout_s=60, GRPC_URL=server.grpc_url)
    counts = re.findall(r"^(\S+) \{'slm': (\d+), 'llm': (\d+)\}$", printed, re.M)
    assert [margin for margin, *_ in counts] == ["0.0", "0.3", "1.0"], printed
    assert counts[0][2] == "0" and counts[2][1] == "0", printed
    assert int(counts[0][1]) > 0 and int(counts[2][2]) > 0, printed


@pytest.mark.model
def test_its_deployment_is_valid(folder: Path) -> None:
    assert "ok" in run_example("validate", folder, timeout_s=60)
