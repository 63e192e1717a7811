"""`kvdepot doctor`; findings.py has the checks."""

from __future__ import annotations

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.output import clean, console, print_json, progress
from kvdepot.config import default_key

__all__ = ["doctor"]


@click.command()
@click.option("--config", "file", metavar="FILE", type=click.Path(), help="the server's settings file (TOML)")
@options.server
@options.as_json
def doctor(file: str | None, url: str | None, key: str | None, as_json: bool) -> int:
    """Diagnose common problems of this machine, this user, the installation and the server, and say what to do.

    Exit code 1 if something would keep kvdepot from working.
    """
    from kvdepot.cli.findings import findings

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
