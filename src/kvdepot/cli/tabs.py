"""The tabs of `kvdepot top` that are a table: their rows, in what order, and what is known about one of them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot.cli import view
from kvdepot.cli.output import count, duration, size
from kvdepot.cli.view import Listing
from kvdepot.protocol.metrics import percentile
from kvdepot.protocol.prefixes import SORTS, Prefix
from kvdepot.protocol.status import Engine, Histogram, NamespaceStatus, Status, TierStatus

__all__ = ["TABLES", "Table", "fields", "in_order"]

_Fields = list[tuple[str, str]]
"""Names and values."""


@dataclass(frozen=True)
class Table:
    """One tab. one: what a row is.

    rows: of a status and the prefixes that the server has listed. listing: of rows; with True, names in full.
    key: what tells a row from all others. sorts: keys of rows by name, the lowest comes first; the first one is the
    default. more: what is known about a row beyond the table.
    """

    one: str
    rows: Callable[[Status, Sequence[Prefix]], Sequence[Any]]
    listing: Callable[[Sequence[Any], bool], Listing]
    key: Callable[[Any], object]
    sorts: dict[str, Callable[[Any], Any]]
    more: Callable[[Any], _Fields]


def in_order(table: Table, rows: Sequence[Any], sort: str, is_reversed: bool) -> list[Any]:
    """The rows as sorted; the sum of those that the server does not list stays the last."""
    ordered = sorted(rows, key=table.sorts[sort]) if sort else list(rows)
    if is_reversed:
        ordered.reverse()
    return sorted(ordered, key=_is_sum)


def _is_sum(row: object) -> bool:
    return isinstance(row, NamespaceStatus) and view.is_sum(row)


def fields(table: Table, row: Any) -> _Fields:
    """All that is known about a row."""
    listing = table.listing([row], True)
    names = [table.one, *(head.lstrip(">") for head in listing.heads[1:])]
    return [*zip(names, map(str, listing.rows[0]), strict=True), *table.more(row)]


def _more_of_model(model: NamespaceStatus) -> _Fields:
    groups = [
        (f"KV cache group {number}",
         f"{count(each.chunks)} chunks, {size(each.bytes)}; needed to resume a prompt: {view.needs(each.reach)}")
        for number, each in enumerate(model.groups)
    ]  # fmt: skip
    return [("tokens per chunk", count(model.chunk_tokens) if model.chunk_tokens else "-"), *groups]


def _more_of_engine(engine: Engine) -> _Fields:
    return [("connection", engine.id), ("connected for", duration(engine.since_s)), ("tenant", engine.tenant or "-")]


def _more_of_tier(tier: TierStatus) -> _Fields:
    free = [("free on its disk", size(tier.free_bytes))] if tier.free_bytes is not None else []
    times = [(each.name.removesuffix("_seconds"), _times(each)) for each in tier.histograms
             if each.name.endswith("_seconds")]  # fmt: skip
    counters = [(name, count(value)) for name, value in sorted(tier.counters.items()) if value]
    return [("in progress", f"{count(tier.loads)} loads, {count(tier.saves)} saves"), *free, *times, *counters]


def _times(histogram: Histogram) -> str:
    if not sum(histogram.counts):
        return "-"
    half, most = (duration(percentile(histogram.counts, part)) for part in (0.5, 0.99))
    return f"{count(sum(histogram.counts))} calls, p50 {half}, p99 {most}"


TABLES: dict[str, Table] = {
    "models": Table(
        "model",
        lambda now, _: [*now.namespaces, *([now.other_namespaces] if now.other_namespaces is not None else [])],
        lambda rows, _: view.models(rows),
        lambda each: (each.tenant, each.model, each.world_size, each.blocks_in_chunk, each.chunk_tokens),
        {
            "bytes": lambda each: -each.bytes,
            "chunks": lambda each: -each.chunks,
            "found": lambda each: -each.found_tokens / each.asked_tokens if each.asked_tokens else 1,
            "name": lambda each: (each.tenant, each.model),
        },
        _more_of_model,
    ),
    "prefixes": Table(
        "prefix",
        lambda _, listed: listed,
        view.prefixes,
        lambda each: (each.tenant, each.model, each.id),
        {name: lambda each: 0 for name in SORTS},  # the server sorts them
        lambda each: [("its chunks", f"kvdepot inspect {each.id} -m {shlex.quote(each.model)}")],
    ),
    "engines": Table(
        "engine",
        lambda now, _: now.engines,
        view.engines,
        lambda each: each.id,
        {
            "name": lambda each: (each.models, each.ranks, each.id),
            "requests": lambda each: -each.sessions,
            "pinned": lambda each: -each.pinned_chunks,
            "last seen": lambda each: each.idle_s,
        },
        _more_of_engine,
    ),
    "tiers": Table(
        "tier",
        lambda now, _: now.tiers,
        lambda rows, _: view.tiers(rows),
        lambda each: each.name,
        {
            "order": lambda each: 0,
            "bytes": lambda each: -(each.bytes or 0),
            "queued": lambda each: -each.queued_bytes,
        },
        _more_of_tier,
    ),
    "events": Table(
        "event",
        lambda now, _: now.events[::-1],
        lambda rows, _: view.events(rows),
        lambda each: (each.wall_s, each.text),
        {},
        lambda each: [("kind", each.kind)],
    ),
}
