"""The commands that say what is known. `kvdepot inspect`: where the chunks of a prompt are, or which chunks differed
from what an engine computed. `kvdepot why`: the trail of a request, and why it found no more."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.chunks import open_prompt
from kvdepot.cli.connect import connect
from kvdepot.cli.output import clean, count, duration, print_json, ranges, show
from kvdepot.client import admin
from kvdepot.client.socket import Client
from kvdepot.protocol.chunks import ChunkStatus
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.status import MOST_NAME, Mismatch
from kvdepot.protocol.trails import ENDS, Trail, TrailLookup
from kvdepot.values import plural, size

if TYPE_CHECKING:
    from kvdepot.cli.view import Listing


@click.command(epilog=options.PROMPT)
@options.prompt
@click.option("--compare", is_flag=True, help="instead of a prompt: chunks that differed from what engines computed")
@click.option("--release", metavar="NAME", help="end the quarantine of models whose names begin with NAME")
@options.server
@options.as_json
def inspect(
    source: options.PromptSource, compare: bool, release: str | None, server: options.Address, as_json: bool
) -> int:
    """Show where the chunks of one prompt are, or with --compare, which chunks differed from what engines computed.

    For a prompt, it shows which chunks are in memory, what holds them, and which tiers probably have them. It does not
    query tiers, so it cannot say whether they have chunks that memory lacks; `kvdepot warm` loads those. --json lists
    each chunk. Exit code 1 if memory has none of the chunks.

    An engine computes a part of its first hit on another engine's chunks, and compares it. With `kvdepot serve
    --verify-hits`, engines also compute and compare a share of all later hits. If a later hit differs, the model is in
    quarantine: none of its chunks is served until --release. --compare names the engines, what is different about them,
    and which parts of the chunk differ. Parts are in the order of the engine's KV tensors; adjacent tensors are one.
    --model chooses models whose names begin with NAME. Exit code 1 while a model is in quarantine.
    """
    if (compare or release is not None) and (source.tokens or source.hashes or source.salt):
        raise click.UsageError("--compare and --release need no prompt: leave out --tokens, --hashes and --salt")
    if release is not None:
        with connect(server) as client:
            released = admin.end_quarantine(client, release)
        text = f"released {plural(released, 'model')}" if released else "no such model is in quarantine"
        show(as_json, {"released": released}, text)
        return 0 if released else 1
    if compare:
        return _compare(source.model, server, as_json)
    with open_prompt(server, source) as (client, prompt, _):
        model, hashes = prompt.spec.model, prompt.hashes
        found = [each for each in admin.inspect(client, model, hashes) if each.model == model]
    keys = [hashes[at : at + HASH_BYTES].hex() for at in range(0, len(hashes), HASH_BYTES)]
    numbers = {each: number for number, each in enumerate(keys, 1)}
    if as_json or not found:
        value = {"chunks": len(numbers), "in_memory": found}
        show(as_json, value, f"memory has none of the prompt's {len(numbers)} chunks")
    else:
        _print(found, numbers)
    return 0 if found else 1


def _print(found: list[ChunkStatus], numbers: dict[str, int]) -> None:
    """Print a summary and a table for each model. numbers: of the prompt's chunks, from 1, by hash."""
    from kvdepot.cli.view import named, print_tables

    models: dict[tuple[str, str, int], list[ChunkStatus]] = {}
    for each in found:
        models.setdefault((each.tenant, each.model, each.world_size), []).append(each)
    for number, ((tenant, model, ranks), parts) in enumerate(models.items()):
        there = {each.hash for each in parts}
        total = max(len(numbers), len(there))
        tokens = parts[0].chunk_tokens
        lines = [
            f"{clean(named(tenant, model))}, {ranks} {'rank' if ranks == 1 else 'ranks'}",
            f"{count(len(there))} of {count(total)} chunks in memory, {count(len(there) * tokens)} of "
            f"{count(total * tokens)} tokens, {size(sum(each.bytes for each in parts))}",
        ]
        if missing := sorted(at for each, at in numbers.items() if each not in there):
            lines.append(f"chunks {ranges(missing)} are not in memory; whether tiers have them is unknown")
        print("\n" * bool(number) + "\n".join(lines) + "\n", flush=True)
        print_tables(_groups(parts, numbers))


def _groups(parts: list[ChunkStatus], numbers: dict[str, int]) -> Listing:
    """A line for each KV cache group."""
    from kvdepot.cli.view import Listing

    groups: dict[int, list[ChunkStatus]] = {}
    for each in parts:
        groups.setdefault(each.group, []).append(each)
    rows = []
    for group, chunks in sorted(groups.items()):
        states = Counter(each.state for each in chunks)
        tiers = Counter(name for each in chunks for name in each.tiers)
        ages = [each.age_s for each in chunks if each.age_s is not None]
        reach = chunks[0].reach  # of the chunks that resuming a prompt needs; 0 = all
        needed = "all chunks" if not reach else "last chunk" if reach == 1 else f"last {reach} chunks"
        rows.append(
            (
                f"{group}: {needed}",
                ranges(sorted(numbers.get(each.hash, 0) for each in chunks)),
                ", ".join(f"{count(number)} {state}" for state, number in sorted(states.items())),
                size(sum(each.bytes for each in chunks)),
                count(sum(bool(each.held) for each in chunks)),
                count(sum(bool(each.leased) for each in chunks)),
                duration(max(ages)) if ages else "-",
                ", ".join(f"{name}: {count(number)}" for name, number in sorted(tiers.items())) or "-",
            )
        )
    return Listing(("KV cache group", "chunks", "state", ">bytes", ">held", ">leased", ">age", "also in tiers"), rows)


def _compare(models: str, server: options.Address, as_json: bool) -> int:
    """Show the results of comparisons. models: the beginning of the models' names."""
    with connect(server) as client:
        status = admin.status(client)
        listed = [each for each in status.mismatches if each.model.startswith(models)]
        found = [(each, _places(client, each)) for each in listed]
    quarantined = [each for each in status.quarantined if each.startswith(models)]
    compared, differing = (status.counters.get(f"{name}_chunks", 0) for name in ("compared", "differing"))
    if as_json:
        value = {
            "compared_chunks": compared, "differing_chunks": differing, "quarantined": quarantined,
            "mismatches": [msgspec.structs.asdict(each) | {"places": places} for each, places in found],
        }  # fmt: skip
        print_json(value)
        return 1 if quarantined else 0
    print(f"since the server started: {plural(compared, 'shard')} compared, {count(differing)} differed")
    for model in quarantined:
        print(f"in quarantine: {clean(model)}")
    if found:
        from kvdepot.cli.view import print_tables
    for each, places in found:
        print("\n" + "\n".join(_describe(each, places)) + "\n", flush=True)
        print_tables(_parts(each))
    return 1 if quarantined else 0


def _places(client: Client, mismatch: Mismatch) -> list[str]:
    found = admin.inspect(client, mismatch.model, bytes.fromhex(mismatch.chunk))
    chunks = [each for each in found if (each.tenant, each.model) == (mismatch.tenant, mismatch.model[:MOST_NAME])]
    return [*("memory" for _ in chunks[:1]), *dict.fromkeys(clean(tier) for each in chunks for tier in each.tiers)]


def _parts(mismatch: Mismatch) -> Listing:
    """A line for each run of parts that are on one side of the limit."""
    from kvdepot.cli.view import Listing

    rows = []
    parts = [(number, part) for number, part in enumerate(mismatch.parts, 1) if part is not None]
    for differs, run in groupby(parts, lambda each: each[1] > mismatch.limit):
        numbers, found = zip(*run, strict=True)
        said = f"above the limit of {mismatch.limit:.2g}" if differs else "within the limit"
        rows.append((ranges(list(numbers)), f"{min(found):.2g}", f"{max(found):.2g}", said))
    return Listing((f"part of {len(mismatch.parts)}", ">smallest difference", ">largest", ""), rows)


def _describe(each: Mismatch, places: list[str]) -> list[str]:
    when = datetime.fromtimestamp(each.wall_s).astimezone().isoformat(" ", "seconds")
    where = f"now in {', '.join(places)}" if places else "no longer in memory"
    return [
        f"{when}  {clean(each.model)}{'  (sampled hit)' if each.is_sample else ''}",
        f"  computed by  {clean(each.engine)}",
        f"  stored by    {clean(each.writer)}",
        f"  difference   up to {each.worst:.2g} in {plural(each.chunks, 'chunk')}; the limit is {each.limit:.2g}",
        f"  largest in   chunk {each.chunk}, rank {each.rank}, {where}",
        *(f"  differs      {clean(fact)}" for fact in each.facts or ["in nothing that the engines reported"]),
    ]


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
    show(as_json, trail, *map(clean, _trail(trail)))
    return 0


def reason(lookup: TrailLookup) -> str:
    """Why the prefix of a lookup ended, in words."""
    said = ENDS.get(lookup.end, lookup.end)
    if lookup.gone_s is not None:
        said += f"; it left memory {duration(lookup.gone_s)} before this lookup"
    if lookup.end == "absent" and not lookup.found:
        said += "; its hash covers all text before it, the cache_salt, the LoRA adapter and changed weights"
    elif lookup.end == "absent" and lookup.branches is not None:
        are = "is" if lookup.branches == 1 else "are"
        said += f"; {plural(lookup.branches, 'other chunk')} {are} stored behind the last one that was found"
    return said


def _trail(trail: Trail) -> Iterator[str]:
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
        if what.startswith("tokens") and "compared" in numbers:
            found = [name for name in ("differing", "equal") if name in trail.shards]
            parts += f": {found[0] if found else 'the chunks were gone'}"
        yield f"  {what}: {parts or 'none'}"
    yield from (f"  failed: {each}" for each in trail.errors)
