"""Bare connections to the web process, and the number of its connections."""

from __future__ import annotations

import contextlib
import os
import socket

from tests.web.conftest import Web


def connect(web: Web) -> socket.socket:
    made = socket.create_connection((web.host, web.port), timeout=40)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return made


def open_connections(web: Web) -> int:
    """The web process's open connections, according to the kernel."""
    place = f"/proc/{web.child()}"
    mine = set()
    for fd in os.listdir(f"{place}/fd"):  # noqa: PTH208 - names, not paths
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"{place}/fd/{fd}"))  # noqa: PTH115
    with open(f"{place}/net/tcp") as table:  # noqa: PTH123
        rows = [line.split() for line in table.readlines()[1:]]
    port = f":{web.port:04X}"
    return sum(row[1].endswith(port) and row[3] != "0A" and f"socket:[{row[9]}]" in mine for row in rows)
