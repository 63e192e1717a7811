"""The `kvdepot` command.

Exit codes: 0 done, 1 failed (the message says why), 2 wrong usage or configuration.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import sys
from typing import Any, get_args, get_type_hints

import msgspec

from kvdepot import __version__, logs
from kvdepot.config import Config, load
from kvdepot.errors import ConfigError, KVDepotError

__all__ = ["main"]

_TUNED = "KVDEPOT_COPY_TUNED"
_TUNABLES = "glibc.cpu.x86_rep_movsb_threshold=0x10000000:glibc.cpu.x86_non_temporal_threshold=0x8000"
"""glibc's memcpy with non-temporal stores from 32 KiB on (see ARCHITECTURE.md, "Copies past the cache")."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    words = sys.argv[1:] if argv is None else argv
    parsed = _parser(words).parse_args(words)
    args = vars(parsed)
    command = args.pop("command")
    try:
        if command == "simulate":
            return _simulate(parsed)
        if command == "serve":
            return _serve(args.pop("config"), args)
        if command == "check":
            return _check(args.pop("fix"), args)
        if command == "keygen":
            return _keygen(**args)
        if command == "calibrate":
            return _calibrate(args["gpu"], args["json"])
        if command == "status":
            return _status(args["url"], args["key"] or "")
        return _upkeep(command, args)
    except ConfigError as exc:
        print(f"kvdepot: {exc}", file=sys.stderr)
        return 2
    except KVDepotError as exc:
        print(f"kvdepot: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """What can be said on the command line. words: what was said."""
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
    _add_server(status)
    warm = commands.add_parser(
        "warm", help="load a prompt's chunks from the tiers into memory, ahead of its requests",
        description="Load what the tiers have of a prompt into memory. Exit code 1 when not all of it is there then.",
    )  # fmt: skip
    _add_prompt(warm)
    pin = commands.add_parser(
        "pin", help="keep a prompt's chunks in memory under a name",
        description="Keep a prompt's chunks in memory, whoever comes and goes, until it is unpinned, its time is over, "
        "or the server ends. All pins together take at most half of the memory.",
    )  # fmt: skip
    pin.add_argument("name", metavar="NAME")
    _add_prompt(pin)
    pin.add_argument("--seconds", type=int, default=0, metavar="N", help="how long (default: no end)")
    unpin = commands.add_parser("unpin", help="end a pin")
    unpin.add_argument("name", metavar="NAME")
    _add_server(unpin)
    forget = commands.add_parser(
        "forget", help="remove chunks from memory and from all tiers",
        description="Remove chunks from memory and from all tiers, shared ones too: of a model, of a salt, or "
        "everything. Exit code 1 when a tier could not. Requests that are under way with such a salt store anew.",
    )  # fmt: skip
    forget.add_argument("--model", default="", metavar="NAME", help="of this model, or of those whose name begins so")
    forget.add_argument("--salt", default="", metavar="TEXT", help="of requests with this cache_salt")
    forget.add_argument("--all", action="store_true", help="everything")
    _add_server(forget)
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
    calibrate = commands.add_parser(
        "calibrate", help="measure which way of copying to and from a GPU is best for which size",
        description="Measure each way of copying between GPUs and pinned memory, as a server does when the first "
        "worker registers from one, and print how fast each is and which is taken. No server is needed or changed.",
    )  # fmt: skip
    calibrate.add_argument("--gpu", default="", metavar="UUID|N", help="one GPU (default: all)")
    calibrate.add_argument("--json", action="store_true", help="print JSON")
    simulate = commands.add_parser(
        "simulate", help="replay traces of requests: how much memory buys how much hit rate",
        description="Replay traces of requests through the server's own index and eviction policies, at several sizes "
        "of the cache, and print which share of the blocks hit.",
    )  # fmt: skip
    if words[:1] == ["simulate"]:  # it imports what no other command needs
        from kvdepot.simulate import add_arguments

        add_arguments(simulate)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="the server's endpoint")
    parser.add_argument("--key", metavar="FILE", help="this client's key file (default: KVDEPOT_KEY)")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tokens", metavar="FILE", help="the prompt's token ids, JSON or plain; - = standard input")
    what.add_argument(
        "--keys", metavar="FILE", help="keys of chunks in hex, from the prompt's start; - = standard input"
    )
    parser.add_argument("--model", default="", metavar="NAME", help="as `kvdepot status` lists it, or its beginning")
    parser.add_argument("--salt", default="", metavar="TEXT", help="cache_salt of the requests")
    _add_server(parser)


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
    logs.configure(config.log_level, config.log_format)
    from kvdepot.server import Server

    server = Server(config)
    server.catch_signals()
    server.run()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it has stopped; and the handlers keep it from being collected
    if server.hangs:
        logging.shutdown()
        os._exit(0)  # a driver's own end would wait for what hangs, and the arena's lock with it
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


def _simulate(args: argparse.Namespace) -> int:
    from kvdepot.simulate import run

    try:
        return run(args)
    except KeyboardInterrupt:  # it may take minutes, and there is nothing to clean up
        return 130


def _keygen(folder: str, clients: list[str], tenant: str) -> int:
    from kvdepot.curve import generate

    for path in generate(folder, clients, tenant):
        print(path)
    return 0


def _calibrate(wanted: str, as_json: bool) -> int:
    staging_bytes = load().gpu_staging_mib << 20
    from kvdepot.devices.cuda import calibrate
    from kvdepot.devices.cuda.driver import load as load_driver
    from kvdepot.devices.cuda.gpus import Gpu

    found = []
    cuda = load_driver()
    for uuid in calibrate.find(cuda, wanted):
        gpu = Gpu(cuda, uuid, staging_bytes)
        try:
            figures = calibrate.measure(gpu)
        finally:
            gpu.close()
        if as_json:
            found.append({"uuid": uuid, "name": gpu.name, "figures": figures, "without": gpu.ways.without})
            continue
        print(f"{gpu.name} {uuid}", *calibrate.table(figures), sep="\n", flush=True)
        if gpu.ways.without:
            print(f"copies by programs of the GPU cannot be had: {gpu.ways.without}", flush=True)
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=2), flush=True)
    return 0


def _status(url: str | None, key: str) -> int:
    from kvdepot import upkeep, wire

    with upkeep.connect(load(flags={"url": url}).url, key) as client:
        print(json.dumps(client.ask(wire.Status()).result(timeout=5.0), indent=2), flush=True)
    return 0


def _upkeep(command: str, args: dict[str, Any]) -> int:
    from kvdepot import upkeep, wire

    if command == "forget" and not (args["model"] or args["salt"] or args["all"]):
        raise ConfigError("say what to forget: --model, --salt or --all")
    with upkeep.connect(load(flags={"url": args["url"]}).url, args["key"] or "") as client:
        if command == "unpin":
            upkeep.unpin(client, args["name"])
            return 0
        if command == "forget":
            models: list[str] = []
            if args["model"]:
                spaces = client.ask(wire.Status()).result(timeout=5.0)["namespaces"]
                models = sorted({s["model"] for s in spaces if s["model"].startswith(args["model"])}) or [args["model"]]
            said = upkeep.forget(client, models, args["salt"])
            for place, what in said.items():
                print(f"{place}: {what} chunks" if isinstance(what, int) else f"{place}: {what}", flush=True)
            return 0 if all(isinstance(what, int) for what in said.values()) else 1
        prompt = upkeep.read_prompt(client, args["tokens"], args["keys"], args["model"], args["salt"])
        if command == "pin":
            count, done = upkeep.pin(client, args["name"], prompt, args["seconds"]), "pinned"
        else:
            count, done = upkeep.warm(client, prompt), "in memory"
        print(f"{count} of {len(prompt)} chunks are {done}", flush=True)
        return 0 if count == len(prompt) else 1


if __name__ == "__main__":
    sys.exit(main())
