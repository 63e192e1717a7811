"""`kvdepot status`: the state of a running server, once or again and again."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import console, print_json
from kvdepot.errors import KVDepotError

__all__ = ["status"]

_ANSWER_S = 5.0


@click.command()
@click.option("-w", "--watch", metavar="[SECONDS]", is_flag=False, flag_value="2", help="print it again every SECONDS "
    "(without a value: 2) until interrupted; with --json, one line each")  # fmt: skip
@options.server
@options.as_json
def status(watch: str | None, url: str | None, key: str | None, as_json: bool) -> int:
    """Show the state of a running server: memory, tokens reused and their upper bound (infinite cache), saved prefill,
    latencies, engines, models, tiers, evictions and failures, and GPUs."""
    from kvdepot.protocol import wire

    interval = None if watch is None else options.seconds_of("--watch", watch)
    with connect(url, key) as client:
        while True:
            try:
                answer = client.ask(wire.Status()).result(timeout=_ANSWER_S)
            except KVDepotError as exc:
                if interval is None:
                    raise
                print(f"kvdepot: {exc}", file=sys.stderr, flush=True)
            else:
                _show(answer, client.server_url, as_json, interval is not None)
            if interval is None:
                return 0
            time.sleep(interval)


def _show(answer: Any, place: str, as_json: bool, is_one_of_many: bool) -> None:
    if as_json:
        if is_one_of_many:
            print(json.dumps(answer), flush=True)
        else:
            print_json(answer)
        return
    from kvdepot.cli import view
    from kvdepot.protocol.status import read

    now = read(answer)
    out = console()
    if is_one_of_many and out.is_terminal:
        out.clear()
    out.print(view.summary(now, place))
    for listing in view.listings(now):
        out.print()
        out.print(listing.table(out.width))
    if is_one_of_many and not out.is_terminal:
        out.print()
