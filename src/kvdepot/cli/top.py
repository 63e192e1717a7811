"""`kvdepot top`: a server's status on the whole terminal, redrawn until q is pressed. Drawn by Textual (tui.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time

import click

from kvdepot import install
from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.errors import ConfigError, KVDepotError

__all__ = ["top"]

_INSTEAD = "`kvdepot status --watch` prints again and again, `kvdepot top --json` one line per update"
_ANSWER_S = 4.0


@click.command()
@click.option(
    "-i",
    "--interval",
    type=options.Seconds(0.1, 3600),
    default=1.0,
    metavar="SECONDS",
    help="time between updates (default: 1)",
)
@options.server
@options.as_json
def top(interval: float, server: options.Address, as_json: bool) -> int:
    """Watch a running server: its status, redrawn every second. Press q to quit.

    The digits 1 to 7, tab and the arrows choose what to show: an overview, models, prefixes (the prompts in memory, by
    their first chunk), engines, tiers, leases or events. Up and down choose a row, and enter shows all that is known
    about it: names and ids in full, KV cache groups, a tier's counters. s sorts, r reverses the order, / filters by
    text, p pauses, ? lists the keys.

    While the server does not answer, the overview shows for how long, and the time of the figures, instead of the
    server's state; the last line says why.

    This needs the package textual. --json does not: it prints one line of JSON per update until interrupted, without a
    terminal. Errors are lines on standard error, and the command continues.
    """
    if as_json:
        return _print_lines(server, interval)
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") in ("dumb", "unknown"):
        raise ConfigError(f"top needs a terminal; {_INSTEAD}")
    if importlib.util.find_spec("textual") is None:
        raise ConfigError(f"top needs the package textual: {install.advice('top')}; {_INSTEAD}")
    from kvdepot.cli.tui import Top

    with connect(server) as client:
        screen = Top(client, interval)
        screen.run(mouse=False)
        return screen.return_code or 0


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
