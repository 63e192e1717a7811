"""The commands there are, and what a failure of any of them says and exits with. Run by `main`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import cast

import click

from kvdepot import __version__
from kvdepot.errors import ConfigError, KVDepotError

__all__ = ["COMPLETE", "root", "run"]

_FAMILIES = {
    "Run and watch": {"serve": "serve", "status": "status", "top": "top", "doctor": "doctor", "config": "serve"},
    "Chunks": {"warm": "chunks", "pin": "chunks", "unpin": "chunks", "forget": "chunks", "check": "chunks"},
    "Size and measure": {"simulate": "simulate", "bench": "checkout", "demo": "checkout", "calibrate": "setup"},
    "Set up": {"keygen": "setup", "completion": "setup"},
}
"""Commands and the modules that have them, in the order of the help. A module is imported when it is asked for."""
_MODULES = {command: module for family in _FAMILIES.values() for command, module in family.items()}
COMPLETE = "_KVDEPOT_COMPLETE"
"""The variable by which a shell asks for completions."""

_EPILOG = """\b
Exit codes:
  0    done
  1    failed; the message says why
  2    wrong usage or configuration
  130  interrupted

Settings can also stand in the environment, e.g. KVDEPOT_URL; clients that need a key name its file in KVDEPOT_KEY.
NO_COLOR=1 turns colours off.
"""


class Root(click.Group):
    """A group that imports a command when it is asked for, and knows what a mistyped one was to be."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(f"kvdepot.cli.{_MODULES[cmd_name]}")
        return cast(click.Command, getattr(module, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _MODULES and not args[0].startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(args[0], _MODULES, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"There is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for family, commands in _FAMILIES.items():
            with formatter.section(family):
                rows = [(name, cast(click.Command, self.get_command(ctx, name))) for name in commands]
                formatter.write_dl([(name, command.get_short_help_str(90)) for name, command in rows], col_max=12)


@click.command(
    cls=Root,
    help="A KV-cache server beside LLM engines.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, message="kvdepot %(version)s")
def root() -> None:
    """Holds the commands."""


def run(words: Sequence[str]) -> int:
    """Run one command; the exit code."""
    if COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(root, {}, "kvdepot", COMPLETE, os.environ[COMPLETE])
    try:
        with root.make_context("kvdepot", list(words)) as context:
            return root.invoke(context) or 0
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.ClickException as exc:
        exc.show()
        return 2
    except ConfigError as exc:
        return _failed(exc, 2)
    except KVDepotError as exc:
        return _failed(exc, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _failed(exc: KVDepotError, code: int) -> int:
    print(f"kvdepot: {exc}", file=sys.stderr)
    return code
