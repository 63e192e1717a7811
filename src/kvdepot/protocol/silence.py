"""Why a process that listens at an endpoint does not answer a client, and what to do. Used by client/ for its errors.

A server that hangs and one that waits for another key are equally silent, but ZeroMQ's own thread greets whoever
connects, and its greeting says whether a key is needed. A server at its limit of open files accepts or keeps no more
connections, and serves those that it has. So no user is advised to kill a server that is well.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from kvdepot.protocol.endpoints import holder, reach
from kvdepot.protocol.handshake import is_open_to_all

__all__ = ["why_silent"]

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""The beginning of a greeting (ZMTP 3.1, rfc.zeromq.org/spec/37). The other end answers it with the whole of its own,
and gets no more of ours: it closes connections that are not to its liking before it has sent that."""
_GREETING_BYTES = 64
_GREETING_S = 1.0
_FULL = "has reached its limit of open files (its log says so)"
_MECHANISM = slice(12, 32)
"""The part of a greeting that says how its sender wants the other end to prove itself."""


def why_silent(url: str, has_key: bool) -> str:
    """A sentence: the finding, and after a semicolon what to do, if that is known; empty if no process listens.

    has_key: whether the client has a key. Blocks for up to 2 s.
    """
    who = holder(url)
    if not who and not is_open_to_all(url):
        return ""
    pid = who.removeprefix("pid ")
    finding = f"the kvdepot server at {url} ({who})" if who else f"the process that listens at {url}"
    if pid.isdecimal() and _is_stopped(pid):
        return f"{finding} is stopped (SIGSTOP, Ctrl-Z); continue it with `kill -CONT {pid}`"
    greeting, is_closed = _greeting(url)
    if greeting is None and not who:
        return ""
    if who and (greeting is None or is_closed):
        return (
            f"{finding} accepts no new connections: it is starting or stopping, or {_FULL}; it serves the clients that "
            "are connected, so close some, or restart it with a higher limit (`ulimit -n`, LimitNOFILE=)"
        )
    mechanism = (greeting or b"")[_MECHANISM].rstrip(b"\0")
    if mechanism == b"CURVE" and not has_key:
        return f"{finding} requires a key (--keys); give this client's key file with --key or KVDEPOT_KEY"
    if mechanism == b"NULL" and has_key:
        return f"{finding} requires no key, and this client has one; leave out --key and KVDEPOT_KEY"
    causes = ["does not know this client's key"] if has_key else []
    if not who:
        causes += [_FULL if is_closed else "is stopped or hangs", "is not a kvdepot server"]
    elif has_key:
        causes.append("hangs")  # the less likely cause: nothing that kills it
    else:
        end = f"`kill -9 {pid}`" if pid.isdecimal() else "SIGKILL"
        causes.append(f"hangs; kill it with {end} (the next one takes over its chunks)")
    return f"{finding} does not answer: it {', or '.join(causes)}"


def _greeting(url: str) -> tuple[bytes | None, bool]:
    """The first bytes of a process, as far as they come, and whether it closes the connection before its mechanism.

    None instead of bytes: no process accepts connections.
    """
    try:
        asking = reach(url)
    except (OSError, ValueError, OverflowError):
        return None, False
    received, is_closed = b"", False
    deadline = time.monotonic() + _GREETING_S
    with asking, contextlib.suppress(OSError):
        asking.sendall(_SIGNATURE)
        while len(received) < _GREETING_BYTES and (left := deadline - time.monotonic()) > 0:
            asking.settimeout(left)
            try:
                more = asking.recv(_GREETING_BYTES - len(received))
            except ConnectionResetError:
                more = b""
            if not more:
                is_closed = len(received) < _MECHANISM.stop
                break
            received += more
    return received, is_closed


def _is_stopped(pid: str) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
