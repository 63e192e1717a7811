"""`kvdepot serve`, and `kvdepot config`, which shows its settings."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from kvdepot import logs
from kvdepot.cli import options
from kvdepot.config import (
    Config,
    default_key,
    in_text,
    load,
    load_with_sources,
    masked,
    odd_chunk_size,
    reported,
    stray_variables,
)
from kvdepot.errors import KVDepotError

if TYPE_CHECKING:
    from kvdepot.protocol.status import Status
    from kvdepot.server.loop import Server

__all__ = ["config", "serve"]

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WHERE = (
    "Every setting can also be given in the file of --config (TOML) or in the environment as KVDEPOT_<SETTING>, e.g. "
    "KVDEPOT_CHUNK_SIZE=512. Flags override the environment, which overrides the file. A SIZE may have a unit: 64GiB, "
    "512MiB."
)


@click.command(cls=options.Settings, epilog=_WHERE)
@options.settings
@click.option(
    "--until-eof", is_flag=True, help="also stop when standard input ends; for programs that run the server as a child"
)
def serve(file: str | None, until_eof: bool, **given: object) -> int:
    """Run the server until SIGTERM, SIGINT or SIGHUP (when its terminal closes; nohup prevents that)."""
    from kvdepot.cli.limits import check_limits, check_memory, explain_limits

    config = load(file, options.flags_of(given))
    check_limits(config.arena_bytes)
    logs.configure(config.log_level, config.log_format)
    for name, advice in stray_variables(os.environ):
        log.warning("environment variable %s is not a setting; %s", name, advice)
    check_memory(config)
    if odd_chunk_size(config.chunk_size):
        log.warning(
            "chunk size %d is not a multiple of 16, vLLM's smallest block: kvdepot's vLLM connector uses whole blocks "
            "instead, and clients of the LMCache contract whose block does not divide it are refused",
            config.chunk_size,
        )
    from kvdepot.server.loop import Server

    with explain_limits():
        server = Server(config)
    for number in _STOP_SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, server.stop)
    if until_eof:
        threading.Thread(target=_stop_at_eof, args=(server,), name="kvdepot-eof", daemon=True).start()
    server.run()
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # it has stopped; and a handler would keep the server alive
    if server.hangs:
        logging.shutdown()
        os._exit(0)  # a regular exit would wait in the driver for the hanging call, and keep the arena's lock
    return 0


def _stop_at_eof(server: Server) -> None:
    """A pipe ends however the process at its other end has ended, also by `kill -9`."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
        server.stop()


@click.command(cls=options.Settings, epilog=_WHERE)
@options.settings
@options.as_json
def config(file: str | None, as_json: bool, **given: object) -> int:
    """Show the settings that `kvdepot serve` would use with the same flags, environment and file; masks secrets.

    If a server runs at this endpoint, also those of its settings that differ.
    """
    from kvdepot.cli.output import clean, print_json

    settings, sources = load_with_sources(file, options.flags_of(given))
    warnings = [
        f"environment variable {name} is not a setting; {advice}" for name, advice in stray_variables(os.environ)
    ]
    for line in filter(None, [*warnings, odd_chunk_size(settings.chunk_size)]):
        print(f"kvdepot: {clean(line)}", file=sys.stderr)
    server = _server_at(settings.url)
    if as_json:
        print_json(
            {
                "settings": {
                    name: {"value": value, "source": sources[name]} for name, value in masked(settings).items()
                },
                "arena": {"name": settings.arena, "bytes": settings.arena_bytes},
                "server": server and {"pid": server.pid, "settings": server.settings},
            }
        )
        return 0
    _print_settings(settings, sources, server)
    return 0


def _print_settings(settings: Config, sources: Mapping[str, str], server: Status | None) -> None:
    """Print a table of the settings; beside them, if a server runs, those of its settings that differ."""
    from rich.table import Table
    from rich.text import Text

    from kvdepot.cli.output import clean, console, size

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    if server is not None:
        table.add_column(f"running server (pid {server.pid}), where it differs", overflow="fold")
    here = {"arena_gib": size(settings.arena_bytes), "arena_name": settings.arena}
    ours = reported(settings)
    theirs = ours if server is None else ours | server.settings
    for name, value in masked(settings).items():
        text = "\n".join(map(clean, value)) if isinstance(value, list) else clean(in_text(value))
        if name in here and not value:
            text = f"{text} ({here[name]})".strip()
        differs = theirs.get(name) != ours.get(name)
        cells = [text, clean(sources[name]), clean(theirs[name] or "empty") if differs else ""]
        is_plain = sources[name] == "default" and not differs
        table.add_row(name, *map(Text, cells[: len(table.columns) - 1]), style="dim" * is_plain)
    console().print(table)


def _server_at(url: str) -> Status | None:
    """The status of the server that listens at an endpoint, or None, with the reason if there is one."""
    from kvdepot.cli.connect import running
    from kvdepot.protocol.endpoints import is_taken

    if not is_taken(url):
        return None
    try:
        return running(url, default_key())
    except KVDepotError as exc:
        print(f"kvdepot: the settings of the running server are unknown: {exc}", file=sys.stderr)
        return None
