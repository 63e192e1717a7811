"""`kvdepot verify`: what comparisons of engines' KV have shown, and the end of a quarantine."""

from __future__ import annotations

from datetime import datetime

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import clean, count, show
from kvdepot.client import admin
from kvdepot.protocol.status import Mismatch, Status
from kvdepot.values import plural


@click.command()
@click.option("--release", metavar="MODEL", help="serve the chunks of models whose names begin with MODEL again")
@options.server
@options.as_json
def verify(release: str | None, server: options.Address, as_json: bool) -> int:
    """Show what comparing engines' KV with stored chunks has found: how many chunks, and which engines differ in what.

    An engine's first hit on other engines' chunks is computed and compared; with `kvdepot serve --verify-hits`, a share
    of all later hits, too. If such a later hit differs, no chunk of that model is served until --release. `kvdepot
    inspect --compare` shows where these chunks are, and which layers differ. The exit code is 1 while a model is in
    quarantine.
    """
    with connect(server) as client:
        if release is not None:
            released = admin.end_quarantine(client, release)
            text = f"released {plural(released, 'model')}" if released else "no such model is in quarantine"
            show(as_json, {"released": released}, text)
            return 0 if released else 1
        status = admin.status(client)
    compared, differing = (status.counters.get(f"{name}_chunks", 0) for name in ("compared", "differing"))
    found = {
        "compared_chunks": compared, "differing_chunks": differing, "quarantined": status.quarantined,
        "mismatches": status.mismatches,
    }  # fmt: skip
    show(as_json, found, "\n".join(_lines(status, compared, differing)))
    return 1 if status.quarantined else 0


def _lines(status: Status, compared: int, differing: int) -> list[str]:
    lines = [f"since the server started: {plural(compared, 'shard')} compared, {count(differing)} differed"]
    lines += [f"in quarantine: {clean(model)}" for model in status.quarantined]
    for each in status.mismatches:
        lines += ["", *_describe(each)]
    return lines


def _describe(each: Mismatch) -> list[str]:
    when = datetime.fromtimestamp(each.wall_s).astimezone().isoformat(" ", "seconds")
    return [
        f"{when}  {clean(each.model)}{'  (sampled hit)' if each.is_sample else ''}",
        f"  computed by  {clean(each.engine)}",
        f"  stored by    {clean(each.writer)}",
        f"  difference   up to {each.worst:.2g} in {plural(each.chunks, 'chunk')}; the limit is {each.limit:.2g}",
        f"  largest in   chunk {each.chunk}, rank {each.rank}",
        *(f"  differs      {clean(fact)}" for fact in each.facts or ["in nothing that the engines reported"]),
    ]
