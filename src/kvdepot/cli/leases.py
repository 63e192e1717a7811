"""Commands for leases: `lease`, `release` and `leases`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.chunks import begun, is_local, open_prompt
from kvdepot.cli.connect import connect
from kvdepot.cli.output import agreed, clean, console, count, print_json, size
from kvdepot.errors import BadRequest
from kvdepot.protocol.leases import KINDS, MOST_PRIORITY, NORMAL
from kvdepot.values import plural

if TYPE_CHECKING:
    from kvdepot.client.socket import Client

__all__ = ["lease", "leases", "release"]


@click.command(epilog=options.PROMPT)
@click.argument("name", metavar="NAME")
@options.prompt
@click.option("--kind", type=click.Choice(KINDS), default="retain", help="what the lease does (default: retain)")
@click.option(
    "--seconds", type=options.Whole(0), default=0, metavar="N", help="how long it lasts (default: until released)"
)
@click.option(
    "--priority", type=options.Whole(0, MOST_PRIORITY), default=NORMAL, metavar="N",
    help=f"if leases exceed the budget, the lowest ends first (0 to {MOST_PRIORITY}, default: {NORMAL})",
)  # fmt: skip
@click.option("--drop", is_flag=True, help="remove its chunks when it ends")
@options.server
@options.as_json
def lease(name: str, kind: str, seconds: int, priority: int, drop: bool, as_json: bool, **which: Any) -> int:
    """Start a lease of a prompt's chunks. It replaces a lease of the same NAME.

    retain and prefetch load the chunks from the tiers and keep them in memory; expire keeps nothing, and removes them
    when it ends. For a minute, the lease also takes chunks of the prompt that engines store in that time; the output
    says how many it has. It fails if the leases of this tenant would use too much memory.
    """
    from kvdepot.client import admin
    from kvdepot.client.transfer import LeaseTerms

    if kind == "expire" and not seconds:
        raise click.UsageError("--kind expire: give --seconds, after which the chunks are removed")
    with open_prompt(**which) as (client, prompt, update):
        leased = admin.lease(
            client, name, prompt, LeaseTerms(kind, seconds, priority, drop),
            lambda done: update("loading chunks", done, len(prompt)),
        )  # fmt: skip
    if as_json:
        print_json({"chunks": len(prompt), "leased": leased})
    else:
        print(begun(f"lease {name}", leased, len(prompt)), flush=True)
    return 0


@click.command(epilog=options.PROMPT)
@click.argument("name", metavar="[NAME]", required=False, default="")
@options.prompt
@click.option("--keep", type=options.Whole(0), default=0, metavar="N", help="leave the first N chunks of the prompt")
@options.destructive
@options.server
@options.as_json
def release(
    name: str, tokens: str | None, hashes: str | None, model: str, salt: str, keep: int, yes: bool, dry_run: bool,
    url: str | None, key: str | None, as_json: bool,
) -> int:  # fmt: skip
    """End the lease NAME and remove its chunks from memory and tiers; or remove those of the prompt that is given.

    Removed are chunks from the end of the prompt to the first that others use, so a shared beginning stays. To end a
    lease and leave its chunks, use `kvdepot unpin`.
    """
    from kvdepot.client import admin

    if bool(name) == bool(tokens or hashes):
        raise click.UsageError("give either the NAME of a lease, or --tokens or --hashes")
    if name:
        if model or salt or keep:
            raise click.UsageError("--model, --salt and --keep are for a prompt: give --tokens or --hashes with them")
        with connect(url, key) as client:
            listed = [each for each in admin.leases(client)[0] if not each.ended]
            known = next((each for each in listed if each.name == name), None)
            if known is None and len(listed) < _MOST_LISTED:
                raise BadRequest(f"there is no lease {name!r}; `kvdepot leases` lists them")
            held = f"lease {clean(name)}: {plural(known.chunks, 'chunk')}, {size(known.bytes)}" if known else ""
            lines = [held or f"lease {clean(name)}", *_tier_lines(client)]
            if dry_run:
                return _dry_run(lines, {"lease": name, "chunks": known.chunks if known else None}, as_json)
            if not agreed(_REMOVES, "End this lease and permanently remove its chunks?", yes, lambda: lines):
                return 1
            admin.end_lease(client, name, drops=True)
        if as_json:
            print_json({"released": name})
        return 0
    with open_prompt(url, key, tokens, hashes, model, salt) as (client, prompt, _):
        there = {each.hash for each in admin.inspect(client, prompt.spec.model, prompt.hashes)}
        most = min(len(there), max(0, len(prompt) - keep))
        lines = [f"memory: at most {count(most)} of {plural(len(prompt), 'chunk')}", *_tier_lines(client)]
        if dry_run:
            return _dry_run(lines, {"chunks": len(prompt), "removed_at_most": most}, as_json)
        if not agreed(_REMOVES, "Permanently remove these chunks?", yes, lambda: lines):
            return 1
        removed = admin.drop(client, prompt, keep)
    if as_json:
        print_json({"chunks": len(prompt), "removed": removed})
    else:
        print(f"removed from memory: {count(removed)} of {plural(len(prompt), 'chunk')}", flush=True)
    return 0


_MOST_LISTED = 1000
"""Leases that a server lists."""
_REMOVES = "this removes chunks from memory and from all tiers, shared ones too"


def _tier_lines(client: Client) -> list[str]:
    """What tiers lose, which cannot tell it before."""
    from kvdepot.client import admin

    return [
        f"{clean(tier.name)}: its copies of them"
        + ("" if is_local(tier.name) else "; other servers that share this tier lose them, too")
        for tier in admin.status(client).tiers
    ]


def _dry_run(lines: list[str], found: dict[str, object], as_json: bool) -> int:
    if as_json:
        print_json(found)
    else:
        print("\n".join([*lines, "nothing was removed: this was a dry run"]), flush=True)
    return 0


@click.command()
@options.server
@options.as_json
def leases(url: str | None, key: str | None, as_json: bool) -> int:
    """Show leases: what they hold, what they cost, and what they saved; those that saved most come first, then those
    that ended last. A second table has sums by tenant and kind since the server's start."""
    from kvdepot.client import admin

    with connect(url, key) as client:
        receipts, sums = admin.leases(client)
    if as_json:
        print_json({"leases": msgspec.to_builtins(receipts), "sums": msgspec.to_builtins(sums)})
        return 0
    if not sums:
        print("there are no leases", flush=True)
        return 0
    from kvdepot.cli import view

    out = console()
    out.print(view.leases(receipts).table(out.width))
    out.print()
    out.print(view.lease_sums(sums).table(out.width))
    return 0
