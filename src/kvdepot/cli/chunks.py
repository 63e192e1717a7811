"""`kvdepot warm`, which loads chunks from tiers; `lease` and `release`, which keep or remove a prompt's chunks and list
leases; `forget`, which removes chunks everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect, endpoint
from kvdepot.cli.output import Progress, clean, confirm, count, progress, show
from kvdepot.client import admin
from kvdepot.client.admin import Preview
from kvdepot.client.socket import Client
from kvdepot.client.transfer import LeaseTerms, PromptChunks
from kvdepot.errors import BadRequest, ConfigError
from kvdepot.protocol.leases import KINDS, MOST_LISTED, MOST_PRIORITY, NORMAL
from kvdepot.values import plural, size

_REMOVES = "this removes {} from memory and from all tiers, shared ones too"
"""The effect of commands that remove chunks, for `str.format`."""


@contextmanager
def open_prompt(
    server: options.Address, source: options.PromptSource
) -> Iterator[tuple[Client, PromptChunks, Progress]]:
    """A connection, the prompt that the options give, and a progress bar."""
    if bool(source.tokens) == bool(source.hashes):
        raise click.UsageError("give exactly one of --tokens and --hashes")
    with connect(server) as client:
        prompt = admin.read_prompt(client, source.tokens, source.hashes, source.model, source.salt)
        with progress() as update:
            yield client, prompt, update


def _shared(tier: str) -> str:
    """A warning if a tier of this name is not this server's alone."""
    return "" if tier.startswith("disk:") else "; other servers that share this tier lose them, too"


@click.command(epilog=options.PROMPT)
@options.prompt
@options.server
@options.as_json
def warm(source: options.PromptSource, server: options.Address, as_json: bool) -> int:
    """Load a prompt's chunks from the tiers into memory. Exit code 1 unless all of them are then in memory."""
    with open_prompt(server, source) as (client, prompt, update):
        loaded = admin.warm(client, prompt, lambda done: update("loading chunks", done, len(prompt)))
    rest = "" if loaded == len(prompt) else "; no tier has the next one"
    value = {"chunks": len(prompt), "in_memory": loaded}
    show(as_json, value, f"{count(loaded)} of {plural(len(prompt), 'chunk')} in memory{rest}")
    return 0 if loaded == len(prompt) else 1


@click.command()
@click.option("-m", "--model", default="", metavar="NAME", help="chunks of this model, and of all models whose name "
              "begins with NAME")  # fmt: skip
@click.option("--salt", default="", metavar="TEXT", help="chunks of requests with this cache_salt")
@click.option("--all", "everything", is_flag=True, help="all chunks")
@options.destructive
@options.server
def forget(model: str, salt: str, everything: bool, consent: options.Consent, server: options.Address) -> int:
    """Remove chunks from memory and from all tiers, including shared ones: by model, by salt, or all.

    Exit code 1 if some may remain: a tier failed, or may hold chunks of models whose names begin with NAME but
    that this server does not know; give those names in full. Running requests may store such chunks again.
    """
    if everything and (model or salt):
        raise ConfigError("--all forgets everything: give either --all, or --model and --salt")
    if not (model or salt or everything):
        raise ConfigError("nothing to forget: give --model, --salt or --all")

    def preview() -> tuple[Preview, list[str]]:
        with connect(server) as client, progress() as update:
            update("counting chunks", 0, 0)
            _warn_if_unknown(client, model)
            found = admin.preview(client, model, salt)
        return found, _lines(found)

    question = f"Permanently remove this from {clean(endpoint(server.url))}?"
    what = _REMOVES.format("every chunk" if everything else "chunks")
    confirm(consent, what, question, preview)
    with connect(server) as client, progress() as update:
        update(f"forgetting {model or 'all models'}", 0, 0)
        if consent.yes:  # else the preview has warned
            _warn_if_unknown(client, model)
        forgot = admin.forget(client, model, salt)
    done = [f"{place}: {plural(chunks, 'chunk')}" for place, chunks in forgot.removed.items()]
    show(
        consent.as_json,
        {**forgot.removed, **forgot.left},
        *done,
        *(f"{place}: {why}" for place, why in forgot.left.items()),
    )
    return 1 if forgot.left else 0


def _warn_if_unknown(client: Client, model: str) -> None:
    if why := admin.unknown_model(client, model):
        print(f"kvdepot: {clean(why)}", file=sys.stderr)


def _lines(found: Preview) -> list[str]:
    lines = [f"memory: {plural(found.memory.chunks, 'chunk')}, {size(found.memory.bytes)}"]
    for name, tier in found.tiers.items():
        parts = [] if tier.objects_at_most is None else [f"{count(tier.objects_at_most)} objects"]
        parts += [] if tier.bytes_at_most is None else [size(tier.bytes_at_most)]
        held = f"at most {', '.join(parts)}" if parts else "unknown (not reported by the tier)"
        lines.append(f"{clean(name)}: {held}{_shared(name)}")
    return lines


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
def release(
    name: str, keep: bool, source: options.PromptSource, keep_first: int, consent: options.Consent,
    server: options.Address,
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
        return _end(server, name, consent, keep)
    return _remove(server, source, keep_first, consent)


def _end(server: options.Address, name: str, consent: options.Consent, keep: bool) -> int:
    with connect(server) as client:
        listed = admin.leases(client)
        known = next((each for each in listed if each.name == name), None)
        if known is None and len(listed) < MOST_LISTED:
            raise BadRequest(f"there is no lease {name!r}; `kvdepot lease` lists them")
        about = f"lease {clean(name)}" + (f": {plural(known.chunks, 'chunk')}, {size(known.bytes)}" if known else "")
        lines = [f"{about}; its chunks stay"] if keep else [about, *_tier_lines(client)]
        value = {"lease": name, "chunks": known.chunks if known else None}
        if consent.dry_run or not keep:
            question = "End this lease and permanently remove its chunks?"
            confirm(consent, _REMOVES.format("chunks"), question, lambda: (value, lines))
        admin.end_lease(client, name, drops=not keep)
    show(consent.as_json, {"released": name}, f"lease {clean(name)} has ended{'; its chunks stay' * keep}")
    return 0


def _remove(server: options.Address, source: options.PromptSource, keep_first: int, consent: options.Consent) -> int:
    with open_prompt(server, source) as (client, prompt, _):
        there = {each.hash for each in admin.inspect(client, prompt.spec.model, prompt.hashes)}
        most = min(len(there), max(0, len(prompt) - keep_first))
        lines = [f"memory: at most {count(most)} of {plural(len(prompt), 'chunk')}", *_tier_lines(client)]
        expected = {"chunks": len(prompt), "removed_at_most": most}
        confirm(consent, _REMOVES.format("chunks"), "Permanently remove these chunks?", lambda: (expected, lines))
        removed = admin.drop(client, prompt, keep_first)
    value = {"chunks": len(prompt), "removed": removed}
    show(consent.as_json, value, f"removed from memory: {count(removed)} of {plural(len(prompt), 'chunk')}")
    return 0


def _tier_lines(client: Client) -> list[str]:
    """The tiers that lose chunks; how many cannot be known before."""
    return [f"{clean(tier.name)}: its copies of them{_shared(tier.name)}" for tier in admin.status(client).tiers]
