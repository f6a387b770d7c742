# SPDX-License-Identifier: Apache-2.0
"""A far host on this machine: a network namespace behind a link with a given delay, for tests and measurements.

The link is a pair of TUN devices and a process between them, which hands every packet on after the delay: what
`tc netem` does, for kernels without it. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["FarHost", "far_host", "why_not"]

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 1 << 16
_END_S = 5.0


class FarHost:
    """address: of the far host, as seen from here. command: begins a command line that is to run there."""

    def __init__(self, name: str, address: str, link: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.address = address
        self.command = ["ip", "netns", "exec", name]
        self._link = link

    def delay(self, one_way_ms: float) -> None:
        """From now on every packet takes so long, each way."""
        if self._link.stdin is not None:
            self._link.stdin.write(f"{one_way_ms / 1000}\n".encode())
            self._link.stdin.flush()

    def cut(self) -> None:
        """From now on no packet arrives, either way, and nobody is told."""
        self._link.send_signal(signal.SIGSTOP)

    def mend(self) -> None:
        """The end of a `cut`. What was sent in between arrives now."""
        self._link.send_signal(signal.SIGCONT)


def why_not() -> str | None:
    """Why there can be no far host on this machine; None = there can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs iproute2's ip"
    return None if _TUN.exists() else f"needs {_TUN}"


@contextmanager
def far_host(one_way_ms: float) -> Iterator[FarHost]:
    """A host that every packet takes one_way_ms to, and as long back; the round trip is twice that."""
    number = secrets.randbelow(1 << 16)
    name = f"tokenrouter-far-{number}"
    here, there = f"tr-near{number}", f"tr-far{number}"  # at most 15 characters
    network = f"10.{192 + number % 64}.{number // 64 % 256}"
    addresses = (f"{network}.{1 + number // 16384}", f"{network}.{101 + number // 16384}")
    with ExitStack() as undo:
        _ip("netns", "add", name)
        undo.callback(_ip, "netns", "del", name)
        command = [sys.executable, "-m", "perf.far_host", here, there, str(one_way_ms / 1000)]
        root = Path(__file__).parents[1]
        link = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        undo.callback(_end, link)
        if link.stdout is None or not link.stdout.readline():
            raise OSError("the link between the network namespaces could not be made")
        _ip("link", "set", there, "netns", name)
        _ip("addr", "add", addresses[0], "peer", addresses[1], "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", name, "addr", "add", addresses[1], "peer", addresses[0], "dev", there)
        _ip("-n", name, "link", "set", there, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield FarHost(name, addresses[1], link)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _end(link: subprocess.Popen[bytes]) -> None:
    """SIGKILL, since it may have been stopped; the devices go with it."""
    link.kill()
    link.wait(_END_S)
    for stream in (link.stdin, link.stdout):
        if stream is not None:
            stream.close()


def _tun(name: str) -> int:
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _carry(devices: tuple[int, int], delay_s: float) -> None:
    """Hand every packet of one device to the other, delay_s later, for ever. A line of input is another delay."""
    across = dict(zip(devices, reversed(devices), strict=True))
    on_the_way: deque[tuple[float, int, bytes]] = deque()  # when, to which device, what
    while True:
        wait_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for device in select.select((*devices, sys.stdin.fileno()), (), (), wait_s)[0]:
            if device not in across:
                delay_s = float(sys.stdin.readline())
                continue
            packet = os.read(device, _PACKET_BYTES)
            on_the_way.append((time.monotonic() + delay_s, across[device], packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, device, packet = on_the_way.popleft()
            try:
                os.write(device, packet)
            except OSError:  # the device isn't up yet, or is gone: the packet is lost, as on any link
                continue


if __name__ == "__main__":
    near, far, seconds = sys.argv[1:]
    both = (_tun(near), _tun(far))
    print("ready", flush=True)
    _carry(both, float(seconds))
