"""`kvdepot serve`, `kvdepot stop`, which ends a server in an orderly way, and `kvdepot config`, its settings."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvdepot import logs
from kvdepot.cli import options
from kvdepot.config import (
    in_text,
    load,
    load_with_sources,
    masked,
    odd_chunk_size,
    stray_variables,
)
from kvdepot.errors import ConfigError, Unavailable
from kvdepot.protocol.addresses import socket_path
from kvdepot.protocol.endpoints import holder, lock_file

if TYPE_CHECKING:
    from kvdepot.server.loop import Server

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CHECK_S = 0.1
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

    config = load(file, given)
    check_limits(config.arena_bytes)
    logs.configure(config.log_level, config.log_format)
    for name, advice in stray_variables(os.environ):
        log.warning("environment variable %s is not a setting; %s", name, advice)
    check_memory(config)
    if warning := odd_chunk_size(config):
        log.warning("%s", warning)
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


@click.command()
@click.option("-t", "--timeout", "timeout_s", type=options.Seconds(0.0, 3600.0), default=30.0, metavar="SECONDS",
              help="how long to wait for its end (default: 30)")  # fmt: skip
@options.url
def stop(timeout_s: float, url: str | None) -> int:
    """Stop the server at a unix socket of this user: it finishes the requests in progress, and exits.

    Engines recompute until there is a server again. If engines start it by themselves, the next engine that starts
    does so.
    """
    place = load(flags={"url": url}).url
    path = socket_path(place)
    if path is None:
        raise ConfigError(f"{place} is not a unix socket with a path: use the service manager that started the server")
    who = holder(place)
    if not who:
        print(f"no server is running at {place}", flush=True)
        return 0
    # A container of the same pod may have the server's host name and another process of that number.
    pid = who.removeprefix("pid ")
    if not pid.isdecimal() or not _has_open(int(pid), lock_file(path)):
        raise Unavailable(
            f"the server at {place} is {who}, which cannot be signalled from here: stop it as its own user and in its "
            "own container"
        )
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(int(pid), signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while holder(place) == who:
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"the server at {place} ({who}) has not ended within {timeout_s:g} s; end it with `kill -9 {pid}`: "
                "the next server takes over its chunks"
            )
        time.sleep(_CHECK_S)
    print(f"the server at {place} ({who}) has stopped", flush=True)
    return 0


def _has_open(pid: int, file: Path) -> bool:
    with contextlib.suppress(OSError):
        wanted = file.stat()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samestat(descriptor.stat(), wanted):
                    return True
    return False


@click.command(cls=options.Settings, epilog=_WHERE)
@options.settings
@options.as_json
def config(file: str | None, as_json: bool, **given: object) -> int:
    """Show the settings that `kvdepot serve` would use with the same flags, environment and file; masks secrets.

    Those of a running server are in `kvdepot status --json`.
    """
    from kvdepot.cli.output import clean, print_json, size

    settings, sources = load_with_sources(file, given)
    stray = [f"environment variable {name} is not a setting; {advice}" for name, advice in stray_variables(os.environ)]
    for line in filter(None, [*stray, odd_chunk_size(settings)]):
        print(f"kvdepot: {clean(line)}", file=sys.stderr)
    shown = masked(settings)
    if as_json:
        print_json(
            {
                "settings": {name: {"value": value, "source": sources[name]} for name, value in shown.items()},
                "arena": {"name": settings.arena, "bytes": settings.arena_bytes},
            }
        )
        return 0
    from kvdepot.cli.view import Listing, print_tables

    derived = {"arena_gib": size(settings.arena_bytes), "arena_name": settings.arena}
    rows = []
    for name, value in shown.items():
        text = in_text(value)
        if name in derived and not value:
            text = f"{text} ({derived[name]})".strip()
        rows.append((name, text, sources[name]))
    print_tables(Listing(("setting", "value", "from"), rows, folds=True))
    return 0
