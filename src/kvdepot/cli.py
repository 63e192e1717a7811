"""The `kvdepot` command.

Exit codes: 0 done, 1 failed (the message says why), 2 wrong usage or configuration.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from typing import Any, get_args, get_type_hints

import msgspec

from kvdepot import __version__
from kvdepot.config import Config, load
from kvdepot.errors import ConfigError, KVDepotError

__all__ = ["main"]

_TUNED = "KVDEPOT_COPY_TUNED"
_TUNABLES = "glibc.cpu.x86_rep_movsb_threshold=0x10000000:glibc.cpu.x86_non_temporal_threshold=0x8000"
"""glibc's memcpy with non-temporal stores from 32 KiB on (see ARCHITECTURE.md, "Copies past the cache")."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="kvdepot", description="A KV-cache server beside LLM engines.")
    parser.add_argument("--version", action="version", version=f"kvdepot {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="run the server", description="Run the server until SIGTERM or SIGINT.",
        epilog="Every setting can also stand in the file of --config (TOML) or in the environment as "
        "KVDEPOT_<SETTING>, e.g. KVDEPOT_CHUNK_SIZE=512. Flags win over the environment, which wins over the file.",
    )  # fmt: skip
    serve.add_argument("--config", metavar="FILE", help="TOML file with settings")
    _add_settings(serve)
    status = commands.add_parser("status", help="print what a running server holds, as JSON")
    status.add_argument("--url", metavar="URL", help="the server's endpoint")
    status.add_argument("--key", metavar="FILE", help="this client's key file (default: KVDEPOT_KEY)")
    keygen = commands.add_parser(
        "keygen", help="make the keys of a server and of its clients",
        description="Write DIR/server.key unless it is there, DIR/CLIENT.key for each client, and who they are into "
        "DIR/clients.toml. Start the server with --keys DIR; give each client its file as KVDEPOT_KEY. A running "
        "server learns of new clients, and of those taken out of clients.toml, when it is started again.",
    )  # fmt: skip
    keygen.add_argument("folder", metavar="DIR", help="where to; made for this user alone")
    keygen.add_argument("clients", metavar="CLIENT", nargs="*", help="a client's name: letters, digits, - and _")
    keygen.add_argument("--tenant", default="", metavar="NAME", help="the one tenant whose chunks these clients reach")
    check = commands.add_parser(
        "check", help="audit an arena: its records against each other and against its bytes",
        description="Audit an arena, of a running server or one that left it. Exit code 1 when something is wrong.",
    )  # fmt: skip
    check.add_argument("--url", metavar="URL", help="the arena of the server at this endpoint")
    check.add_argument("--arena-name", metavar="NAME", help="the arena of this name in /dev/shm")
    check.add_argument("--fix", action="store_true", help="drop what is wrong; only while no server has the arena")
    args = vars(parser.parse_args(argv))
    command = args.pop("command")
    try:
        if command == "serve":
            return _serve(args.pop("config"), args)
        if command == "check":
            return _check(args.pop("fix"), args)
        if command == "keygen":
            return _keygen(**args)
        return _status(args["url"], args["key"] or "")
    except ConfigError as exc:
        print(f"kvdepot: {exc}", file=sys.stderr)
        return 2
    except KVDepotError as exc:
        print(f"kvdepot: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _add_settings(parser: argparse.ArgumentParser) -> None:
    hints = get_type_hints(Config, include_extras=True)
    for field in msgspec.structs.fields(Config):
        kind, meta = get_args(hints[field.name])
        many = field.name == "tiers"
        default = {"url": "a unix socket of this user", "tiers": "none"}.get(field.name, repr(field.default))
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            metavar="URL" if many else kind.__name__.upper(),
            nargs="+" if many else None,
            help=f"{meta.description} (default: {default})".replace("%", "%%"),
        )


def _serve(file: str | None, flags: dict[str, Any]) -> int:
    config = load(file, flags)
    _tune_copies()
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    from kvdepot.server import Server

    server = Server(config)
    server.catch_signals()
    server.run()
    return 0


def _tune_copies() -> None:
    """Start over once with the C library's copies tuned; it reads its settings only when a process starts."""
    if os.environ.pop(_TUNED, None) or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return
    ours = os.environ.get("GLIBC_TUNABLES")
    tunables = f"{_TUNABLES}:{ours}" if ours else _TUNABLES
    environ = {**os.environ, "GLIBC_TUNABLES": tunables, _TUNED: "1"}
    os.execve(sys.executable, [*sys.orig_argv], environ)


def _check(fix: bool, flags: dict[str, str | None]) -> int:
    from kvdepot.check import check

    report = check(load(flags=flags).arena, fix)
    print("\n".join(report.lines()), flush=True)
    return 1 if report.problems and not report.fixed else 0


def _keygen(folder: str, clients: list[str], tenant: str) -> int:
    from kvdepot.curve import generate

    for path in generate(folder, clients, tenant):
        print(path)
    return 0


def _status(url: str | None, key: str) -> int:
    import zmq

    from kvdepot import wire
    from kvdepot.client import MessageQueueClient

    config = load(flags={"url": url})
    context = zmq.Context()
    client = MessageQueueClient(config.url, context, key=key)
    try:
        client.learn_chunk_size(5.0)  # says so when nobody answers
        print(json.dumps(client.ask(wire.Status()).result(timeout=5.0), indent=2), flush=True)
    finally:
        client.close()
        context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
