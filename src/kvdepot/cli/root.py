"""The list of commands, and the handling of their errors and exit codes. Called by `main`."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import cast

import click

from kvdepot import __version__
from kvdepot.errors import ConfigError, KVDepotError

_FAMILIES = {
    "Run and watch": {
        "serve": ("serve", "run the server"),
        "stop": ("serve", "stop a running server"),
        "status": ("status", "show the state of a running server"),
        "top": ("top", "watch a running server live; press q to quit"),
        "doctor": ("doctor", "diagnose common problems"),
        "config": ("serve", "show every setting and where its value comes from"),
    },
    "Chunks": {
        "inspect": ("inspection", "show where a prompt's chunks are, or which chunks differed"),
        "why": ("inspection", "show what a request found, and why no more"),
        "warm": ("chunks", "load a prompt's chunks from the tiers into memory"),
        "lease": ("chunks", "keep a prompt's chunks, or remove them after a time; list leases"),
        "release": ("chunks", "end a lease, and remove its chunks"),
        "forget": ("chunks", "remove chunks from memory and from all tiers"),
        "quota": ("quota", "show or set how much memory a tenant or salt may take"),
        "check": ("check", "verify an arena: its records and checksums"),
    },
    "Measure": {"certify": ("certify", "run your model with and without the depot, and compare")},
    "Set up": {"keygen": ("serve", "generate the keys of a server and its clients")},
}
"""Commands with their modules and descriptions, in the order of the help. A module is imported when it is used."""
_COMMANDS = {command: entry for family in _FAMILIES.values() for command, entry in family.items()}
_MEANT = {
    "serve": "server start run launch daemon",
    "stop": "shutdown kill quit",
    "status": "list ls info ping stats state health models ps show",
    "top": "monitor watch",
    "inspect": "get find lookup query verify compare",
    "why": "explain trace",
    "warm": "load prefetch preload",
    "lease": "pin keep leases pins retain",
    "release": "unpin",
    "forget": "flush flushall flushdb clear delete del rm remove drop evict purge reset",
    "--version": "version",
}
"""Our commands, and what users of other caches and databases type in their place."""
_COMPLETE = "_KVDEPOT_COMPLETE"
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
one. NO_COLOR=1 disables colour. eval "$(_KVDEPOT_COMPLETE=bash_source kvdepot)" makes bash complete commands and
options; zsh_source and fish_source are for those shells.
"""


class Root(click.Group):
    """A group that imports commands lazily, and suggests one for an unknown name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"kvdepot.cli.{_COMMANDS[cmd_name][0]}")
        return cast(click.Command, getattr(module, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help":  # as other programs have it
            args = [*args[1:2], "--help"]
            if len(args) == 1:
                click.echo(ctx.get_help())
                ctx.exit()
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            from difflib import get_close_matches

            close = [ours for ours, theirs in _MEANT.items() if name.lower() in theirs.split()]
            close = close or get_close_matches(name, _COMMANDS, 1, 0.7)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for family, commands in _FAMILIES.items():
            with formatter.section(family):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()], col_max=12)


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
    if _COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(root, {}, "kvdepot", _COMPLETE, os.environ[_COMPLETE])
    try:
        with root.make_context("kvdepot", list(words)) as context:
            return root.invoke(context) or 0
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()
        return 2
    except click.UsageError as exc:
        context, said = exc.ctx or _context(words), exc.format_message()
        return _failed(f"{' '.join(said.split()).rstrip('.')} (see `{context.command_path} --help`)", 2)
    except ConfigError as exc:
        return _failed(exc, 2)
    except KVDepotError as exc:
        return _failed(exc, 1)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output has closed the pipe
        return _unwritten()
    except OSError as exc:
        if exc.errno not in _FULL:
            raise
        _failed(f"cannot write the output: {exc.strerror}; free some space and try again", 1)
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


def _failed(what: object, code: int) -> int:
    print(f"kvdepot: {what}", file=sys.stderr)
    return code
