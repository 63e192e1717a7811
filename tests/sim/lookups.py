"""What must hold of lookups that wait, for tiers (`Behind`) or for stores (`Waits`).

Tiers may shorten a hit for many reasons. `Behind` looks at lookups of hybrid models that have none of them: nothing
failed, was evicted, stored, removed or late while they waited. Those must find the deepest boundary of which memory and
the stores together have all parts. `Waits` looks at runs without tiers, in which lookups wait for stores alone, and at
the chunks alone: which part a lookup waits for, and since when, is the server's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.core.index.chunk import Namespace, is_hidden, is_there
from kvdepot.core.index.states import ChunkState
from kvdepot.core.lookups.phases import STORE_S, SearchPhase
from kvdepot.protocol import wire
from kvdepot.protocol.keys import tenant_salt
from kvdepot.tiers.format import NO_SALT, ShardFacts
from tests.sim.groups import deepest, longest, needed

if TYPE_CHECKING:
    from kvdepot.core.clients import Client
    from tests.sim.server import Server

_SLACK_S = 1e-6


def keys_in(request: wire.Lookup) -> list[bytes]:
    """The keys that a lookup names."""
    return [request.hashes[i : i + 32] for i in range(0, len(request.hashes), 32)]


def found_by(request: wire.Lookup, hit: wire.Hit) -> list[bytes]:
    """The keys of the prefix that an answer means."""
    tails = [] if hit.tail is None else [request.tails[hit.tail]]
    assert all(tail.chunks == hit.chunks for tail in tails)
    return [*keys_in(request)[: hit.chunks], *(tail.key for tail in tails)]


def length_of(request: wire.Lookup, found: list[bytes]) -> tuple[int, int]:
    """A measure of a prefix, for comparisons: a chunk is longer than a tail in its place."""
    tails = [tail.key for tail in request.tails]
    return (2 * len(found) - 1, -tails.index(found[-1])) if found and found[-1] in tails else (2 * len(found), 0)


@dataclass(frozen=True)
class _Waiting:
    found: list[bytes]
    request: wire.Lookup
    groups: list[Namespace]
    parts: list[tuple[Namespace, bytes]]
    obstacles: tuple[int, ...]


class Behind:
    """The lookups of one server that wait for tiers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: dict[tuple[bytes, bytes], _Waiting] = {}
        self._stores = 0
        self._peak = 0  # most bytes that were arriving after any event since somebody waits

    def note_store(self) -> None:
        self._stores += 1

    def forget(self, identity: bytes) -> None:
        """This client is dead, and gets no answers."""
        for asked in [asked for asked in self._waiting if asked[0] == identity]:
            del self._waiting[asked]

    def look(self) -> None:
        """After every event."""
        if self._waiting:
            self._peak = max(self._peak, self._server.depot.tiering.loads.arriving_bytes)

    def begin(self, asked: tuple[bytes, bytes], request: wire.Lookup, groups: list[Namespace]) -> None:
        server = self._server
        is_known = all(len(group.layouts) == len(group.sizes) == group.world_size for group in groups)
        is_one = len({id(group.groups) for group in groups}) == 1
        is_calm = not (server.depot.operations or server.depot.removals or server.depot.tiering.forgettings)
        are_well = all(tier.is_searchable for tier in server.depot.tiering._tiers)
        if not (server.host.stores and is_known and is_one and is_calm and are_well):
            return
        keys = keys_in(request)
        near = server._prefix(request, groups)
        tails = () if length_of(request, near)[0] % 2 else request.tails  # with a tail in memory, tiers need no other
        found = longest(groups, keys, tails, lambda group, key: self._is_somewhere(group, key, request.salt))
        parts = [(group, found[i]) for group in groups for i in needed(group.reach, len(found))]
        if not self._waiting:
            self._peak = 0
        self._waiting[asked] = _Waiting(found, request, groups, parts, self._obstacles())
        self.look()

    def _is_somewhere(self, group: Namespace, key: bytes, salt: bytes) -> bool:
        """Whether every rank's shard of a part is in memory, or in a store."""
        chunk = group.chunks.get(key)
        if chunk is not None and is_hidden(chunk):
            return False
        for rank in range(group.world_size):
            shard = None if chunk is None else chunk.shards.get(rank)
            if shard is not None and shard.sealed:
                continue
            if shard is not None:
                return False  # it is being written or read, or is corrupt
            facts = ShardFacts(
                group.tenant, group.model, group.world_size, rank, group.blocks_in_chunk, group.chunk_tokens,
                group.layouts[rank],
            )  # fmt: skip
            name = facts.name(tenant_salt(group.tenant, salt) or NO_SALT, key)
            if not any(name in store.tier.objects for store in self._server.host.stores):
                return False
        return True

    def _obstacles(self) -> tuple[int, ...]:
        """Counts of all that may make a hit shorter."""
        server = self._server
        tiers = server.depot.tiering._tiers
        names = "failures", "missed_chunks", "corrupt_chunks", "searches_refused", "late", "computed_tokens"
        counters = server.depot.counters
        return (
            self._stores,
            server.index.evicted,
            server.index.namespaces.generation,
            server.world.counters["load_without_room"],
            len(server.condemned),
            counters["failed_chunks"] + counters["expired_chunks"] + counters["corrupt_chunks"],
            sum(tier.counters[name] for tier in tiers for name in names)
            + sum(tier.counters["breaker_openings"] + tier.speed.retry_at for tier in tiers),
            sum(store.tier.injected.total() + store.tier.counters["evicted"] for store in server.host.stores),
        )

    def answered(self, asked: tuple[bytes, bytes], value: object, in_time: bool) -> None:
        """in_time: a lookup was answered, as nothing that it waited for took long."""
        waiting = self._waiting.pop(asked, None)
        if waiting is None or not in_time or not isinstance(value, wire.Hit) or waiting.obstacles != self._obstacles():
            return
        server = self._server
        if server._asked_groups(asked[0], waiting.request) != waiting.groups:
            return  # an engine of the same name and other groups has come: both must have all parts
        room = server.index.allocator.capacity // 2 - self._peak
        taken = sum(sum(map(server.index.allocator.rounded, group.sizes.values())) for group, _ in waiting.parts)
        if taken > room or not all(
            self._is_somewhere(group, key, waiting.request.salt) for group, key in waiting.parts
        ):
            return
        request, found = waiting.request, waiting.found
        server.world.counters["groups_found_behind_memory"] += len(found) > 0
        server.world.counters["tail_found_behind_memory"] += length_of(request, found)[0] % 2
        assert length_of(request, found_by(request, value)) >= length_of(request, found), (
            f"memory and tiers had all parts of {len(found)} chunks, and the answer is {value}"
        )


class Waits:
    """The lookups of one server that wait for stores."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._late: set[tuple[int, bytes]] = set()  # parts whose store has let a lookup wait until its deadline

    def check(self) -> None:
        """Each lookup that is not answered has a store to wait for, although what that brings may have become useless:
        other parts that it would have needed were evicted.
        """
        server = self._server
        if server.host.stores or server.depot.removals:
            return
        for asked, (_, request, _) in server._lookups.items():
            if asked in server.roomless:
                continue
            groups, keys = (
                server._asked_groups(asked[0], request),
                keys_in(request) + [tail.key for tail in request.tails],
            )
            written = any(self._is_written(group, key) for group in groups for key in keys)
            assert written, f"the lookup of {request.request} waits for nothing"

    def answered(self, identity: bytes, request: wire.Lookup, waited_s: float, hit: wire.Hit, roomless: bool) -> None:
        """A lookup is answered that nobody gave up. roomless: it waited for room."""
        server = self._server
        if server.host.stores:
            return
        coming = self._coming(identity, request)
        if waited_s >= STORE_S - _SLACK_S:
            self._late |= self._written(identity, request)  # also while a removal goes on, for the lookups after it
        if server.depot.removals or roomless:
            return
        server.world.counters["lookup_awaited_store"] += waited_s > 0 and hit.chunks > 0
        server.world.counters["lookup_awaited_tail"] += waited_s > 0 and hit.tail is not None
        server.world.counters["awaited_store_failed"] += waited_s > 0 and not coming and hit == wire.MISS
        assert not coming or coming & self._late, (
            f"a lookup was answered with {hit} after {waited_s:.3f} s, while more was being stored"
        )

    def expire(self) -> None:
        """Lookups are about to be overdue; those of leases get no answer here."""
        for search in self._server.depot.lookups._in[SearchPhase.STORES]:
            if search.lease is not None and search.deadline <= self._server.world.now:
                self._late |= self._written(search.client.identity, search.request)

    def awaited(self, client: Client) -> set[tuple[int, bytes]]:
        """The parts that a client is storing and that lookups of others wait for."""
        server = self._server
        stores = [each for each in client.operations.values() if isinstance(each.request, wire.Store)]
        parts = {(chunk.namespace.number, chunk.key) for each in stores for chunk, _ in each.chunks}
        if server.host.stores or not parts:
            return set()
        others = [(who, request) for (who, _), (_, request, _) in server._lookups.items() if who != client.identity]
        return {part for other in others for part in parts & self._coming(*other)}

    def died(self, identity: bytes, awaited: set[tuple[int, bytes]]) -> None:
        """A client is found dead, which was storing these parts for which others waited."""
        server, counters = self._server, self._server.world.counters
        is_asker = any(asked[0] == identity for asked in server._lookups)
        counters["asker_died_while_waiting"] += is_asker and not server.host.stores
        counters["storer_died_while_awaited"] += bool(awaited)

    def _coming(self, identity: bytes, request: wire.Lookup) -> set[tuple[int, bytes]]:
        """Parts being written that would make a lookup's answer larger."""
        server = self._server
        groups = server._asked_groups(identity, request)
        if len({id(group.groups) for group in groups}) != 1:
            return set()
        keys = keys_in(request)

        def there(group: Namespace, i: int) -> bool:
            chunk = group.chunks.get(keys[i])
            return chunk is not None and is_there(chunk)

        def coming(group: Namespace, i: int) -> bool:
            return there(group, i) or self._is_written(group, keys[i])

        end = deepest(groups, len(keys), there)
        if 2 * deepest(groups, len(keys), coming) > max(
            2 * end, length_of(request, server._prefix(request, groups))[0]
        ):
            return {(group.number, key) for group in groups for key in keys if self._is_written(group, key)}
        for tail in request.tails:
            needs = [(group, i) for group in groups for i in needed(group.reach, tail.chunks + 1) if i < tail.chunks]
            if tail.chunks < end or not all(there(*part) for part in needs):
                continue
            written = {(group.number, tail.key) for group in groups if self._is_written(group, tail.key)}
            parts = [group.chunks.get(tail.key) for group in groups]
            if len(written) + sum(part is not None and is_there(part) for part in parts) == len(groups):
                return written  # none if it is there already
        return set()

    def _written(self, identity: bytes, request: wire.Lookup) -> set[tuple[int, bytes]]:
        """Parts of a prompt that are being written, also behind chunks that have gone since a lookup began to wait."""
        keys = keys_in(request) + [tail.key for tail in request.tails]
        groups = self._server._asked_groups(identity, request)
        return {(group.number, key) for group in groups for key in keys if self._is_written(group, key)}

    def _is_written(self, group: Namespace, key: bytes) -> bool:
        chunk = group.chunks.get(key)
        return (
            chunk is not None
            and not is_hidden(chunk)
            and any(shard.state is ChunkState.RESERVED for shard in chunk.shards.values())
        )
