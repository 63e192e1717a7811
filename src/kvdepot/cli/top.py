"""`kvdepot top`: a server's status, redrawn on the whole terminal until q is pressed."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.errors import ConfigError, KVDepotError

if TYPE_CHECKING:
    from kvdepot.cli.screen import Screen
    from kvdepot.client.socket import Client, MessagingFuture

__all__ = ["top"]

_NO_TERMINAL = "top needs a terminal; `kvdepot status` prints once, `kvdepot top --json` one line per update"
_KEYS_S = 0.1
"""Time to wait for a key; the terminal's size is checked as often."""


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    metavar="SECONDS",
    help="time between updates (default: 1)",
)
@options.server
@options.as_json
def top(interval: float, url: str | None, key: str | None, as_json: bool) -> int:
    """Watch a running server: its status, redrawn every second. Press q to quit.

    --json prints one line of JSON per update until interrupted; that needs no terminal.
    """
    if as_json:
        return _print_lines(url, key, interval)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(_NO_TERMINAL)
    with connect(url, key) as client:
        _watch(client, interval)
    return 0


def _print_lines(url: str | None, key: str | None, interval: float) -> int:
    from kvdepot.protocol import wire

    with connect(url, key) as client:
        while True:
            print(json.dumps(client.ask(wire.Status()).result(5.0)), flush=True)
            time.sleep(interval)


def _watch(client: Client, interval: float) -> None:
    """Draw until q is pressed. If the server stops, wait for it to return."""
    from rich.console import Console
    from rich.live import Live

    from kvdepot.cli.screen import Screen
    from kvdepot.protocol import wire

    console = Console(highlight=False, markup=False)
    if console.is_dumb_terminal:
        raise ConfigError(_NO_TERMINAL)
    screen = Screen(client.server_url)
    asked = time.monotonic()
    future: MessagingFuture[object] | None = client.ask(wire.Status())
    drawn: object = None
    with _keyboard() as descriptor, Live(console=console, screen=True, auto_refresh=False) as live:
        while not _quits(descriptor):
            now = time.monotonic()
            if future is not None and future.query():
                _take(screen, future, now)
                future = None
            if future is None and now - asked >= interval:
                asked, future = now, client.ask(wire.Status())
            if drawn != (screen.version, console.size):
                drawn = screen.version, console.size
                live.update(screen.draw(console), refresh=True)


def _take(screen: Screen, future: MessagingFuture[object], now: float) -> None:
    from kvdepot.protocol.status import read

    try:
        screen.show(read(future.result(0.0)), now)
    except KVDepotError as exc:
        screen.miss(str(exc))


@contextmanager
def _keyboard() -> Iterator[int]:
    """Standard input in unbuffered mode without echo; restores the mode afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _quits(descriptor: int) -> bool:
    """Whether q was pressed. Blocks for a moment."""
    ready, _, _ = select.select([descriptor], [], [], _KEYS_S)
    if not ready:
        return False
    keys = os.read(descriptor, 64)
    return not keys or b"q" in keys or b"Q" in keys
