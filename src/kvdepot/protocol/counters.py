"""The table of all counters; docs/decisions.md says who reads it. To add one, add a line here and count it."""

from __future__ import annotations

from typing import NamedTuple

from kvdepot.protocol.leases import MOST_HASHES, MOST_LEASES
from kvdepot.protocol.status import COMPARED, DIFFERING, Loss, Status
from kvdepot.protocol.wire import MAX_CHUNKS

_REFUSED = "_refused"


class Counted(NamedTuple):
    """One counter.

    meaning: what it counts, in its unit. loss: its text in the list of evictions, failures and refusals; empty: not in
    that list. where: its group in that list. advice: what to do when it grows. alert, severity: the alert that fires if
    it grew within an hour; empty for none. is_event: whether the journal records its growth.
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

    @property
    def series(self) -> str:
        """The counter's name in Prometheus, without prefix and `_total`; it contains the unit. If the unit is shards,
        `_chunks` in `name` becomes `_shards`; if it is objects or files, the unit is appended."""
        if self.unit == "shards":
            return self.name.removesuffix("_chunks") + "_shards" * self.name.endswith("_chunks")
        if self.unit in ("objects", "files"):
            return f"{self.name}_{self.unit}"
        return self.name


_MEMORY, _REQUESTS, _EVENTS = "Memory", "Requests", "KV events"

SERVER = (
    Counted("lookups", "lookups", "Lookups by engines, without those of `warm` and of leases."),
    Counted("lookup_chunks", "chunks", "Chunks that lookups asked for."),
    Counted(
        "hit_chunks", "chunks", "Chunks that lookups found in the depot, whether or not the engine had them too.",
        advice="`hit_chunks / lookup_chunks` is the share found.",
    ),
    Counted("tier_hit_chunks", "chunks", "Chunks that lookups found in a tier."),
    Counted("awaited_chunks", "chunks", "Chunks that lookups found because they waited for their stores."),
    Counted(
        "late_lookups", "lookups", "Lookups that waited half a second for a store, and were answered without it.",
        "lookups answered without a slow store", _REQUESTS,
        "An engine copies slowly or hangs: `kvdepot status` shows which ones are copying.",
    ),
    Counted(
        "shortened_lookups", "lookups",
        "Lookups answered with what fits beside the pins of requests that wait: three quarters of memory.",
        "lookups shortened: requests that wait pin memory", _REQUESTS,
        "Prompts are long for this memory, or clients keep their pins: add memory.",
    ),
    Counted("stored_chunks", "shards", "Shards stored (a chunk has one per rank)."),
    Counted("known_chunks", "shards", "Shards that an engine stored again; no bytes were copied."),
    Counted("retrieved_chunks", "shards", "Shards that engines loaded."),
    Counted("compared_chunks", "shards", COMPARED),
    Counted(
        "differing_chunks", "shards", DIFFERING,
        "differ from what an engine computed", _MEMORY,
        "`kvdepot inspect --compare` shows which engines and what differs between them: give them the same weights and "
        "configuration, or different `kvdepot.weights_revision`.",
        "KVDepotKVDiffers", "critical", is_event=True,
    ),
    Counted("evicted_chunks", "chunks", "Chunks evicted from memory.", "evicted to make room", _MEMORY),
    Counted(
        "dropped_chunks", "shards", "Shards not stored because memory was full.", "dropped: memory was full", _MEMORY,
        "Pins or copies hold the memory: check `holds`, or add memory.", is_event=True,
    ),
    Counted(
        "capped_chunks", "shards",
        "Shards not stored because all chunks of a tenant at its cap were pinned or being copied.",
        "dropped: a tenant is at its cap", _MEMORY,
        "Raise the tenant's cap (`kvdepot quota`), or let it pin less.", is_event=True,
    ),
    Counted(
        "yielded_chunks", "shards",
        "Shards not stored because memory was full of chunks that requests in engines' queues are going to read.",
        "not stored: queued requests want the memory", _MEMORY,
        "Memory is small for what is queued: add memory, or engines.", is_event=True,
    ),
    Counted(
        "mismatched_chunks", "shards",
        "Shards not stored because memory has them in another size.",
        "dropped: another size", _MEMORY,
        "Check that all engines of the model have the same layout.", is_event=True,
    ),
    Counted(
        "failed_chunks", "shards",
        "Shards whose store failed: the copy failed, the engine died or gave it up, or there was no memory.",
        "store failed", _MEMORY, "If there are many, look for failed copies in the engines' logs.",
        is_event=True,
    ),
    Counted(
        "retrieve_misses", "shards", "Requested shards that were gone or had another size; the engine recomputes them.",
        "requested chunks that were gone", _REQUESTS,
        "A few are normal without pins. Many are a bug: report it.",
    ),
    Counted(
        "corrupt_chunks", "shards", "Shards in memory that failed their checksum; the engine recomputes them.",
        "failed their checksum", _MEMORY,
        "Suspect faulty RAM: test it. Until then, verify all chunks (`verify = always`).",
        "KVDepotMemoryDamaged", "critical", is_event=True,
    ),
    Counted("expired_chunks", "chunks", "Chunks older than `--ttl-s`.", "expired", _MEMORY),
    Counted(
        "forgotten_chunks", "chunks", "Chunks removed by `forget`.", "forgotten on request", _MEMORY,
        "A user or client requested it.",
    ),
    Counted(
        "released_chunks", "chunks", "Chunks removed because a lease ended that drops them, or a client released them.",
        "released on request", _MEMORY, "A client requested it.",
    ),
    Counted(
        "cleared_chunks", "chunks", "Chunks removed by clients' clear requests.", "cleared on request", _MEMORY,
        "A client requested it.",
    ),
    Counted(
        "clients_died", "clients", "Clients that disappeared without closing their connection.", "clients that died",
        _REQUESTS, "Engines crashed or were killed.",
    ),
    Counted(
        "errors", "requests", "Requests of engines answered with an error.", "failed requests", _REQUESTS,
        "The client's log has the message.",
    ),
    Counted(
        "bad_messages", "messages", "Messages that were invalid or too long.",
        "invalid messages", _REQUESTS,
        "Another program, or another version of kvdepot, connects to this address.",
    ),
    Counted(
        "kv_event_overflows", "times",
        "Full resyncs sent to routers because more than 131,072 changes were waiting.",
        "full resyncs of routers", _EVENTS,
        "Routers miss chunks for some seconds. If it recurs, use more memory, or larger chunks.",
    ),
    Counted(
        "replies_dropped", "replies", "Replies that the client did not receive.", "replies not received", _REQUESTS,
        "Clients are gone, or do not read their replies.",
    ),
    Counted(
        "clients_refused", "clients", "Clients beyond `max_clients`, or beyond the limit of open files.",
        "clients refused", _REQUESTS, "Allow more open files (`ulimit -n`), or run fewer engines.", is_event=True,
    ),
    Counted(
        "connections_refused", "connections",
        "Connections beyond the limit of open files, and times that it was reached.",
        "connections refused", _REQUESTS, "Allow more open files: `ulimit -n`, `LimitNOFILE=`.", is_event=True,
    ),
    Counted(
        "requests_refused", "requests", "Requests beyond `max_rate`; a status counts as four, a list as four or more.",
        "requests refused", _REQUESTS, "Find the client that floods the server, or raise `max_rate`.", is_event=True,
    ),
    Counted(
        "large_requests_refused", "requests", f"Requests for more than {MAX_CHUNKS:,} chunks.",
        "large requests refused", _REQUESTS, "Use shorter prompts, or larger chunks.",
    ),
    Counted(
        "operations_refused", "requests", "Stores and retrieves beyond `max_queued`.",
        "operations refused", _REQUESTS,
        "An engine starts copies faster than it ends them: see its log, or raise `max_queued`.", is_event=True,
    ),
    Counted(
        "lookups_refused", "lookups", "Lookups beyond `max_sessions`.", "lookups refused", _REQUESTS,
        "Engines do not end their requests.",
    ),
    Counted(
        "pins_refused", "pins", "Pins beyond `max_pins`.",
        "pins refused", _REQUESTS, "Engines do not end their requests, or raise `max_pins`.", is_event=True,
    ),
    Counted(
        "leases_refused", "leases",
        f"Leases beyond the budget of their tenant, or beyond {MOST_LEASES:,} leases or {MOST_HASHES:,} hashes in all.",
        "leases refused", _REQUESTS,
        "End leases (`kvdepot release`), or give the tenant a higher floor or the server more memory.",
        is_event=True,
    ),
    Counted(
        "lease_growths_refused", "leases",
        "Leases that did not grow with chunks stored after they started, because of the same limits.",
        "leases that could not grow", _REQUESTS, "As for `leases_refused`.", is_event=True,
    ),
    Counted("leases_begun", "leases", "Leases begun."),
    Counted("lease_byte_seconds", "byte seconds", "Bytes that leases held, times seconds."),
    Counted("leased_hit_tokens", "tokens", "Tokens that lookups found in chunks that leases hold."),
    Counted(
        "registrations_refused", "registrations", "Registrations beyond `max_instances`.",
        "registrations refused", _REQUESTS, "An engine registers again and again without unregistering.", is_event=True,
    ),
    Counted(
        "namespaces_refused", "registrations", "Registrations of models beyond `max_namespaces`.",
        "namespaces refused", _REQUESTS,
        "If a model's identity changes at each start, set `kvdepot.weights_revision`.",
    ),
    Counted(
        "hellos_refused", "clients", "Clients that failed authentication, or were too many.",
        "hellos refused", _REQUESTS,
        "See `clients_refused`. Otherwise another user's process connects, or `arena_dir` is not shared.",
    ),
    Counted(
        "users_refused", "messages", "Messages under the identity of another client.", "impersonations refused",
        _REQUESTS, "A client tries to impersonate another one.",
    ),
    Counted(
        "keys_refused", "connections", "Connections with an unknown key.", "keys refused", _REQUESTS,
        "Give the client its key, or find out who it is.", is_event=True,
    ),
    Counted(
        "handshakes_refused", "connections", "Connections that had no key or failed ZeroMQ's handshake.",
        "handshakes refused", _REQUESTS, "Give the client its key, or find out who it is.",
    ),
)  # fmt: skip
"""Counters of the server: `counters` of the status.

Two laws of conservation hold, and the simulation checks them. Each chunk that a lookup asked for (`lookup_chunks`) is
found at most once (`hit_chunks`); the others were missed. Each shard that a store asked for is counted once, under one
of `STORE_OUTCOMES`, when the store ends.
"""

STORE_OUTCOMES = (
    "stored_chunks", "known_chunks", "dropped_chunks", "capped_chunks", "yielded_chunks", "mismatched_chunks",
    "failed_chunks",
)  # fmt: skip

TIER = (
    Counted("saved_chunks", "shards", "Shards written to the tier."),
    Counted("loaded_chunks", "shards", "Shards read from the tier."),
    Counted(
        "missed_chunks", "shards", "Shards that the tier reported but could not return, or whose writer was forgotten.",
        "gone before they were read",
        advice="Harmless if other hosts remove or evict objects. If `failures` grows too, see there.",
    ),
    Counted(
        "unavailable_chunks", "shards", "Shards not written because the tier failed, or its circuit breaker was open.",
        "not saved: tier unavailable", advice="See `error` of the tier.",
    ),
    Counted(
        "dropped_chunks", "shards", "Shards not written because the queue was full.", "not saved: queue full",
        advice="The tier is too slow: raise `threads`, or use `write=on_evict` or `compress`.",
    ),
    Counted(
        "overtaken_chunks", "shards", "Queued shards that were evicted, or already in the tier, when their turn came.",
        advice="Harmless, unless `dropped_chunks` grows too; see there.",
    ),
    Counted(
        "undemoted_chunks", "chunks", "With `write=on_evict`: chunks evicted before they could be written.",
        "evicted before they were saved",
        advice="The tier is too slow: raise `threads`, or use `compress`.",
    ),
    Counted(
        "refused_chunks", "shards", "Shards that the store refused because it was full or they were too large.",
        "refused by the tier", advice="Check its capacity.",
    ),
    Counted("refused", "objects", "Objects that the store refused.", "objects refused by the store",
            advice="Check its capacity."),
    Counted(
        "corrupt_chunks", "shards",
        "Shards that failed their checksum or did not match their header; erased.",
        "failed their checksum",
        advice="Check the disk or store: it damages data, or others write to it; in that case set `key_file`.",
        alert="KVDepotTierCorrupt", severity="warning",
    ),
    Counted(
        "failures", "calls", "Calls that failed or timed out.", "failed calls",
        advice="See `error` of the tier, then the store's own log.",
    ),
    Counted("failed", "objects", "Mooncake: objects that its library could not transfer.",
            "failed transfers", advice="Hosts of the pool, or its network, failed."),
    Counted("errors", "calls", "Disk: file system calls that failed.", "failed file system calls",
            advice="The server's log has the message."),
    Counted(
        "unreleased_chunks", "shards", "Shards that were released and may still be in the tier, which failed.",
        "released, but not removed", advice="Use `kvdepot forget` with their salt or model once the tier works.",
    ),
    Counted("late", "lookups", "Lookups that this tier did not answer in time.", "answered too late",
            advice="The store is slow, or `--lookup-s` is short."),
    Counted(
        "computed_tokens", "tokens",
        "Prompt tokens that engines computed because that is faster than loading them; where it is known before the "
        "tier is asked, whether or not the tier has them.",
        advice="If it grows all the time, the tier is slower than the engines compute, and of no use to them.",
    ),
    Counted("breaker_openings", "times", "Times that the circuit breaker opened.", "circuit breaker openings",
            advice="See `failures`."),
    Counted(
        "searches_refused", "lookups", "Lookups that skipped this tier because too many were waiting for it.",
        "tier searches refused: too many", advice="The tier is too slow for this load.",
    ),
    Counted("evicted", "objects", "Disk: objects evicted.", "evicted to make room",
            advice="Increase its capacity if prompts come back later than it keeps them."),
    Counted("expired", "objects", "Disk: objects removed because of their age."),
    Counted("swept", "files", "Disk: half-written files removed at start."),
    Counted("vanished", "files", "Disk: files removed by another process.",
            advice="Another process deletes files there."),
    Counted("staged_bytes", "bytes", "Mooncake: bytes copied on this side."),
    Counted("rejoined", "times", "Mooncake: times that this host rejoined the pool.", advice="Its master restarted."),
)  # fmt: skip
"""Counters of a tier: `tiers[].counters` of the status. Each kind of store has some of them."""


class Counters(dict[str, int]):
    """The server's counts: all of `SERVER`, starting at 0. Raises KeyError for any other name."""

    def __init__(self) -> None:
        super().__init__((counted.name, 0) for counted in SERVER)


def refusal(counted: Counted) -> str:
    """The kind of requests or things whose refusals a counter counts; empty: it counts no refusals."""
    return counted.name.removesuffix(_REFUSED) if counted.name.endswith(_REFUSED) else ""


def losses(status: Status) -> list[Loss]:
    """Evictions, failures and refusals that are not 0: the server's, then each tier's, in the order of the table."""
    tables = [(SERVER, status.counters, ""), *((TIER, tier.counters, tier.name) for tier in status.tiers)]
    return [
        Loss(tier or counted.where, counted.loss, count, counted.name)
        for table, counts, tier in tables
        for counted in table
        if counted.loss and (count := counts.get(counted.name, 0))
    ]
