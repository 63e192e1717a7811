"""A server's status and leases as text for a terminal; for `kvdepot status`, `kvdepot top` and `kvdepot lease`.

Invariant: text that may come from a client passes through `clean`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from kvdepot.cli.output import clean, count, duration, share
from kvdepot.protocol.counters import losses
from kvdepot.protocol.health import judge
from kvdepot.protocol.leases import LeaseStatus
from kvdepot.protocol.metrics import BOUNDS_S, Event, Latency, percentile
from kvdepot.protocol.status import (
    OTHERS,
    AnswersStatus,
    Engine,
    NamespaceStatus,
    Status,
    TenantStatus,
    TierStatus,
    TokenCounts,
    Usage,
)
from kvdepot.values import plural, size

_PIPE_COLUMNS = 200
"""Width of tables in a pipe, where the default of 80 columns would cut them."""
_BAR_CELLS = 20
_EVENTS = 8
_NAME_CELLS = 20
"""The minimum width of a table's first column, if its text is that long."""


def console() -> Console:
    """Standard output, for tables. Uses colours on a terminal unless NO_COLOR is set."""
    columns, lines = shutil.get_terminal_size((_PIPE_COLUMNS, 25))
    # Without a height, rich takes 80 columns where TERM=dumb.
    return Console(width=columns, height=lines, highlight=False, markup=False)


@dataclass(frozen=True)
class Listing:
    """A table. heads: names of the columns; a numeric column's name begins with >."""

    heads: tuple[str, ...]
    rows: Sequence[Sequence[str | Text]]
    folds: bool = False
    """Whether cells that do not fit are folded; otherwise columns from the right are left out."""

    def table(self, width: int) -> Table:
        """The table at most `width` columns wide, without cut cells: a number cut short is another number."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False, show_header=any(self.heads))
        columns = len(self.heads if self.folds else self.widths(width))
        for number, head in enumerate(self.heads[:columns]):
            side: JustifyMethod = "right" if head.startswith(">") else "left"
            if self.folds:
                table.add_column(head, no_wrap=not number, overflow="fold")
            else:
                table.add_column(head.lstrip(">"), justify=side, no_wrap=number > 0, overflow="ellipsis")
        for row in self.rows:
            cells = (Text(clean(cell), no_wrap=True) if isinstance(cell, str) else cell for cell in row[:columns])
            table.add_row(*cells)
        return table

    def widths(self, width: int) -> list[int]:
        """The cells that each column gets of `width`; columns from the right that do not fit are left out.

        Two cells separate columns, and the first one has what remains, at least `_NAME_CELLS` if its text is that long.
        """
        widths = [
            max(cell_len(clean(str(cell))) for cell in (head.lstrip(">"), *column))
            for head, *column in zip(self.heads, *self.rows, strict=True)
        ]
        while len(widths) > 1 and min(widths[0], _NAME_CELLS) + sum(cells + 2 for cells in widths[1:]) > width:
            widths.pop()
        return [min(widths[0], width - sum(cells + 2 for cells in widths[1:])), *widths[1:]]


def print_tables(*listings: Listing) -> None:
    """Print tables, which leave out columns that do not fit, with a blank line between two."""
    out = console()
    for number, listing in enumerate(listings):
        if number:
            out.print()
        out.print(listing.table(out.width))


def summary(now: Status, url: str, since: Status | None = None, old: str = "") -> Group:
    """The summary above the tables. since: an earlier status, to show rates instead of totals. old: why the figures are
    old, instead of the state."""
    head = Text.assemble((f"kvdepot {clean(now.version)}", "bold"), f" at {clean(url)}", overflow="fold")
    state = Text(old, "bold yellow") if old else _state(now)
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in [("state", state), *_lines(now, since)]:
        facts.add_row(name, value)
    return Group(head, facts)


def _lines(now: Status, since: Status | None) -> list[tuple[str, Text]]:
    filled = round(min(now.used_bytes / max(now.capacity_bytes, 1), 1.0) * _BAR_CELLS)
    memory = Text.assemble(  # without a warning colour, because a cache should be full
        ("#" * filled, "cyan"), ("-" * (_BAR_CELLS - filled), "dim"),
        f" {size(now.used_bytes)} of {size(now.capacity_bytes)}, ",
        f"{count(now.cached_tokens)} tokens in {count(now.chunks)} chunks",
    )  # fmt: skip
    lines = [("memory", memory)]
    if now.holds_s is not None:
        held = duration(now.holds_s)
        lines.append(("", Text(f"holds about {held} of traffic: the median idle time of evicted chunks")))
    lines.append(("reused", _reused(now.tokens, "in all")))
    saved = f"{count(now.saved.tokens)} tokens"
    saved += f", {duration(now.saved.prefill_s)} of prefill" if now.saved.prefill_s else ""
    if since is None:
        moved = f"stored {size(now.stored_bytes)}, retrieved {size(now.retrieved_bytes)}"
        moved += f", evicted {count(now.evicted_chunks)} chunks"
    else:
        passed_s = now.uptime_s - since.uptime_s
        old, new = since.tokens, now.tokens
        rise = TokenCounts(new.asked - old.asked, new.found - old.found, new.reused - old.reused)
        lines.append(("", _reused(rise, f"in {duration(round(passed_s))}")))
        lookups = now.counters.get("lookups", 0) - since.counters.get("lookups", 0)
        moved = f"stores {size((now.stored_bytes - since.stored_bytes) / passed_s)}/s"
        moved += f", retrieves {size((now.retrieved_bytes - since.retrieved_bytes) / passed_s)}/s"
        moved += f", {count(lookups / passed_s)} lookups/s"
        moved += f", {count((now.evicted_chunks - since.evicted_chunks) / passed_s)} evictions/s"
    lines += [("saved", Text(saved)), ("traffic", Text(moved))]
    for number, concern in enumerate(judge(now).concerns):
        lines.append(("" if number else "warnings", Text(clean(f"{concern.what} {concern.advice}"), "yellow")))
    return lines


def _reused(tokens: TokenCounts, when: str) -> Text:
    """The share of the asked prompt tokens that engines loaded, and the share that lookups found."""
    if not tokens.asked:
        return Text("no lookup by an engine yet" if when == "in all" else f"no lookup {when}")
    found = min(tokens.found / tokens.asked, 1.0)
    text = f" of {count(tokens.asked)} tokens {when}; found {share(found)}"
    return Text.assemble((share(min(tokens.reused / tokens.asked, 1.0)), "bold"), text)


def _state(now: Status) -> Text:
    health = judge(now)
    workers = sum(bool(engine.ranks) for engine in now.engines)
    who = plural(now.clients, "client")
    if now.engines:
        who += f", {plural(len(now.engines) - workers, 'scheduler')}, {plural(workers, 'worker')}"
    if now.engine_count > len(now.engines):
        who += f" among the {len(now.engines)} of {now.engine_count} most recently active"
    state = clean(health.headline), "green" if health.level == "good" else "yellow"
    return Text.assemble(state, f", up {duration(now.uptime_s)}, pid {now.pid}, {who}")


def listings(now: Status) -> list[Listing]:
    """All tables that are not empty, the most important first."""
    rest = [now.other_namespaces] if now.other_namespaces is not None else []
    stable = sorted(now.engines, key=lambda engine: (engine.models, engine.ranks, engine.id))
    lost = [(loss.what, count(loss.count), loss.where, loss.counter) for loss in losses(now)]
    made = [
        _requests(now), engines(stable), models([*now.namespaces, *rest]), _usage(now), tenants(now.tenants),
        tiers(now.tiers), Listing(("evictions, failures, refusals", ">count", "where", "counter"), lost),
        events(now.events[: -_EVENTS - 1 : -1]),
    ]  # fmt: skip
    return [listing for listing in made if listing.rows]


def _requests(now: Status) -> Listing:
    """Latencies by request; those that engines wait for come first."""
    work = ("Lookup", "Retrieve", "Store")
    rows = [
        (
            latency.request, count(latency.count), count(latency.errors),
            duration(latency.sum_s / latency.count), *(_time(latency, part) for part in (0.5, 0.99)),
        )
        for latency in sorted(now.latencies, key=lambda latency: (latency.request not in work, -latency.count))
        if latency.count
    ]  # fmt: skip
    return Listing(("requests", ">count", ">errors", ">mean", ">p50", ">p99"), rows)


def _time(latency: Latency, part: float) -> str:
    if latency.count == 1:
        return duration(latency.sum_s)  # exactly, not as its bucket has it
    found = percentile(latency.buckets, part)
    if found >= BOUNDS_S[-1]:
        return f"\N{GREATER-THAN OR EQUAL TO} {duration(BOUNDS_S[-1])}"
    return duration(found) if found > BOUNDS_S[0] else f"< {duration(BOUNDS_S[0])}"


def _shorten(text: str) -> str:
    """A text of at most 20 characters: the beginning and the end of a longer one."""
    return text if len(text) <= 20 else f"{text[:10]}\N{HORIZONTAL ELLIPSIS}{text[-9:]}"


def engines(shown: Sequence[Engine]) -> Listing:
    rows = [
        (
            ", ".join(engine.models) or "-",
            _shorten(engine.engine),
            f"rank {', '.join(map(str, engine.ranks))}" if engine.ranks else "scheduler",
            Text("uncached", "yellow") if engine.fault else "ok",
            str(engine.pid or "-"), count(engine.sessions), count(engine.pinned_chunks), count(engine.queued),
            duration(engine.idle_s) if engine.idle_s >= 1 else "now", engine.host or "-",
        )
        for engine in shown
    ]  # fmt: skip
    heads = "engines", "name", "role", "state", ">pid", ">requests", ">pinned", ">copies", ">last seen", "host"
    return Listing(heads, rows)


def models(shown: Sequence[NamespaceStatus]) -> Listing:
    rows = [
        (
            named(namespace.tenant, namespace.model) if namespace.world_size else OTHERS,
            str(namespace.world_size or "-"),
            count(namespace.chunks * namespace.chunk_tokens) if namespace.chunk_tokens else "-",
            size(namespace.bytes),
            *_tokens(namespace),
            str(namespace.engines),
            _answers(namespace.answers),
        )
        for namespace in shown
    ]
    return Listing(("models", ">ranks", ">tokens", ">bytes", *_TOKEN_HEADS, ">engines", "answers"), rows)


def _answers(said: AnswersStatus | None) -> str:
    """Whether a model's answers are stored, and why."""
    if said is None:
        return "-"
    why = "learning" if said.mode == "auto" else said.mode
    why = f"{share(said.share)} return" if said.share is not None else why
    return f"{'stored' if said.stored else 'not stored'} ({why})"


_TOKEN_HEADS = (">asked", ">found", ">reused")


def _tokens(of: NamespaceStatus | Usage) -> tuple[str, str, str]:
    """Tokens asked for, and the shares found and reused."""
    asked = of.asked_tokens
    if not asked:
        return "-", "-", "-"
    return count(asked), share(min(of.found_tokens / asked, 1.0)), share(min(of.reused_tokens / asked, 1.0))


def _usage(now: Status) -> Listing:
    """Tokens by tenant, if there are tenants."""
    shown = now.usage if any(each.tenant for each in now.usage) else []
    rows = [(each.tenant or "(no tenant)", *_tokens(each), count(each.reused_tokens)) for each in shown]
    return Listing(("tokens by tenant", *_TOKEN_HEADS, ">saved tokens"), rows)


def tenants(shown: Sequence[TenantStatus]) -> Listing:
    rows = [
        (
            f"{tenant.tenant} salt {tenant.salt}".lstrip() if tenant.salt else tenant.tenant or "(others)",
            size(tenant.used_bytes), size(quota.floor_bytes),
            size(quota.cap_bytes) if quota.cap_bytes else "-", f"{quota.weight:g}",
            duration(quota.ttl_s) if quota.ttl_s else "-", count(tenant.evicted_chunks), count(tenant.capped_chunks),
        )
        for tenant, quota in ((each, each.quota) for each in shown)
    ]  # fmt: skip
    heads = ("tenants", ">bytes", ">floor", ">cap", ">weight", ">expiry", ">evicted", ">over cap")
    return Listing(heads, rows)


def tiers(shown: Sequence[TierStatus]) -> Listing:
    rows: list[Sequence[str | Text]] = []
    for tier in shown:
        held = size(tier.bytes) if tier.bytes is not None else "-"
        if tier.bytes is not None and tier.capacity_bytes:
            held += f" of {size(tier.capacity_bytes)}"
        state = Text(clean(tier.state), "green" if tier.state == "up" else "yellow")
        objects = count(tier.objects) if tier.objects is not None else "-"
        error = f"{duration(tier.error_s)} ago: {tier.error}" if tier.error_s is not None else "-"
        counts = next((each.counts for each in tier.histograms if each.name == "load_seconds"), [])
        load = duration(percentile(counts, 0.99)) if sum(counts) else "-"
        rows.append((tier.name, state, tier.write, objects, held, size(tier.queued_bytes), load, error))
    return Listing(("tiers", "state", "writes", ">objects", ">bytes", ">queued", ">p99 load", "last error"), rows)


def leases(shown: Sequence[LeaseStatus]) -> Listing:
    rows = [
        (
            lease.name, lease.kind, count(lease.chunks), size(lease.bytes),
            f"in {duration(lease.ends_s)}" if lease.ends_s is not None else "never", str(lease.priority),
            lease.model or "-", lease.tenant or "-",
        )
        for lease in shown
    ]  # fmt: skip
    return Listing(("leases", "kind", ">chunks", ">bytes", "ends", ">priority", "model", "tenant"), rows)


def named(tenant: str, model: str) -> str:
    return f"{tenant}: {model}" if tenant else model


def events(shown: Sequence[Event]) -> Listing:
    rows = [(f"{time.strftime('%m-%d %H:%M:%S', time.localtime(event.wall_s))}  {event.text}",) for event in shown]
    return Listing(("events, latest first",), rows)
