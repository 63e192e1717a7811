"""`kvdepot stop` and `kvdepot logs`: end the server of a unix socket in an orderly way, and show its log."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO

import click

from kvdepot.cli import options
from kvdepot.cli.connect import endpoint
from kvdepot.errors import ConfigError, Unavailable
from kvdepot.protocol.addresses import socket_path
from kvdepot.protocol.endpoints import holder, lock_file

__all__ = ["logs", "stop"]

_LOOK_S = 0.1
_LINES = 50


def _place(url: str | None) -> tuple[str, Path]:
    """The endpoint, and the path of its socket. Raises ConfigError."""
    place = endpoint(url)
    path = socket_path(place)
    if path is None:
        raise ConfigError(f"{place} is not a unix socket with a path: use the service manager that started the server")
    return place, path


@click.command()
@click.option(
    "-t", "--timeout", "timeout_s", type=options.Number(0.0, 3600.0), default=30.0, metavar="SECONDS",
    help="how long to wait for its end (default: 30)",
)  # fmt: skip
@click.option("-u", "--url", metavar="URL", help="the server's endpoint")
def stop(timeout_s: float, url: str | None) -> int:
    """Stop the server at a unix socket of this user: it answers what it has begun, and ends.

    Engines recompute until there is a server again. One that engines start by themselves comes back with the next
    engine that starts.
    """
    place, path = _place(url)
    who = holder(place)
    if not who:
        print(f"no server is running at {place}", flush=True)
        return 0
    pid = _pid_of(place, path, who)
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while holder(place) == who:
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"the server at {place} ({who}) has not ended within {timeout_s:g} s; end it with `kill -9 {pid}`: "
                "the next server takes over its chunks"
            )
        time.sleep(_LOOK_S)
    print(f"the server at {place} ({who}) has stopped", flush=True)
    return 0


def _pid_of(place: str, path: Path, who: str) -> int:
    """The process to signal. Raises Unavailable if it cannot be signalled from here.

    A container of the same pod may have the server's host name and another process of that number, so the process must
    have the endpoint's lock file open.
    """
    pid = who.removeprefix("pid ")
    if not pid.isdecimal() or not _has_open(int(pid), lock_file(path)):
        raise Unavailable(
            f"the server at {place} is {who}, which cannot be signalled from here: stop it as its own user and in its "
            "own container"
        )
    return int(pid)


def _has_open(pid: int, file: Path) -> bool:
    with contextlib.suppress(OSError):
        wanted = file.stat()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samestat(descriptor.stat(), wanted):
                    return True
    return False


@click.command()
@click.option(
    "-n", "--lines", type=options.Whole(0, 1_000_000), default=_LINES, metavar="N",
    help=f"how many of the last lines to show (default: {_LINES})",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="go on with new lines until interrupted")
@click.option("-u", "--url", metavar="URL", help="the server's endpoint")
def logs(lines: int, follow: bool, url: str | None) -> int:
    """Show the log of a server that an engine has started. Others log to where they were started: a terminal, the
    journal of a service, a container's log."""
    from kvdepot.client.launch import Shared

    place, _ = _place(url)
    log = Shared(place).log
    file = _open(log, place)
    print(f"kvdepot: {log}", file=sys.stderr, flush=True)
    print("".join(file.readlines()[-lines:] if lines else []), end="", flush=True)
    while follow:
        if new := file.read():
            print(new, end="", flush=True)
        elif log.exists() and not os.path.samestat(log.stat(), os.fstat(file.fileno())):
            file.close()
            file = _open(log, place)  # of the next server
        else:
            time.sleep(_LOOK_S)
    file.close()
    return 0


def _open(log: Path, place: str) -> IO[str]:
    try:
        return log.open(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise Unavailable(
            f"{log}: {exc.strerror}; no engine has started a server at {place}, and one that was started otherwise "
            "logs to its standard error"
        ) from exc
