"""`kvdepot lease` and `kvdepot release`: keep the chunks of a prompt, or remove them; list leases, and end them."""

from __future__ import annotations

import click

from kvdepot.cli import options
from kvdepot.cli.chunks import NOTHING_REMOVED, REMOVES, open_prompt, shared
from kvdepot.cli.connect import connect
from kvdepot.cli.output import agreed, clean, count, show, size
from kvdepot.client import admin
from kvdepot.client.socket import Client
from kvdepot.client.transfer import LeaseTerms
from kvdepot.errors import BadRequest
from kvdepot.protocol.leases import KINDS, MOST_LISTED, MOST_PRIORITY, NORMAL
from kvdepot.values import plural


@click.command(epilog=options.PROMPT)
@click.argument("name", metavar="[NAME]", required=False, default="")
@options.prompt
@click.option("--kind", type=click.Choice(KINDS), default="retain", help="what the lease does (default: retain)")
@click.option("--seconds", type=click.IntRange(0), default=0, metavar="N", help="how long it lasts (default: until "
              "released)")  # fmt: skip
@click.option("--priority", type=click.IntRange(0, MOST_PRIORITY), default=NORMAL, metavar="N", help="if leases exceed "
              f"the budget, the lowest ends first (0 to {MOST_PRIORITY}, default: {NORMAL})")  # fmt: skip
@click.option("--drop", is_flag=True, help="remove its chunks when it ends")
@options.server
@options.as_json
def lease(
    name: str, source: options.PromptSource, kind: str, seconds: int, priority: int, drop: bool,
    server: options.Address, as_json: bool,
) -> int:  # fmt: skip
    """Start a lease of a prompt's chunks, in place of a lease of the same NAME. Without a NAME: list the leases.

    retain and prefetch load the chunks from the tiers and keep them in memory until the lease ends or the server stops;
    expire keeps nothing, and removes them when it ends. For a minute, the lease also takes chunks of the prompt that
    engines store in that time; the output says how many it has. It fails if the leases of this tenant would exceed
    their budget: without quotas, half of the memory.
    """
    terms = LeaseTerms(kind, seconds, priority, drop)
    if not name:
        if source != options.PromptSource() or terms != LeaseTerms():
            raise click.UsageError("give the lease a NAME; without one, the leases are listed")
        with connect(server) as client:
            found = admin.leases(client)
        if as_json or not found:
            show(as_json, found, "there are no leases")
            return 0
        from kvdepot.cli import view

        view.print_tables(view.leases(found))
        return 0
    if kind == "expire" and not seconds:
        raise click.UsageError("--kind expire: give --seconds, after which the chunks are removed")
    with open_prompt(server, source) as (client, prompt, update):
        held = admin.lease(client, name, prompt, terms, lambda done: update("loading chunks", done, len(prompt)))
    text = f"lease {clean(name)}: {count(held)} of {plural(len(prompt), 'chunk')}"
    if held < len(prompt):
        text += "; the others are not in memory: it takes those that engines store within the next minute"
    show(as_json, {"chunks": len(prompt), "leased": held}, text)
    return 0


@click.command(epilog=options.PROMPT)
@click.argument("name", metavar="[NAME]", required=False, default="")
@click.option("--keep", is_flag=True, help="end the lease NAME, and leave its chunks")
@options.prompt
@click.option("--keep-first", type=click.IntRange(0), default=0, metavar="N", help="leave the first N chunks of the "
              "prompt")  # fmt: skip
@options.destructive
@options.server
@options.as_json
def release(
    name: str, keep: bool, source: options.PromptSource, keep_first: int, consent: options.Consent,
    server: options.Address, as_json: bool,
) -> int:  # fmt: skip
    """End the lease NAME and remove its chunks from memory and tiers; or remove those of the prompt that is given.

    It removes chunks from the end of the prompt up to the first one that others use, so a shared beginning stays.
    """
    if bool(name) == bool(source.tokens or source.hashes):
        hint = "; --keep-first N leaves the first N chunks of a prompt" if keep else ""
        raise click.UsageError(f"give either the NAME of a lease, or --tokens or --hashes{hint}")
    if name and (source.model or source.salt or keep_first):
        raise click.UsageError("--model, --salt and --keep-first are for a prompt: give --tokens or --hashes with them")
    if keep and not name:
        raise click.UsageError("--keep is for a lease: give its NAME, or --keep-first with the prompt")
    if name:
        return _end(server, name, consent, keep, as_json)
    return _remove(server, source, keep_first, consent, as_json)


def _end(server: options.Address, name: str, consent: options.Consent, keep: bool, as_json: bool) -> int:
    with connect(server) as client:
        listed = admin.leases(client)
        known = next((each for each in listed if each.name == name), None)
        if known is None and len(listed) < MOST_LISTED:
            raise BadRequest(f"there is no lease {name!r}; `kvdepot lease` lists them")
        about = f"lease {clean(name)}" + (f": {plural(known.chunks, 'chunk')}, {size(known.bytes)}" if known else "")
        removed = [] if keep else [about, *_tier_lines(client)]
        if consent.dry_run:
            value = {"lease": name, "chunks": known.chunks if known else None}
            show(as_json, value, *(removed or [f"{about}; its chunks stay"]), NOTHING_REMOVED)
            return 0
        question = "End this lease and permanently remove its chunks?"
        if removed and not agreed(consent, REMOVES.format("chunks"), question, lambda: removed):
            return 1
        admin.end_lease(client, name, drops=not keep)
    show(as_json, {"released": name}, f"lease {clean(name)} has ended{'; its chunks stay' * keep}")
    return 0


def _remove(
    server: options.Address, source: options.PromptSource, keep_first: int, consent: options.Consent, as_json: bool
) -> int:
    with open_prompt(server, source) as (client, prompt, _):
        there = {each.hash for each in admin.inspect(client, prompt.spec.model, prompt.hashes)}
        most = min(len(there), max(0, len(prompt) - keep_first))
        lines = [f"memory: at most {count(most)} of {plural(len(prompt), 'chunk')}", *_tier_lines(client)]
        if consent.dry_run:
            show(as_json, {"chunks": len(prompt), "removed_at_most": most}, *lines, NOTHING_REMOVED)
            return 0
        question = "Permanently remove these chunks?"
        if not agreed(consent, REMOVES.format("chunks"), question, lambda: lines):
            return 1
        removed = admin.drop(client, prompt, keep_first)
    value = {"chunks": len(prompt), "removed": removed}
    show(as_json, value, f"removed from memory: {count(removed)} of {plural(len(prompt), 'chunk')}")
    return 0


def _tier_lines(client: Client) -> list[str]:
    """The tiers that lose chunks; how many cannot be known before."""
    return [f"{clean(tier.name)}: its copies of them{shared(tier.name)}" for tier in admin.status(client).tiers]
