"""The list of commands, and the handling of their errors and exit codes. Called by `main`."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import click

from kvdepot import __version__
from kvdepot.errors import ConfigError, KVDepotError

__all__ = ["COMPLETE", "root", "run"]

_FAMILIES = {
    "Run and watch": {
        "serve": "run the server",
        "stop": "stop a running server",
        "logs": "show the log of a server that an engine started",
        "status": "show the state of a running server",
        "top": "watch a running server live; press q to quit",
        "open": "print the URL of the web page, including the token",
        "doctor": "diagnose common problems",
        "config": "show every setting and where its value comes from",
    },
    "Chunks": {
        "ls": "list the prompts in memory, by their first chunk",
        "inspect": "show where the chunks of one prompt are",
        "warm": "load a prompt's chunks from the tiers into memory",
        "pin": "keep a prompt's chunks in memory under a name",
        "unpin": "end a pin",
        "lease": "keep a prompt's chunks for a time, or remove them after it",
        "release": "end a lease and remove its chunks",
        "leases": "show what leases hold, cost and saved",
        "forget": "remove chunks from memory and from all tiers",
        "quota": "show or set how much memory a tenant or salt may take",
        "check": "verify an arena: its records and checksums",
    },
    "Size and measure": {
        "size": "show how many tokens, prompts and chats of a model fit into memory",
        "simulate": "replay request traces: hit rates by cache size and policy",
        "bench": "measure a running server (--url), or this machine (in a checkout)",
        "demo": "show a vLLM engine reusing stored KV (in a checkout)",
        "calibrate": "measure GPU copy paths",
    },
    "Set up": {
        "keygen": "generate the keys of a server and its clients",
        "token": "print the HTTP bearer token",
        "completion": "print a shell completion script",
    },
}
"""Commands and their descriptions, in the order of the help."""
_COMMANDS = {command: text for family in _FAMILIES.values() for command, text in family.items()}
COMPLETE = "_KVDEPOT_COMPLETE"
"""The environment variable with which a shell asks for completions."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing to a full disk."""

_EPILOG = """\b
Exit codes:
  0    done
  1    failed; the message says why
  2    wrong usage or configuration
  130  interrupted

Settings can also be given in the environment, e.g. KVDEPOT_URL. KVDEPOT_KEY names the key file of a client that needs
one. NO_COLOR=1 disables colour.
"""


def _module(command: str) -> Any:
    """Import the module of a command. Only these names are imported, and only when they are used."""
    match command:
        case "serve" | "config":
            return importlib.import_module("kvdepot.cli.serve")
        case "stop" | "logs":
            return importlib.import_module("kvdepot.cli.stop")
        case "status":
            return importlib.import_module("kvdepot.cli.status")
        case "top":
            return importlib.import_module("kvdepot.cli.top")
        case "open" | "token":
            return importlib.import_module("kvdepot.cli.web")
        case "doctor":
            return importlib.import_module("kvdepot.cli.doctor")
        case "quota":
            return importlib.import_module("kvdepot.cli.quota")
        case "lease" | "release" | "leases":
            return importlib.import_module("kvdepot.cli.leases")
        case "warm" | "pin" | "unpin" | "forget" | "check":
            return importlib.import_module("kvdepot.cli.chunks")
        case "ls" | "inspect":
            return importlib.import_module("kvdepot.cli.prefixes")
        case "size":
            return importlib.import_module("kvdepot.cli.size")
        case "simulate":
            return importlib.import_module("kvdepot.cli.simulate")
        case "bench" | "demo":
            return importlib.import_module("kvdepot.cli.checkout")
        case "keygen" | "calibrate" | "completion":
            return importlib.import_module("kvdepot.cli.setup")
    raise AssertionError(command)


class Root(click.Group):
    """A group that imports commands lazily, and suggests a name for a mistyped one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return cast(click.Command, getattr(_module(cmd_name), cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help":  # as other programs have it
            args = [*args[1:2], "--help"]
            if len(args) == 1:
                click.echo(ctx.get_help())
                ctx.exit()
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(args[0], _COMMANDS, 1, 0.7)  # get is not a mistyped forget
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for family, commands in _FAMILIES.items():
            with formatter.section(family):
                formatter.write_dl(list(commands.items()), col_max=12)


@click.command(
    cls=Root,
    help="A KV-cache server for LLM engines.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, message="kvdepot %(version)s")
def root() -> None:
    """The root of all commands."""


def run(words: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    if COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(root, {}, "kvdepot", COMPLETE, os.environ[COMPLETE])
    try:
        with root.make_context("kvdepot", list(words)) as context:
            return root.invoke(context) or 0
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()
        return 2
    except click.UsageError as exc:
        where = (exc.ctx or _context(words)).command_path
        print(f"kvdepot: {' '.join(exc.format_message().split()).rstrip('.')} (see `{where} --help`)", file=sys.stderr)
        return 2
    except ConfigError as exc:
        return _failed(exc, 2)
    except KVDepotError as exc:
        return _failed(exc, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed the pipe
        return _unwritten()
    except OSError as exc:
        if exc.errno not in _FULL:
            raise
        print(f"kvdepot: cannot write the output: {exc.strerror}; free some space and try again", file=sys.stderr)
        return _unwritten()


def _unwritten() -> int:
    """Discard buffered output, so that the process can exit; returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _context(words: Sequence[str]) -> click.Context:
    """The context whose help to name if click's error has none: its option parser does not know the command."""
    whole = click.Context(root, info_name="kvdepot")
    command = root.get_command(whole, words[0]) if words else None
    return whole if command is None else click.Context(command, whole, words[0])


def _failed(exc: KVDepotError, code: int) -> int:
    print(f"kvdepot: {exc}", file=sys.stderr)
    return code
