"""Ports of 127.0.0.1 for servers that are told theirs, and perhaps come back to it."""

from __future__ import annotations

import functools
import random
import socket
from pathlib import Path

import pytest

_FIRST, _LAST = 15_000, 65_535

held: list[socket.socket] = []
"""Names of ports that this process has been given, until it ends."""


def free_port() -> int:
    """Return a port at which nobody listens, and which no other connection or process of tests gets before we end.

    A port that a bind to port 0 finds is free for a moment only: the kernel gives this port to the next connection.
    """
    draw = random.Random()  # not the one that a test may have seeded
    for _ in range(1000):
        port = draw.choice(_unasked())
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0kvdepot-test-port-{port}")  # a name that ends with this process
            with socket.create_server(("127.0.0.1", port)):
                pass
        except OSError:
            name.close()
            continue
        held.append(name)
        return port
    raise AssertionError("a thousand ports were taken")


@functools.cache
def _unasked() -> list[int]:
    """Ports outside the range from which the kernel chooses one for a connection."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return [port for port in range(_FIRST, _LAST + 1) if not first <= port <= last] or [*range(_FIRST, _LAST + 1)]


def need_ipv6() -> None:
    """Skip a test where the loopback has no IPv6 address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
