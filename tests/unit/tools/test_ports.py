# SPDX-License-Identifier: Apache-2.0
"""Ports before Triton starts."""

from __future__ import annotations

import socket

import pytest

from tools.deployment import ServerConfig
from tools.errors import UserError
from tools.ports import settle_ports

FREE = ServerConfig(http_port=0, grpc_port=0, metrics_port=0)


def test_every_zero_becomes_a_port_of_its_own() -> None:
    settled = settle_ports(FREE)
    ports = {settled.http_port, settled.grpc_port, settled.metrics_port}
    assert len(ports) == 3 and min(ports) > 0


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^server\.grpc_port: port {port} of 127\.0\.0\.1 is in use; choose"):
            settle_ports(FREE.model_copy(update={"grpc_port": port}))


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host"])
def test_a_host_that_is_not_ours_is_one_line(host: str) -> None:
    with pytest.raises(UserError, match=r"^server\.host: can't listen on .*; give an IPv4 address of this machine$"):
        settle_ports(FREE.model_copy(update={"host": host}))
