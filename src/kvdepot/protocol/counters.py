"""Everything that a server counts: one table, from which the status, Prometheus, command line, page, alerts and
documentation take names and words.

To add a counter, add a line here and count it. Counters begin at 0 with the server and only rise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvdepot.protocol.status import Loss, Status

__all__ = ["SERVER", "TIER", "Counted", "Counters", "losses", "refusal"]

_REFUSED = "_refused"


class Counted(NamedTuple):
    """One counter.

    meaning: what it counts, in its unit. loss: what happened to what it counts, for the list of what left, failed or
    was refused; empty: not listed there. where: in that list, what it happened to. advice: what to do when it grows.
    alert, severity: the alert that fires when it grew within an hour; empty for none. is_event: whether the journal
    tells when it grows.
    """

    name: str
    unit: str
    meaning: str
    loss: str = ""
    where: str = ""
    advice: str = ""
    alert: str = ""
    severity: str = ""
    is_event: bool = False


_MEMORY, _REQUESTS, _EVENTS = "Memory", "Requests", "KV events"

SERVER = (
    Counted("lookups", "lookups", "Lookups of engines; warming and pinning by name are not counted."),
    Counted("lookup_chunks", "chunks", "Chunks that lookups asked for."),
    Counted(
        "hit_chunks", "chunks", "Chunks that lookups found in the depot, whether engines had them too or not.",
        advice="`hit_chunks / lookup_chunks` is the share found.",
    ),
    Counted("tier_hit_chunks", "chunks", "Chunks that lookups found in a tier."),
    Counted("stored_chunks", "shards", "Shards stored (a chunk has one a rank)."),
    Counted("known_chunks", "shards", "Shards that an engine wanted to store and that were there: no bytes moved."),
    Counted("retrieved_chunks", "shards", "Shards that engines got back."),
    Counted("evicted_chunks", "chunks", "Chunks evicted from memory.", "evicted to make room", _MEMORY),
    Counted(
        "dropped_chunks", "shards", "Shards that were not stored, for lack of room.", "found no room", _MEMORY,
        "Pins or copies hold the memory: look at `holds`, and give the server more memory.", is_event=True,
    ),
    Counted(
        "failed_chunks", "shards",
        "Stores that began and did not end well: a copy failed, the engine died or took its blocks back.",
        "copy failed, or engine gave up", _MEMORY, "If there are many, look in the log for copies that failed.",
        is_event=True,
    ),
    Counted(
        "retrieve_misses", "shards", "Shards asked for that were gone or of another size; the engine recomputes them.",
        "chunks asked for that had gone", _REQUESTS,
        "A few are evicted between lookup and retrieve by engines without pins. Many are a bug: report it.",
    ),
    Counted(
        "corrupt_chunks", "shards", "Shards in memory that failed their checksum; the engine recomputes them.",
        "failed their checksum", _MEMORY,
        "Suspect faulty RAM: test it. Until then let the server check all chunks (`verify = always`).",
        "KVDepotMemoryDamaged", "critical", is_event=True,
    ),
    Counted("expired_chunks", "chunks", "Chunks older than `--ttl-s`.", "too old", _MEMORY),
    Counted(
        "forgotten_chunks", "chunks", "Chunks removed by `forget`.", "forgotten on request", _MEMORY,
        "Somebody asked for it.",
    ),
    Counted(
        "cleared_chunks", "chunks", "Chunks removed by clients' requests to clear.", "cleared on request", _MEMORY,
        "Somebody asked for it.",
    ),
    Counted(
        "clients_died", "clients", "Clients that went without closing their connection.", "clients that died",
        _REQUESTS, "Engines crash, are killed, or end without `shutdown`.",
    ),
    Counted(
        "errors", "requests", "Requests that were answered with an error.", "requests that failed", _REQUESTS,
        "The client's log has the message.",
    ),
    Counted(
        "bad_messages", "messages", "Messages that could not be read, or were too long.",
        "messages that could not be read", _REQUESTS,
        "Another program connects to this port, or another version of kvdepot.",
    ),
    Counted(
        "kv_event_overflows", "times",
        "Times that routers were told that nothing is there, and then anew what is: more than 131,072 changes waited.",
        "times routers were told all anew", _EVENTS,
        "Routers see less for some seconds. Again and again: chunks come and go faster than the publisher gets "
        "processor time; use more memory, or larger chunks.",
    ),
    Counted(
        "replies_dropped", "replies", "Replies that their client did not take.", "replies that nobody read", _REQUESTS,
        "Clients went, or do not read.",
    ),
    Counted(
        "clients_refused", "clients", "Clients beyond `max_clients`, or beyond the open files that are allowed.",
        "clients refused", _REQUESTS, "Allow more open files (`ulimit -n`), or run fewer engines.", is_event=True,
    ),
    Counted(
        "connections_refused", "connections",
        "Connections beyond the open files that are allowed; the socket was hidden for a while.",
        "connections refused", _REQUESTS, "Allow more open files.",
    ),
    Counted(
        "requests_refused", "requests", "Requests beyond `max_rate`, of which a status takes four.",
        "requests refused", _REQUESTS, "Find the client that floods, or raise it.", is_event=True,
    ),
    Counted(
        "large_requests_refused", "requests", "Requests for more than 65,536 chunks.",
        "large requests refused", _REQUESTS, "Use shorter prompts, or larger chunks.",
    ),
    Counted(
        "operations_refused", "requests", "Stores and retrieves beyond `max_queued`.",
        "operations refused", _REQUESTS,
        "The server is slower than its engines store: more `--copy-threads`, or less load.", is_event=True,
    ),
    Counted(
        "lookups_refused", "lookups", "Lookups beyond `max_sessions`.", "lookups refused", _REQUESTS,
        "Requests are not ended.",
    ),
    Counted(
        "pins_refused", "pins", "Pins beyond `max_pins`, or beyond half of the arena for pins by name.",
        "pins refused", _REQUESTS, "`kvdepot unpin`, or more memory.", is_event=True,
    ),
    Counted(
        "registrations_refused", "registrations", "Registrations beyond `max_instances`.",
        "registrations refused", _REQUESTS, "Engines register without end.", is_event=True,
    ),
    Counted(
        "namespaces_refused", "registrations", "Registrations of models beyond `max_namespaces`.",
        "namespaces refused", _REQUESTS,
        "Very many models, or models whose identity changes at each start: set `kvdepot.weights_revision`.",
    ),
    Counted(
        "hellos_refused", "clients", "Clients that could not prove who they are, or were too many.",
        "hellos refused", _REQUESTS,
        "With `clients_refused`: as there. Else another user's process asks, or `/dev/shm` is not shared.",
    ),
    Counted(
        "users_refused", "messages", "Messages under another client's identity.", "users refused", _REQUESTS,
        "Somebody tries to act for somebody else.",
    ),
    Counted(
        "keys_refused", "connections", "Connections with an unknown key.", "keys refused", _REQUESTS,
        "Give the client its key, or look who it is.", is_event=True,
    ),
    Counted(
        "handshakes_refused", "connections", "Connections without a key, or that failed ZeroMQ's handshake.",
        "handshakes refused", _REQUESTS, "Give the client its key, or look who it is.",
    ),
)  # fmt: skip
"""Counters of the server: `counters` of the status."""

TIER = (
    Counted("saved_chunks", "shards", "Shards written to it."),
    Counted("loaded_chunks", "shards", "Shards read from it."),
    Counted(
        "missed_chunks", "shards", "Shards that it said it has, and could not give when they were read.",
        "gone when they were to be read",
        advice="Others remove or evict there: harmless. With `failures`: as there.",
    ),
    Counted(
        "unavailable_chunks", "shards", "Shards not written because the tier failed, or its circuit breaker was open.",
        "not saved: the tier failed", advice="`error` of the tier says why.",
    ),
    Counted(
        "dropped_chunks", "shards", "Shards not written because the queue was full.", "found no room",
        advice="The tier is slower than what is stored: more `threads`, `write=on_evict`, or `compress`.",
    ),
    Counted(
        "overtaken_chunks", "shards", "Shards that were gone, or there already, when their turn came.",
        advice="With `dropped_chunks`: as there. Alone: harmless.",
    ),
    Counted(
        "undemoted_chunks", "chunks", "With `write=on_evict`: chunks evicted before they could be written.",
        "evicted before they were saved",
        advice="The tier is slower than what is stored: more `threads`, or `compress`.",
    ),
    Counted(
        "refused_chunks", "shards", "Shards that the store did not take: it was full, or they were too large.",
        "refused by the tier", advice="Look at its capacity.",
    ),
    Counted("refused", "objects", "Objects that the store did not take.", "objects refused by the store",
            advice="Look at its capacity."),
    Counted(
        "spoilt_chunks", "shards",
        "Shards read that failed their checksum, or were not what their header says: erased.",
        "failed their checksum",
        advice="Check the disk or store, which damages data or which somebody else writes to; then set `key_file`.",
        alert="KVDepotTierSpoilt", severity="warning",
    ),
    Counted("spoilt", "objects", "Objects that were not what their header says: erased.", "damaged objects erased",
            advice="As `spoilt_chunks`."),
    Counted("quarantined", "files", "Of a disk: damaged files put aside.", "damaged files put aside",
            advice="Look at them in `quarantine/`."),
    Counted(
        "failures", "calls", "Calls that failed, and deadlines that passed.", "calls that failed",
        advice="`error` and `error_s` of the tier: what it said last, and seconds since; then the store's own log.",
    ),
    Counted("failed", "objects", "Of Mooncake: objects that its library could not move.",
            "objects that could not be moved", advice="Hosts of the pool died, or its network."),
    Counted("errors", "calls", "Of a disk: calls of the file system that failed.", "calls that failed",
            advice="The server's log has the message."),
    Counted("late", "lookups", "Lookups that did not get this tier's answer in time.", "came after its deadline",
            advice="The store is slow, or `--lookup-s` short."),
    Counted("left_alone", "times", "Times that its circuit breaker opened.", "times its circuit breaker opened",
            advice="As `failures`."),
    Counted(
        "searches_refused", "lookups", "Lookups that did not ask it: too many at once.",
        "tier lookups refused: too many", advice="The tier is too slow for this load.",
    ),
    Counted("evicted", "objects", "Of a disk: objects evicted.", "evicted to make room",
            advice="Look at its capacity, if much less is found than the upper bound says."),
    Counted("swept", "files", "Of a disk: half-written files removed at the start."),
    Counted("vanished", "files", "Of a disk: files that somebody else removed.", advice="Somebody cleans there."),
    Counted("staged_bytes", "bytes", "Of Mooncake: bytes copied on this side."),
    Counted("rejoined", "times", "Of Mooncake: times that the pool was joined anew.", advice="Its master restarted."),
)  # fmt: skip
"""Counters of a tier: `tiers[].counters` of the status. Each kind of store has some of them."""


class Counters(dict[str, int]):
    """What the server has counted: all of `SERVER`, from 0. Raises KeyError for another name."""

    def __init__(self) -> None:
        super().__init__((counted.name, 0) for counted in SERVER)


def refusal(counted: Counted) -> str:
    """What was refused, where the counter counts refusals of limits or keys; else empty."""
    return counted.name.removesuffix(_REFUSED) if counted.name.endswith(_REFUSED) else ""


def losses(status: Status) -> list[Loss]:
    """What left, failed or was refused, where it is not 0: of the server, then of each tier, in the table's order."""
    found = _losses(SERVER, status.counters, "")
    for tier in status.tiers:
        found += _losses(TIER, tier.counters, tier.name)
    return found


def _losses(table: Iterable[Counted], counts: dict[str, int], tier: str) -> list[Loss]:
    return [
        Loss(tier or counted.where, counted.loss, count, counted.name)
        for counted in table
        if counted.loss and (count := counts.get(counted.name, 0))
    ]
