"""Commands for chunks: `warm`, `pin`, `unpin` and `forget`; and `check`, which checks an arena."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.connect import connect, endpoint
from kvdepot.cli.output import Progress, agreed, clean, count, print_json, progress, size
from kvdepot.config import load
from kvdepot.errors import ConfigError
from kvdepot.values import plural

if TYPE_CHECKING:
    from kvdepot.client.admin import Preview
    from kvdepot.client.socket import Client
    from kvdepot.client.transfer import PromptChunks

__all__ = ["begun", "check", "forget", "is_local", "open_prompt", "pin", "unpin", "warm"]


@contextmanager
def open_prompt(
    url: str | None, key: str | None, tokens: str | None, hashes: str | None, model: str, salt: str
) -> Iterator[tuple[Client, PromptChunks, Progress]]:
    """A connection, the prompt that the options give, and a progress bar."""
    from kvdepot.client import admin

    if bool(tokens) == bool(hashes):
        raise click.UsageError("give exactly one of --tokens and --hashes")
    with connect(url, key) as client:
        prompt = admin.read_prompt(client, tokens, hashes, model, salt)
        with progress() as update:
            yield client, prompt, update


@click.command(epilog=options.PROMPT)
@options.prompt
@options.server
@options.as_json
def warm(as_json: bool, **which: Any) -> int:
    """Load a prompt's chunks from the tiers into memory. Exit code 1 unless all of them are then in memory."""
    from kvdepot.client import admin

    with open_prompt(**which) as (client, prompt, update):
        loaded = admin.warm(client, prompt, lambda done: update("loading chunks", done, len(prompt)))
    if as_json:
        print_json({"chunks": len(prompt), "in_memory": loaded})
    else:
        rest = "" if loaded == len(prompt) else "; no tier has the next one"
        print(f"{count(loaded)} of {plural(len(prompt), 'chunk')} in memory{rest}", flush=True)
    return 0 if loaded == len(prompt) else 1


@click.command(epilog=options.PROMPT)
@click.argument("name", metavar="NAME")
@options.prompt
@click.option(
    "--seconds", type=options.Whole(0), default=0, metavar="N", help="how long to keep it (default: until unpinned)"
)
@options.server
@options.as_json
def pin(name: str, seconds: int, as_json: bool, **which: Any) -> int:
    """Keep a prompt's chunks in memory until they are unpinned, --seconds have passed, or the server stops: a
    lease of kind retain. Without quotas, all leases together may use at most half of the memory.

    For a minute, the pin also takes chunks of the prompt that engines store in that time; the output says how many it
    has.
    """
    from kvdepot.client import admin

    with open_prompt(**which) as (client, prompt, update):
        pinned = admin.pin(client, name, prompt, seconds, lambda done: update("loading chunks", done, len(prompt)))
    if as_json:
        print_json({"chunks": len(prompt), "pinned": pinned})
    else:
        print(begun(f"pin {name}", pinned, len(prompt)), flush=True)
    return 0


def begun(lease: str, held: int, chunks: int) -> str:
    """How many of a prompt's chunks a lease that has just begun holds, and what becomes of the others."""
    said = f"{clean(lease)}: {count(held)} of {plural(chunks, 'chunk')}"
    if held == chunks:
        return said
    return f"{said}; the others are not in memory: it takes those that engines store within the next minute"


@click.command()
@click.argument("name", metavar="NAME")
@options.server
@options.as_json
def unpin(name: str, url: str | None, key: str | None, as_json: bool) -> int:
    """End a pin, or any other lease, and leave its chunks. `kvdepot leases` lists the names."""
    from kvdepot.client import admin

    with connect(url, key) as client:
        admin.unpin(client, name)
    if as_json:
        print_json({"unpinned": name})
    else:
        print(f"{clean(name)}: ended", flush=True)
    return 0


@click.command()
@click.option(
    "-m",
    "--model",
    default="",
    metavar="NAME",
    help="chunks of this model, and of all models whose name begins with NAME",
)
@click.option("--salt", default="", metavar="TEXT", help="chunks of requests with this cache_salt")
@click.option("--all", "everything", is_flag=True, help="all chunks")
@options.destructive
@options.server
@options.as_json
def forget(
    model: str, salt: str, everything: bool, yes: bool, dry_run: bool, url: str | None, key: str | None, as_json: bool
) -> int:
    """Remove chunks from memory and from all tiers, including shared ones: by model, by salt, or all.

    Exit code 1 if some may remain: a tier failed, or may hold chunks of models whose names begin with NAME but
    that this server does not know; give those names in full. Running requests may store such chunks again.
    """
    if everything and (model or salt):
        raise ConfigError("--all forgets everything: give either --all, or --model and --salt")
    if not (model or salt or everything):
        raise ConfigError("nothing to forget: give --model, --salt or --all")
    from kvdepot.client import admin

    def found() -> Preview:
        with connect(url, key) as client, progress() as update:
            update("counting chunks", 0, 0)
            _say_if_unknown(admin.unknown_model(client, model))
            return admin.preview(client, model, salt)

    if dry_run and as_json:
        print_json(msgspec.to_builtins(found()))
        return 0
    if dry_run:
        print("\n".join([*_preview_lines(found()), "nothing was removed: this was a dry run"]), flush=True)
        return 0
    what = "every chunk" if everything else "chunks"
    if not agreed(
        f"this removes {what} from memory and from all tiers, shared ones too",
        f"Permanently remove this from {clean(endpoint(url))}?", yes, lambda: _preview_lines(found()),
    ):  # fmt: skip
        return 1
    with connect(url, key) as client, progress() as update:
        update(f"forgetting {model or 'all models'}", 0, 0)
        if yes:  # else the preview has said it
            _say_if_unknown(admin.unknown_model(client, model))
        said = admin.forget(client, model, salt)
    if as_json:
        print_json(said)
    else:
        for place, what in said.items():
            print(f"{place}: {plural(what, 'chunk') if isinstance(what, int) else what}", flush=True)
    return 1 if admin.not_forgotten(said) else 0


def _say_if_unknown(why: str) -> None:
    if why:
        print(f"kvdepot: {clean(why)}", file=sys.stderr)


def _preview_lines(found: Preview) -> list[str]:
    lines = [f"memory: {plural(found.memory.chunks, 'chunk')}, {size(found.memory.bytes)}"]
    for name, tier in found.tiers.items():
        parts = [
            *([f"{count(tier.objects_at_most)} objects"] if tier.objects_at_most is not None else []),
            *([size(tier.bytes_at_most)] if tier.bytes_at_most is not None else []),
        ]
        lines.append(
            f"{clean(name)}: {'at most ' + ', '.join(parts) if parts else 'unknown (not reported by the tier)'}"
            + ("" if is_local(name) else "; other servers that share this tier lose them, too")
        )
    return lines


def is_local(tier: str) -> bool:
    """Whether a tier of this name belongs to one server."""
    return tier.startswith("disk:")


@click.command()
@click.option("-u", "--url", metavar="URL", help="the arena of the server at this endpoint")
@click.option("--arena-name", metavar="NAME", help="the arena of this name in /dev/shm")
@click.option("--fix", is_flag=True, help="drop damaged records, and so their chunks; only while no server uses the "
    "arena")  # fmt: skip
@options.destructive
@options.as_json
def check(fix: bool, yes: bool, dry_run: bool, as_json: bool, **flags: str | None) -> int:
    """Verify the arena of a running or stopped server: its records and checksums. Exit code 1 if something is wrong."""
    from kvdepot.cli.check_arena import check as audit

    fix = fix and not dry_run
    what, arena = "--fix drops damaged records, and so their chunks", clean(load(flags=flags).arena)
    lost = "their chunks are lost: engines compute them again"
    if fix and not agreed(what, f"Drop damaged records of {arena}?", yes, lambda: [lost]):
        return 1
    with progress() as update:
        report = audit(load(flags=flags).arena, fix, lambda done, total: update("reading chunks", done, total))
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        print("\n".join(report.lines()), flush=True)
    return 1 if report.problems and not report.fixed else 0
