"""`kvdepot doctor`; findings.py has the checks."""

from __future__ import annotations

import sys

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.output import clean, console, print_json, progress, size
from kvdepot.config import default_key
from kvdepot.memory import shm
from kvdepot.values import plural

__all__ = ["doctor"]


@click.command()
@click.option("--config", "file", metavar="FILE", type=click.Path(), help="the server's settings file (TOML)")
@click.option("--fix", is_flag=True, help="remove tensors in /dev/shm that ended engines have left behind")
@options.server
@options.as_json
def doctor(file: str | None, fix: bool, url: str | None, key: str | None, as_json: bool) -> int:
    """Diagnose common problems of this machine, this user, the installation and the server, and say what to do.

    Exit code 1 if something would keep kvdepot from working.
    """
    from kvdepot.cli.findings import findings

    if fix:
        removed = {name: taken for name, taken in shm.left_tensors() if shm.remove_left_tensors(name)}
        what = f"{plural(len(removed), 'file')} of ended engines, {size(sum(removed.values()))}"
        print(f"kvdepot: removed {what}", file=sys.stderr)
    with progress() as update:
        found = list(findings(file, url, key or default_key(), lambda what: update(f"checking {what}", 0, 0)))
    worst = {finding.state for finding in found}
    if as_json:
        print_json(msgspec.to_builtins(found))
        return 1 if "fail" in worst else 0
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table.grid(padding=(0, 2, 0, 0))
    for finding in found:
        text = Text(clean(finding.text), overflow="fold")
        if finding.advice:
            text.append(f"\n-> {clean(finding.advice)}", "bold" if finding.state == "fail" else "")
        table.add_row(Text(f"{finding.state:<4}", styles[finding.state]), Text(finding.what), text)
    console().print(table)
    return 1 if "fail" in worst else 0
