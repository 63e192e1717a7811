"""Connecting a command to its server."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvdepot.cli.options import Address
from kvdepot.client import admin
from kvdepot.client.socket import Client
from kvdepot.config import default_key, load
from kvdepot.errors import ConfigError
from kvdepot.protocol.curve import read_client_key

_PATIENCE_S = 0.7
"""Time after which a message says that the command is waiting."""


def endpoint(url: str | None) -> str:
    """The server's endpoint, by flag, environment or default. Raises ConfigError."""
    return load(flags={"url": url}).url


@contextmanager
def connect(server: Address) -> Iterator[Client]:
    """A connected client, which says goodbye when a signal ends the command, too; else the server counts it as dead.

    On a terminal, prints a message if it takes long. Raises ConfigError, Unavailable.
    """
    url, key = endpoint(server.url), server.key or default_key()
    try:
        if key:
            read_client_key(key)
    except ConfigError as exc:
        raise ConfigError(
            f"key: {exc}; give --key or KVDEPOT_KEY a client's key file created by `kvdepot keygen`"
        ) from exc
    message = f"kvdepot: waiting for a server at {url}; Ctrl-C stops"
    waiting = threading.Timer(_PATIENCE_S, print, [message], {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    if sys.stderr.isatty():
        waiting.start()
    with interrupted_by_signals():
        try:
            with admin.connect(url, key) as client:
                waiting.cancel()
                yield client
        finally:
            waiting.cancel()


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, once; more of them change nothing."""
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may handle signals

    def interrupt(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # so that cleaning up goes on
        raise KeyboardInterrupt

    for each in numbers:  # not those that nohup ignores
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
