"""Output of commands: JSON, tables, readable numbers, and progress. rich is imported only when something is printed.

Invariant: text from a server or a file is printed as text, never as markup, and without control characters.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import click
import msgspec

from kvdepot.cli.options import Consent
from kvdepot.errors import ConfigError

_RUNS = 6
"""Runs of numbers that `ranges` shows."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what happens, how much is done, and of how much; 0 = unknown."""


def print_json(value: object) -> None:
    print(json.dumps(msgspec.to_builtins(value), indent=2), flush=True)


def show(as_json: bool, value: object, *lines: str) -> None:
    """Print a command's result: a value as JSON, or the lines for people."""
    if as_json:
        print_json(value)
    else:
        print("\n".join(lines), flush=True)


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on standard error; nothing if that is not a terminal, or one that cannot draw."""
    if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(
            task, description=escape(clean(what)), completed=done, total=total or None
        )


def confirm(consent: Consent, what: str, question: str, preview: Callable[[], tuple[object, Sequence[str]]]) -> None:
    """Return if a command may make a change that cannot be undone: --yes, or the answer of the person at the terminal.

    what: the effect, for the error without a terminal. preview: what would happen, as a value for --json and as lines.
    Blocks until the answer. Raises Exit after a dry run (0) and a refusal (1), and ConfigError without a terminal.
    """
    if consent.dry_run:
        value, lines = preview()
        show(consent.as_json, value, *lines, "nothing was changed: this was a dry run")
        raise click.exceptions.Exit(0)
    if consent.yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{what}: confirm with --yes, or see what would happen with --dry-run")
    print("\n".join(preview()[1]), file=sys.stderr)
    if not click.confirm(question, err=True):
        print("kvdepot: nothing was changed", file=sys.stderr)
        raise click.exceptions.Exit(1)


def clean(text: str) -> str:
    """Replace all unprintable characters, which could move a terminal's cursor or change its colours."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def count(number: float) -> str:
    """Format a number: 12,345; 1.2 M; 3.4 G."""
    if number < 1e6:
        return f"{number:,.0f}"
    return f"{number / 1e6:.1f} M" if number < 1e9 else f"{number / 1e9:,.1f} G"


def ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers: 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number <= runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_RUNS]]
    return ", ".join([*shown, "..."] if len(runs) > _RUNS else shown)


def share(part: float) -> str:
    """Format a ratio: 71.2 %."""
    return f"{100 * part:.1f} %"


def duration(seconds: float) -> str:
    """Format a time with at most two units: 250 µs, 12 ms, 3 h 12 min."""
    if not seconds:
        return "0 s"
    for most_s, factor, unit in ((0.0009995, 1e6, "µs"), (0.9995, 1e3, "ms"), (60, 1, "s")):
        if seconds < most_s:
            return f"{seconds * factor:.3g} {unit}"
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if minutes < 60:
        return f"{minutes} min {seconds % 60:.0f} s"
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{days} d {hours % 24} h"
