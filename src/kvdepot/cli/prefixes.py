"""`kvdepot ls` and `kvdepot inspect`: which prompts are in memory, and where the chunks of one of them are."""

from __future__ import annotations

import sys
from collections import Counter
from string import hexdigits
from typing import TYPE_CHECKING

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import clean, count, duration, ranges, show, size
from kvdepot.client import admin
from kvdepot.client.socket import Client
from kvdepot.errors import ConfigError
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.prefixes import MOST_PREFIXES, SORTS, ChunkStatus

if TYPE_CHECKING:
    from kvdepot.cli.view import Listing

_LEAST_DIGITS, _DIGITS = 6, 64
"""Hexadecimal digits of the beginning of a hash, and of a whole one."""


@click.command()
@click.option("-m", "--model", default="", metavar="NAME", help="only models whose name begins with NAME")
@click.option("-s", "--sort", type=click.Choice(SORTS), default="hits", help="what to sort by, the highest first; "
              "idle: time since some of it was used (default: hits)")  # fmt: skip
@click.option("-n", "--most", type=click.IntRange(1, MOST_PREFIXES), default=20, metavar="N", help="how many to show "
              "(default: 20)")  # fmt: skip
@options.long
@options.server
@options.as_json
def ls(model: str, sort: str, most: int, is_long: bool, server: options.Address, as_json: bool) -> int:
    """List the prompts in memory, grouped by their first chunk, whose hash is the id of the group.

    A line has the tokens that all prompts of the group share, the number of prompts, their tokens and bytes in memory
    (each chunk once), the lookups that ended at one of these chunks, and the tokens that they found. `kvdepot inspect
    ID` shows the shared chunks.
    """
    with connect(server) as client:
        found = admin.prefixes(client, model, sort, min(most + 1, MOST_PREFIXES))  # to know whether there are more
    has_more, found = len(found) > most, found[:most]
    if as_json or not found:
        show(as_json, found, f"no prompts{f' of models named {clean(model)}...' if model else ''} are in memory")
        return 0
    from kvdepot.cli import view

    view.print_tables(view.prefixes(found, is_long))
    if has_more:
        print(f"kvdepot: the first {most}; -n shows more", file=sys.stderr)
    return 0


@click.command(epilog=options.PROMPT)
@click.argument("prefix", metavar="[HASH]", required=False, default="")
@options.prompt
@options.server
@options.as_json
def inspect(prefix: str, source: options.PromptSource, server: options.Address, as_json: bool) -> int:
    """Show where the chunks of one prompt are: those up to the chunk HASH, or those of the prompt that is given. For an
    id that `kvdepot ls` shows, or its beginning: the chunks that all prompts of that group share.

    It shows memory, what holds the chunks, and which tiers probably have them. Tiers are not queried: whether they
    have chunks that memory lacks is unknown; `kvdepot warm` loads those. --json lists each chunk. Exit code 1 if memory
    has none of the chunks.
    """
    if sum(map(bool, (prefix, source.tokens, source.hashes))) != 1:
        raise click.UsageError("give exactly one of HASH, --tokens and --hashes")
    if prefix and not (_LEAST_DIGITS <= len(prefix) <= _DIGITS and set(prefix) <= set(hexdigits)):
        raise ConfigError(
            f"{clean(prefix)[:80]!r} is not a chunk's hash: give {_DIGITS} hexadecimal digits, as `kvdepot ls --long` "
            f"shows them, or {_LEAST_DIGITS} or more digits of an id that `kvdepot ls` shows"
        )
    with connect(server) as client:
        found, numbers = _up_to(client, source.model, prefix.lower()) if prefix else _of_prompt(client, source)
    lacks = f"no chunk whose hash begins with {prefix}" if prefix else f"none of the prompt's {len(numbers)} chunks"
    if as_json or not found:
        show(as_json, {"chunks": len(numbers), "in_memory": found}, f"memory has {lacks}")
    else:
        _print(found, numbers)
    return 0 if found else 1


def _up_to(client: Client, model: str, prefix: str) -> tuple[list[ChunkStatus], dict[str, int]]:
    """The chunks in memory up to one with a hash, or of the group with that id; and the chunks' numbers by hash."""
    families = admin.prefixes(client, model, SORTS[0], MOST_PREFIXES)
    ends = {each.hash for each in families if each.id.startswith(prefix) or each.hash.startswith(prefix)}
    if len(ends) > 1:
        raise ConfigError(f"several hashes that `kvdepot ls` shows begin with {prefix}: give more digits")
    if not ends and len(prefix) < _DIGITS:
        raise ConfigError(f"`kvdepot ls` lists no id or hash that begins with {prefix}: give all {_DIGITS} digits")
    found = admin.inspect(client, model, end=bytes.fromhex(next(iter(ends), prefix)))
    return found, {each.hash: each.position for each in found if each.position}


def _of_prompt(client: Client, source: options.PromptSource) -> tuple[list[ChunkStatus], dict[str, int]]:
    """The chunks in memory of a prompt that the options give; and the numbers of all its chunks by hash."""
    prompt = admin.read_prompt(client, source.tokens, source.hashes, source.model, source.salt)
    model, hashes = prompt.spec.model, prompt.hashes
    keys = [hashes[at : at + HASH_BYTES].hex() for at in range(0, len(hashes), HASH_BYTES)]
    found = [each for each in admin.inspect(client, model, hashes) if each.model == model]
    return found, {each: number for number, each in enumerate(keys, 1)}


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
    from kvdepot.cli.view import Listing, needs

    groups: dict[int, list[ChunkStatus]] = {}
    for each in parts:
        groups.setdefault(each.group, []).append(each)
    rows = []
    for group, chunks in sorted(groups.items()):
        states = Counter(each.state for each in chunks)
        tiers = Counter(name for each in chunks for name in each.tiers)
        ages = [each.age_s for each in chunks if each.age_s is not None]
        rows.append(
            (
                f"{group}: {needs(chunks[0].reach)}",
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
