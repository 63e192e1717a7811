"""`kvdepot why`: the trail of one request, and why it found no more."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import clean, count, duration, show, size
from kvdepot.client import admin
from kvdepot.protocol.trails import ENDS, Trail, TrailLookup
from kvdepot.values import plural


@click.command()
@click.argument("request", metavar="[REQUEST_ID]", required=False, default="")
@options.server
@options.as_json
def why(request: str, server: options.Address, as_json: bool) -> int:
    """Show what was looked up, loaded and stored for a request, and why no more was found.

    REQUEST_ID is the id of the request in its engine, or the beginning of it: the `id` in vLLM's response (cmpl-...,
    chatcmpl-...). Without it: the last request that found nothing. The server keeps the last 512 requests.
    """
    with connect(server) as client:
        trail = admin.why(client, request)
    show(as_json, trail, *map(clean, _lines(trail)))
    return 0


def reason(lookup: TrailLookup) -> str:
    """Why the prefix of a lookup ended, in words."""
    said = ENDS.get(lookup.end, lookup.end)
    if lookup.gone_s is not None:
        said += f"; it left memory {duration(lookup.gone_s)} before this lookup"
    if lookup.end == "absent" and not lookup.found:
        said += (
            "; its hash covers the text before it, cache_salt, LoRA adapter and changed weights: any of them may differ"
        )
    elif lookup.end == "absent" and lookup.branches is not None:
        said += f"; {plural(lookup.branches, 'other chunk')} begin{'s' * (lookup.branches == 1)} where the hit ends"
    return said


def _lines(trail: Trail) -> Iterator[str]:
    yield f"request {trail.request}{f' of tenant {trail.tenant}' if trail.tenant else ''}"
    for each in trail.lookups:
        age, salt = duration(max(0, int(time.time()) - each.at)), " with a cache_salt" if each.salted else ""
        yield f"  {age} ago, engine {each.engine}, {each.model}, {plural(each.ranks, 'rank')}:"
        asked = f"{plural(each.asked, 'chunk')} of {each.chunk_tokens} tokens{salt}"
        yield f"    looked up {asked}; found {count(each.found)}, {count(each.in_memory)} of them in memory"
        yield from (f"    {size(number)} were requested from {tier}" for tier, number in each.tiers.items())
        yield from (f"    {tier} was too slow" for tier in each.late)
        yield f"    {reason(each)}{f' (chunk {each.next})' if each.next else ''}"
    yield from (f"  not searched: {other}" for other in trail.others)
    for what, numbers in (("shards", trail.shards), ("tokens, by its engine", trail.engine)):
        parts = ", ".join(f"{count(number)} {name.replace('_', ' ')}" for name, number in numbers.items())
        yield f"  {what}: {parts or 'none'}"
    yield from (f"  failed: {each}" for each in trail.errors)
