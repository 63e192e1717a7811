"""`kvdepot top`: a server's status, redrawn on the whole terminal until q is pressed."""

from __future__ import annotations

import json
import os
import re
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
from kvdepot.errors import ConfigError, DeadlineExceeded, KVDepotError

if TYPE_CHECKING:
    from kvdepot.cli.screen import Screen
    from kvdepot.client.socket import Client, MessagingFuture

__all__ = ["top"]

_NO_TERMINAL = "top needs a terminal; `kvdepot status` prints once, `kvdepot top --json` one line per update"
_KEYS_S = 0.1
"""Time to wait for a key; the terminal's size is checked as often."""
_ANSWER_S = 4.0
"""Time to wait for an answer; then the server is asked again."""
_LIST_S = 2.0
"""Least time between two lists of prefixes, which cost the server more than a status."""
_MOST_LISTED = 200
_KEY = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])?|.", re.DOTALL)
_NAMES = {
    "\t": "tab", "\x1b[Z": "back tab", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace",
    "\x1b": "escape", "\x1b[5~": "page up", "\x1b[6~": "page down",
    **{f"\x1b{mode}{letter}": name for mode in "[O" for letter, name in
       (("A", "up"), ("B", "down"), ("C", "right"), ("D", "left"))},
}  # fmt: skip


@click.command()
@click.option(
    "-i",
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    metavar="SECONDS",
    help="time between updates (default: 1)",
)
@options.server
@options.as_json
def top(interval: float, server: options.Address, as_json: bool) -> int:
    """Watch a running server: its status, redrawn every second. Press q to quit.

    The digits 1 to 6, tab and the arrows choose what to show: an overview, models, prefixes (the prompts in memory, by
    their first chunk), engines, tiers or events. Up and down choose a row, and enter shows all that is known
    about it: names and ids in full, KV cache groups, a tier's counters. s sorts, r reverses the order, / filters by
    text, p pauses, ? lists the keys.

    If the server does not answer, its state is replaced by how long and by the time of the figures; the last line says
    why.

    --json prints one line of JSON per update until interrupted; that needs no terminal. Errors are lines on standard
    error, and the command continues.
    """
    if as_json:
        return _print_lines(server, interval)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(_NO_TERMINAL)
    with connect(server) as client:
        _watch(client, interval)
    return 0


def _print_lines(server: options.Address, interval: float) -> int:
    from kvdepot.protocol import wire

    with connect(server) as client:
        while True:
            try:
                answer = client.ask(wire.Status(), deadline_s=_ANSWER_S).result(_ANSWER_S)
            except KVDepotError as exc:
                print(f"kvdepot: {exc}", file=sys.stderr, flush=True)
            else:
                print(json.dumps(answer), flush=True)
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
    unanswered: float | None = asked  # since when no answer has come
    future: MessagingFuture[object] | None = client.ask(wire.Status(), deadline_s=_ANSWER_S)
    drawn: object = None
    listed, listing = "", None  # what the prefixes were last asked for, and the answer that is awaited
    listed_at = 0.0
    with _keyboard() as descriptor, Live(console=console, screen=True, auto_refresh=False) as live:
        while not any(screen.press(key) for key in _pressed(descriptor)):
            now = time.monotonic()
            if future is not None and future.query():
                if _take(screen, future, now):
                    unanswered = None
                future = None
            if screen.is_paused:
                unanswered = None
            elif future is None and now - asked >= interval:
                unanswered = now if unanswered is None else unanswered
                asked, future = now, client.ask(wire.Status(), deadline_s=_ANSWER_S)
            if listing is not None and listing.query():
                _take_prefixes(screen, listing)
                listing = None
            wanted = screen.wanted_prefixes()
            if listing is None and wanted and (wanted != listed or now - listed_at >= max(interval, _LIST_S)):
                listed, listed_at = wanted, now
                listing = client.ask(wire.Prefixes("", wanted, _MOST_LISTED))
            screen.wait(0.0 if unanswered is None or now - unanswered < _ANSWER_S else now - unanswered)
            if drawn != (screen.version, console.size):
                drawn = screen.version, console.size
                live.update(screen.draw(console), refresh=True)


def _take(screen: Screen, future: MessagingFuture[object], now: float) -> bool:
    """Show a status, or why there is none; returns whether there is one."""
    from kvdepot.protocol.status import read

    try:
        screen.show(read(future.result(0.0)), now)
    except DeadlineExceeded:
        screen.miss("")  # `Screen.wait` says for how long
    except KVDepotError as exc:
        screen.miss(str(exc))
    else:
        return True
    return False


def _take_prefixes(screen: Screen, future: MessagingFuture[object]) -> None:
    import msgspec

    from kvdepot.protocol.prefixes import Prefix

    try:
        screen.show_prefixes(msgspec.convert(future.result(0.0), list[Prefix]))
    except (KVDepotError, msgspec.ValidationError) as exc:
        screen.miss_prefixes(str(exc))


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


def _pressed(descriptor: int) -> list[str]:
    """The keys that were pressed: letters, or names as `Screen.press` takes them. Blocks for a moment."""
    ready, _, _ = select.select([descriptor], [], [], _KEYS_S)
    if not ready:
        return []
    data = os.read(descriptor, 256)
    if not data:
        return ["q"]  # the terminal is gone
    return [_NAMES.get(key, key) for key in _KEY.findall(data.decode(errors="ignore"))]
