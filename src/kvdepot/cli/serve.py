"""`kvdepot serve`; `stop`, which ends a server in an orderly way; `config`, its settings; `keygen`, its keys."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvdepot import logs
from kvdepot.cli import options
from kvdepot.cli.output import clean, print_json, show
from kvdepot.config import Config, doubts, in_text, load, load_with_sources, masked
from kvdepot.errors import ConfigError, Unavailable
from kvdepot.memory.room import allocated, limits
from kvdepot.protocol.addresses import socket_path
from kvdepot.protocol.curve import generate
from kvdepot.protocol.endpoints import holder, lock_file
from kvdepot.values import size

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
_LEAST_FILES = 64
"""Open files that a server needs to start, plus some for its first clients."""
_OWN_BYTES = 448 << 20
"""Minimum address space that a server needs besides its arena."""
_SMALL_ARENA = 1 << 30
"""A default arena below this is worth a warning."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of a limit of this process or of the machine."""


@click.command(cls=options.Settings, epilog=_WHERE)
@options.settings
@click.option(
    "--until-eof", is_flag=True, help="also stop when standard input ends; for programs that run the server as a child"
)
def serve(file: str | None, until_eof: bool, **given: object) -> int:
    """Run the server until SIGTERM, SIGINT or SIGHUP (when its terminal closes; nohup prevents that)."""
    config = load(file, given)
    check_limits(config.arena_bytes)
    logs.configure(config.log_level, config.log_format)
    for doubt in doubts(config):
        log.warning("%s; %s", *doubt)
    check_memory(config)
    from kvdepot.server.loop import Server

    try:
        server = Server(config)
    except MemoryError as exc:
        raise ConfigError("the server cannot start: no memory; lower --arena-gib, or raise `ulimit -v`") from exc
    except OSError as exc:
        if exc.errno not in _SHORT:
            raise
        raise ConfigError(
            f"the server cannot start: {exc.strerror}; raise the limits of this process, which `ulimit -a` shows"
        ) from exc
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


def check_limits(arena_bytes: int) -> None:
    """Raise ConfigError if this process's limits are too low for any server."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # the server raises its own limit up to this
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        raise ConfigError(f"{files} open files are allowed, and a server needs {_LEAST_FILES}: raise `ulimit -n`")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < arena_bytes + _OWN_BYTES:
        raise ConfigError(
            f"{size(space)} of address space are allowed, and a server with an arena of {size(arena_bytes)} "
            f"needs {size(arena_bytes + _OWN_BYTES)}: raise `ulimit -v` or lower --arena-gib"
        )


def check_memory(config: Config) -> None:
    """Warn of an arena that does not suit the memory here.

    Raises ConfigError if it exceeds a hard limit: filling it would end this process, or an engine that shares the
    limit. The arena itself compares its size with its folder.
    """
    folder = Path(config.arena_dir)
    arena, found = config.arena_bytes, limits(folder)
    for limit in found:
        if arena > limit.most and limit.is_hard and limit.what != str(folder):
            raise ConfigError(
                f"an arena of {size(arena)} exceeds the {size(limit.most)} that {limit.what} allows: lower "
                f"--arena-gib, or {limit.advice}"
            )
    if not found:
        return
    tightest = found[0]
    free = tightest.free + allocated(folder, config.arena)
    if not config.arena_gib and arena < _SMALL_ARENA:
        log.warning(
            "the arena has %s only, because %s is free in %s: set --arena-gib, or %s",
            size(arena), size(free), tightest.what, tightest.advice,
        )  # fmt: skip
    elif config.arena_gib and arena > free:
        log.warning(
            "the arena may grow to %s, and %s has %s free: the kernel may kill this server then. Lower --arena-gib, or "
            "%s", size(arena), tightest.what, size(free), tightest.advice,
        )  # fmt: skip


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
    settings, sources = load_with_sources(file, given)
    for doubt in doubts(settings):
        print(f"kvdepot: {clean('; '.join(doubt))}", file=sys.stderr)
    shown = masked(settings)
    if as_json:
        values = {name: {"value": value, "source": sources[name]} for name, value in shown.items()}
        print_json({"settings": values, "arena": {"name": settings.arena, "bytes": settings.arena_bytes}})
        return 0
    from kvdepot.cli.view import Listing, print_tables

    derived = {"arena_gib": size(settings.arena_bytes), "arena_name": settings.arena}
    rows = []
    for name, value in shown.items():
        text = in_text(value)
        text = text if value or name not in derived else f"{text} ({derived[name]})".strip()
        rows.append((name, text, sources[name]))
    print_tables(Listing(("setting", "value", "from"), rows, folds=True))
    return 0


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path())
@click.argument("clients", metavar="[CLIENT]...", nargs=-1)
@click.option("--tenant", default="", metavar="NAME", help="the clients' tenant; they can access only its chunks")
@options.as_json
def keygen(folder: str, clients: tuple[str, ...], tenant: str, as_json: bool) -> int:
    """Write DIR/server.key unless it exists, and DIR/CLIENT.key for each client; add the clients to DIR/clients.toml.

    Only this user can read DIR. A client's name consists of letters, digits, - and _. Start the server with --keys
    DIR, and give each client its file as KVDEPOT_KEY. Restart a running server to make it read clients.toml again.
    """
    paths = [str(path) for path in generate(folder, list(clients), tenant)]
    show(as_json, {"files": paths}, *paths)
    return 0
