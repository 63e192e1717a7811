"""Addresses that other processes can find. Asked by config.py, before anything is made of a setting, and by socket.py.

ZeroMQ takes more than can be meant: port 99999 is 34463 to it, `*` is a place that nobody is told, and `inproc://` ends
at the process.
"""

from __future__ import annotations

import re
from pathlib import PurePath

__all__ = ["MOST_PORT", "fault_of_endpoint"]

MOST_PORT = 65535
_PORT = re.compile(r"0*[1-9][0-9]{0,4}")


def fault_of_endpoint(url: str, most_port: int = MOST_PORT) -> str:
    """Why no other process could find what listens at a ZeroMQ endpoint, and what to give instead; empty: it could."""
    scheme, colon, place = url.partition("://")
    if not colon or scheme not in ("ipc", "tcp") or not place:
        return f"{url!r} is no endpoint of the kind ipc://PATH or tcp://HOST:PORT"
    if any(ord(sign) < 32 for sign in place):
        return f"{url!r} has control characters in it"
    if scheme == "tcp":
        host, _, port = place.rpartition(":")
        if not host:
            return f"{url!r} is not of the kind tcp://HOST:PORT"
        if not _PORT.fullmatch(port) or int(port) > most_port:
            return f"{url!r}: {port!r} is no port from 1 to {most_port}"
    elif place == "*" or PurePath(place).name in ("", ".."):
        return f"{url!r} names no file; give a path such as ipc:///run/kvdepot.sock"
    return ""
