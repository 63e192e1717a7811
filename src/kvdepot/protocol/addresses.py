"""Validation and parsing of endpoint addresses.

ZeroMQ accepts addresses that no other process can find: it takes port 99999 for 34463, `*` for a random place, and
`inproc://`, which is private to the process.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath

MOST_PORT = 65535
MOST_PATH = 107
_AUTHORITY = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<name>[^\s:@/?#\[\]]+))(?::(?P<port>[0-9]*))?"
)
_PORT = re.compile(r"0*[1-9][0-9]{0,4}")


def socket_path(url: str) -> Path | None:
    """The file of a unix socket; None for TCP and for abstract sockets (`ipc://@NAME`), which have no file."""
    return Path(url[len("ipc://") :]) if url.startswith("ipc://") and not url.startswith("ipc://@") else None


def is_ipv6(url: str) -> bool:
    """Whether an endpoint is an IPv6 address: ZeroMQ uses IPv6 only if it is told to, and then takes a name such as
    localhost for its IPv6 address."""
    return url.startswith("tcp://[")


def split_authority(text: str) -> tuple[str, str] | None:
    """The host, without brackets, and the port (may be empty) in `HOST`, `HOST:PORT` or `[IPV6]:PORT`. None: the text
    has another form."""
    found = _AUTHORITY.fullmatch(text)
    return (found["ipv6"] or found["name"], found["port"] or "") if found else None


def fault_of_endpoint(url: str, most_port: int = MOST_PORT) -> str:
    """Why other processes could not connect to a ZeroMQ endpoint, and what to use instead; empty if they could."""
    scheme, colon, place = url.partition("://")
    if not colon or scheme not in ("ipc", "tcp") or not place:
        return f"{url!r} is not an endpoint of the form ipc://PATH or tcp://HOST:PORT"
    if any(ord(sign) < 32 for sign in place):
        return f"{url!r} contains control characters"
    if scheme == "tcp":
        authority = split_authority(place)
        if authority is None or not _PORT.fullmatch(authority[1]) or int(authority[1]) > most_port:
            hint = ", and an IPv6 address in brackets" if place.count(":") > 1 else ""
            return f"{url!r} is not of the form tcp://HOST:PORT, with a port from 1 to {most_port}{hint}"
    elif place == "*" or PurePath(place).name in ("", ".."):
        return f"{url!r} does not name a file; give a path such as ipc:///run/kvdepot.sock"
    return ""
