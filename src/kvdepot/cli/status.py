"""`kvdepot status`: the state of a running server."""

from __future__ import annotations

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import console, print_json

__all__ = ["status"]


@click.command()
@options.server
@options.as_json
def status(url: str | None, key: str | None, as_json: bool) -> int:
    """Show the state of a running server: memory, tokens reused and their upper bound (infinite cache), saved prefill,
    latencies, engines, models, tiers, evictions and failures, and GPUs."""
    from kvdepot.protocol import wire

    with connect(url, key) as client:
        answer = client.ask(wire.Status()).result(timeout=5.0)
    if as_json:
        print_json(answer)
        return 0
    from kvdepot.cli import view
    from kvdepot.protocol.status import read

    now = read(answer)
    out = console()
    out.print(view.summary(now, client.server_url))
    for listing in view.listings(now):
        out.print()
        out.print(listing.table(out.width))
    return 0
