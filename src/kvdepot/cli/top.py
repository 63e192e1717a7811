"""`kvdepot top`: a server's status on the whole terminal, redrawn until q is pressed. Drawn by Textual (tui.py)."""

from __future__ import annotations

import importlib.util
import os
import sys

import click

from kvdepot import install
from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.errors import ConfigError

_INSTEAD = "`kvdepot status --watch` prints again and again, with --json one line per update"


@click.command()
@click.option("-i", "--interval", type=options.Seconds(0.1, 3600), default=1.0, metavar="SECONDS",
              help="time between updates (default: 1)")  # fmt: skip
@options.server
def top(interval: float, server: options.Address) -> int:
    """Watch a running server: its status, with rates of the last minute, redrawn every second. Press q to quit.

    Up, down, page up and page down scroll, p pauses. While the server does not answer, a line says why and for how
    long, and the time of the figures. `kvdepot lease` lists leases.

    This needs the package textual; `kvdepot status --watch` does not.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") in ("dumb", "unknown"):
        raise ConfigError(f"top needs a terminal; {_INSTEAD}")
    if importlib.util.find_spec("textual") is None:
        raise ConfigError(f"top needs the package textual: {install.advice('top')}; {_INSTEAD}")
    from kvdepot.cli.tui import Top

    with connect(server) as client:
        screen = Top(client, interval)
        screen.run(mouse=False)
        return screen.return_code or 0
