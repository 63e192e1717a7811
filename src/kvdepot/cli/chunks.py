"""`kvdepot warm`, which loads chunks from tiers, and `kvdepot forget`, which removes them everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect, endpoint
from kvdepot.cli.output import Progress, agreed, clean, count, progress, show, size
from kvdepot.client import admin
from kvdepot.client.admin import Preview
from kvdepot.client.socket import Client
from kvdepot.client.transfer import PromptChunks
from kvdepot.errors import ConfigError
from kvdepot.values import plural

REMOVES = "this removes {} from memory and from all tiers, shared ones too"
"""The effect of commands that remove chunks, for `str.format`."""
NOTHING_REMOVED = "nothing was removed: this was a dry run"


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


def shared(tier: str) -> str:
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
@options.as_json
def forget(
    model: str, salt: str, everything: bool, consent: options.Consent, server: options.Address, as_json: bool
) -> int:
    """Remove chunks from memory and from all tiers, including shared ones: by model, by salt, or all.

    Exit code 1 if some may remain: a tier failed, or may hold chunks of models whose names begin with NAME but
    that this server does not know; give those names in full. Running requests may store such chunks again.
    """
    if everything and (model or salt):
        raise ConfigError("--all forgets everything: give either --all, or --model and --salt")
    if not (model or salt or everything):
        raise ConfigError("nothing to forget: give --model, --salt or --all")

    def preview() -> Preview:
        with connect(server) as client, progress() as update:
            update("counting chunks", 0, 0)
            _warn_if_unknown(client, model)
            return admin.preview(client, model, salt)

    if consent.dry_run:
        found = preview()
        show(as_json, found, *_lines(found), NOTHING_REMOVED)
        return 0
    question = f"Permanently remove this from {clean(endpoint(server.url))}?"
    what = REMOVES.format("every chunk" if everything else "chunks")
    if not agreed(consent, what, question, lambda: _lines(preview())):
        return 1
    with connect(server) as client, progress() as update:
        update(f"forgetting {model or 'all models'}", 0, 0)
        if consent.yes:  # else the preview has warned
            _warn_if_unknown(client, model)
        removed = admin.forget(client, model, salt)
    lines = [f"{place}: {plural(n, 'chunk') if isinstance(n, int) else n}" for place, n in removed.items()]
    show(as_json, removed, *lines)
    return 1 if admin.not_forgotten(removed) else 0


def _warn_if_unknown(client: Client, model: str) -> None:
    if why := admin.unknown_model(client, model):
        print(f"kvdepot: {clean(why)}", file=sys.stderr)


def _lines(found: Preview) -> list[str]:
    lines = [f"memory: {plural(found.memory.chunks, 'chunk')}, {size(found.memory.bytes)}"]
    for name, tier in found.tiers.items():
        parts = [] if tier.objects_at_most is None else [f"{count(tier.objects_at_most)} objects"]
        parts += [] if tier.bytes_at_most is None else [size(tier.bytes_at_most)]
        held = f"at most {', '.join(parts)}" if parts else "unknown (not reported by the tier)"
        lines.append(f"{clean(name)}: {held}{shared(name)}")
    return lines
