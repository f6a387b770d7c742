# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.unit.client.fake_triton import FakeTriton
from tools.client import TokenRouterClient


@pytest.fixture
def triton() -> Iterator[tuple[FakeTriton, TokenRouterClient]]:
    fake = FakeTriton()
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    fake.url = f"127.0.0.1:{port}"
    with TokenRouterClient(fake.url) as client:
        yield fake, client
    server.stop(grace=None).wait()
