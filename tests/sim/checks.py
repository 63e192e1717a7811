"""What must hold of a simulated server at every moment, when all requests have ended, and when everyone has left."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvdepot.core.depot import Depot
from kvdepot.core.index.chunk import Chunk, Namespace, Shard, is_evictable
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import for_lookup
from kvdepot.core.index.recovery import InUse
from kvdepot.core.index.states import ChunkState
from kvdepot.core.lookups.phases import STORE_S
from kvdepot.memory.allocator import PAGE, Extents
from kvdepot.protocol import wire
from kvdepot.protocol.counters import STORE_OUTCOMES
from kvdepot.tiers.worker import Load, Part
from tests.sim.groups import longest, needed
from tests.sim.lookups import Behind, Waits, found_by, keys_in, length_of
from tests.sim.shared import ArenaFile
from tests.sim.tiers import TENANTS, WALL, Forgot, TierWorker
from tests.sim.world import Link, World

if TYPE_CHECKING:
    from tests.sim.host import Host

Meant = tuple[Namespace, bytes, int]
"""Of a chunk that a retrieve may mean: where it is, its salt, and since when it is in memory."""
LATE_S = 0.002
"""So much later than its deadline a lookup may be answered."""


class Checks:
    """The part of server.Server that looks on."""

    host: Host
    world: World
    file: ArenaFile
    bytes: Any
    index: Index
    depot: Depot
    tier_workers: list[TierWorker]
    alive: bool
    draining: bool
    met: set[str]
    condemned: dict[bytes, float]
    roomless: set[tuple[bytes, bytes]]
    unanswered: Counter[tuple[bytes, bytes]]
    users: dict[bytes, str]
    _links: dict[bytes, Link]
    _behind: Behind
    _waits: Waits
    _lookups: dict[tuple[bytes, bytes], tuple[float, wire.Lookup, list[bytes]]]
    _answered: dict[tuple[bytes, bytes], wire.Hit]
    _removing: list[Forgot]
    _in_use: list[InUse]
    doing: Any
    asker: bytes
    boot: bytes
    asked_shards: int
    asked_chunks: int
    found_chunks: int
    sure_chunks: int
    serving: bool
    _well_since: float
    _since_validated: int

    # -- always

    def _check(self) -> None:
        if not self.alive:
            return
        index = self.index
        allocator = index.allocator
        if not self.depot.removals:
            for forgot in self._removing:
                forgot.through = True
            self._removing.clear()
        assert index.held >= 0 and index.reserved >= 0 and 0 <= allocator.free_bytes <= allocator.capacity
        self.host.check_pins(self)
        for asked, (since, request, _) in self._lookups.items():  # the first has waited longest
            if request.queued and (self.host.stores or asked in self.roomless):
                continue  # it has no deadline
            patience_s = STORE_S + (self.host.config.lookup_s if self.host.stores else 0.0)
            late_s = self.world.now - max(since, self._well_since) - patience_s
            assert late_s < LATE_S, f"a lookup is not answered {late_s:.3f} s after its deadline"
            break
        self._behind.look()
        self._since_validated += 1
        if self._since_validated >= self.host.validate_every:
            self.validate()

    def validate(self) -> None:
        self._since_validated = 0
        self.index.validate()
        self.heard.check(self.index.namespaces.all())
        if not self.host.has_storms:  # what requests share may exceed a budget as small as theirs
            self.check_budget()
        self.check_conserved()
        self._waits.check()
        assert (self.index.allocator.capacity - self.index.allocator.free_bytes) % PAGE == 0
        tiering = self.depot.tiering
        arrivals = tiering.loads._arrivals.values()
        arriving = sum(arrival.shard.size for arrival in arrivals if not arrival.is_given_up)
        given_up = tiering.loads.arriving_bytes - arriving  # on its way into what somebody else fills meanwhile
        lingering = [shard for _, shards in self.depot.transfers._lingering for shard in shards]
        lingering += [use.shard for use in self._in_use if use.shard is not None]
        taken = {number: size for number, (*_, size) in self.index.accounts.given_up.items()}
        allocated = sum(taken.values()) - sum(taken[id(shard)] for shard in lingering)
        assert (given_up > 0) == (allocated > 0) and given_up <= allocated
        assert all(each.leaving >= 0 for each in self.index.accounts.all()) and len(tiering.loads) >= 0
        if self.host.forgettings.all:
            for namespace in self._engines_namespaces():
                for chunk in namespace.chunks.values():
                    for rank, shard in chunk.shards.items():
                        if shard.sealed:
                            self.host.forgettings.check_chunk(chunk, rank)

    def _engines_namespaces(self) -> list[Namespace]:
        """Namespaces whose bytes are known: those of the engines."""
        return [namespace for namespace in self.index.namespaces.all() if namespace.tenant in TENANTS]

    def check_bytes(self, chunk: Chunk, rank: int, when: str) -> None:
        """A shard contains what its key says."""
        image = self.host.image(chunk.namespace.layouts[rank], chunk.key, rank)
        assert image is not None, f"{when}: a chunk that nobody named: {chunk.key.hex()}"
        if self._is_flipped(chunk.shards[rank].extents):
            return  # whoever asks for it finds out
        data = b"".join(self.bytes[start : start + size].tobytes() for start, size in chunk.shards[rank].extents)
        assert data[: len(image)] == image, f"{when}: wrong bytes under {chunk.key.hex()[:8]} of rank {rank}"

    def check_carried(self, shard: Shard) -> None:
        """A store is sealed only if its worker has copied all its bytes while its engine held the blocks."""
        doing = self.doing
        if not self.serving or isinstance(doing, Load):
            return
        assert isinstance(doing, wire.Complete) and doing.copied, f"sealed by {doing!r:.60}"
        carried = self.host.carried.get((self.boot, self.asker, doing.operation), ())
        assert shard.extents in carried, "a shard is sealed that its worker has not copied"

    def check_conserved(self) -> None:
        """The laws of protocol/counters.py; shards of stores that go on have no outcome yet."""
        counters = self.depot.counters
        asked, found, sure = self.asked_chunks, self.found_chunks, self.sure_chunks
        assert sure <= counters["hit_chunks"] <= found, f"{found} chunks were found, {sure} of them at the first answer"
        looked_up = counters["lookup_chunks"]
        assert counters["hit_chunks"] <= looked_up <= asked, f"{looked_up} of {asked} chunks asked for are counted"
        ended = {outcome: counters[outcome] for outcome in STORE_OUTCOMES}
        operations = [each for client in self.depot.clients for each in client.operations.values()]
        under_way = sum(len(each.chunks) for each in operations if isinstance(each.request, wire.Store))
        assert self.asked_shards == sum(ended.values()) + under_way, (
            f"stores of {self.asked_shards} shards were asked for; {under_way} are under way, and {ended}"
        )
        assert self.depot.operations == len(operations)

    def check_sealed(self) -> int:
        """Every sealed shard contains what its key says; how many there are."""
        found = 0
        for namespace in self._engines_namespaces():
            for chunk in namespace.chunks.values():
                for rank, shard in chunk.shards.items():
                    if shard.sealed:
                        self.check_bytes(chunk, rank, "kept")
                        found += 1
        return found

    def _asked_groups(self, identity: bytes, request: wire.Lookup) -> list[Namespace]:
        """Of all models that a client's lookup may mean; each must have what it asks for."""
        model = self.users.get(identity, ""), request.model, request.world_size
        firsts = for_lookup(self.index.namespaces, model, request.blocks_in_chunk, request.chunk_tokens)
        return [group for first in firsts for group in first.groups]

    def _prefix(self, request: wire.Lookup, groups: list[Namespace]) -> list[bytes]:
        """What memory can restore of what a lookup asks for."""

        def is_there(group: Namespace, key: bytes) -> bool:
            chunk = group.chunks.get(key)
            return (
                chunk is not None
                and chunk.state in (ChunkState.WHOLE, ChunkState.CHAINED)
                and self._may_be_given(chunk)
            )

        return longest(groups, keys_in(request), request.tails, is_there)

    def _may_be_given(self, chunk: Chunk) -> bool:
        forgettings = self.host.forgettings
        return forgettings.may_be_given(chunk.namespace, chunk.salt, forgettings.since(chunk))

    def _meant(self, identity: bytes, request: wire.Retrieve) -> list[list[Meant]]:
        """For each key of a retrieve the chunks that it may mean."""
        client = self.depot.client(identity)
        instance = None if client is None else client.instances.get(request.instance)
        group = 0 if instance is None else instance.group
        return [
            [
                (namespace, chunk.salt, self.host.forgettings.since(chunk))
                for namespace in self.index.namespaces.all()
                if (namespace.tenant, namespace.model, namespace.group) == (self.users[identity], part.model, group)
                and (chunk := namespace.chunks.get(part.hashes[i : i + 32])) is not None
                and part.rank in chunk.shards
                and chunk.shards[part.rank].sealed
            ]
            for part in request.shards
            for i in range(0, len(part.hashes), 32)
        ]

    def _check_given(self, meant: list[list[Meant]], value: Any) -> None:
        """What was forgotten, before a retrieve or during it, was not given."""
        if isinstance(value, list):
            for chunks, given in zip(meant, value, strict=True):
                assert not given or any(self.host.forgettings.may_be_given(*chunk) for chunk in chunks), (
                    "a retrieve was given what was forgotten"
                )

    def _check_answer(
        self, asked: tuple[bytes, bytes], since: float, request: wire.Lookup, near: list[bytes], value: Any
    ) -> None:
        """An answer is the deepest boundary that memory can restore; looking behind memory has not made it shorter."""
        # Whose answer nobody wants any more is told nothing.
        given_up = (
            isinstance(self.doing, wire.EndSession | wire.Lookup | wire.TakeLease | wire.EndLease)
            and value == wire.MISS
        )
        waited_s = self.world.now - since
        is_awaited = not given_up and not self.draining and not request.hurries
        roomless = asked in self.roomless
        self.roomless.discard(asked)
        in_time = is_awaited and not roomless and waited_s < self.host.config.lookup_s / 2
        self._behind.answered(asked, value, in_time)
        if not isinstance(value, wire.Hit):
            return
        # One that is sent again after its answer is told the same, and keeps its pins: memory may have more by now.
        is_repeated = value != wire.MISS and self._answered.get(asked) == value
        self._answered[asked] = value
        self.world.counters["lookup_answered_again"] += is_repeated
        if is_awaited:
            self._waits.answered(asked[0], request, waited_s, value, roomless)
        groups, found = self._asked_groups(asked[0], request), found_by(request, value)
        self.found_chunks += value.chunks if request.readers else 0
        is_first = not is_repeated and not request.hurries
        self.sure_chunks += value.chunks if request.readers and is_first else 0
        self._check_found(groups, found)
        if found:
            self._check_pinned(asked[0], request, groups, found)
        counters = self.world.counters
        late = waited_s >= self.host.config.lookup_s
        counters["lookup_at_its_deadline"] += late
        counters["lookup_cut_short"] += late and len(near) < len(found) < len(request.hashes) // 32
        counters["tail_hit_from_tiers"] += value.tail is not None and found != near and bool(self.host.stores)
        if any(group.reach for group in groups):
            self._count_boundary(request, groups, len(near), len(found))
        now = self._prefix(request, groups)
        is_shorter = length_of(request, found) < length_of(request, now)
        assert found == now or given_up or ((roomless or is_repeated) and is_shorter), (
            f"memory has {len(now)} chunks of a prefix, and the answer is {value}"
        )
        lost = any(self.condemned.get(key, 0.0) >= since for key in near) or self.host.config.ttl_s
        # An engine of the same name and another layout may have come meanwhile: then both must have it.
        alone = len({id(group.groups) for group in groups}) == 1
        is_shorter = length_of(request, found) < length_of(request, near)
        assert not is_shorter or lost or not alone or given_up or roomless or is_repeated, (
            f"memory had {len(near)} chunks of a prefix, and the answer is {value}"
        )

    def _check_found(self, groups: list[Namespace], keys: list[bytes]) -> None:
        """All that resuming behind these chunks needs is there on every rank, and may be given."""
        for group in groups:
            for i in needed(group.reach, len(keys)):
                what = f"chunk {keys[i].hex()[:8]}, group {group.group}"
                chunk = group.chunks.get(keys[i])
                assert chunk is not None, f"a lookup found {what}, which is not there"
                assert self._may_be_given(chunk), f"a lookup found {what}, which was forgotten"
                for rank in range(group.world_size):
                    shard = chunk.shards.get(rank)
                    assert shard is not None and shard.sealed, f"a lookup found {what}, which rank {rank} lacks"
                    if group.reach:
                        self.check_bytes(chunk, rank, "found")

    def _check_pinned(self, identity: bytes, request: wire.Lookup, groups: list[Namespace], keys: list[bytes]) -> None:
        """The session holds what resuming behind these chunks needs, and nothing else."""
        client = self.depot.client(identity)
        assert client is not None
        session = client.sessions.get(request.request)
        held = set()
        for chunk in session.chunks if session is not None else ():
            each: Chunk | None = chunk
            while each is not None and each.namespace is chunk.namespace:  # a chunk protects those before it
                if not each.gone:
                    held.add((each.namespace.number, each.key))
                each = each.parent
        wanted = {(group.number, keys[i]) for group in groups for i in needed(group.reach, len(keys))}
        assert held == wanted, (
            f"resuming {request.request} needs {len(wanted)} parts; {len(wanted - held)} of them are not pinned, "
            f"and {len(held - wanted)} others are"
        )

    def _count_boundary(self, request: wire.Lookup, groups: list[Namespace], near: int, value: int) -> None:
        """What has happened to lookups of hybrid models."""
        counters = self.world.counters
        unbounded = [group for group in groups if not group.reach]
        if unbounded:
            deeper = len(self._prefix(request, unbounded)) > value
            counters["groups_miss_by_a_bounded_part"] += deeper and not value
            counters["groups_hit_before_the_last_chunk"] += deeper and value > 0
        counters["groups_hit"] += value > 0
        counters["groups_hit_from_tiers"] += value > near
        counters["groups_hit_of_two_models"] += value > 0 and len({id(group.groups) for group in groups}) > 1

    def check_reserved(self, tier_task: Load) -> None:
        """A load writes only where room is reserved for it, or was until somebody else was to fill its chunk."""
        arrivals = tier_task.arrivals
        for part, arrival in zip(tier_task.parts, arrivals, strict=True):
            if arrival.is_given_up:
                assert arrival.shard.extents == part.extents
                self.world.counters["load_replaced"] += 1
                continue
            chunks = [
                namespace.chunks[part.key]
                for namespace in self.index.namespaces.all()
                if namespace.facts.get(part.facts.rank) == part.facts and part.key in namespace.chunks
            ]
            shards = [chunk.shards.get(part.facts.rank) for chunk in chunks]
            assert any(shard is not None and not shard.sealed and shard.extents == part.extents for shard in shards), (
                f"a load of {part.key.hex()[:8]} writes where nothing is reserved for it"
            )

    def check_saved(self, parts: list[Part]) -> None:
        """What is written to a tier is what its key says."""
        for part in parts:
            self.host.forgettings.saved(part)
            image = self.host.image(part.facts.layout, part.key, part.facts.rank)
            assert image is not None, f"a chunk that nobody named is saved: {part.key.hex()}"
            if not self._is_flipped(part.extents):
                data = b"".join(self.bytes[start : start + size].tobytes() for start, size in part.extents)
                assert data[: min(part.size, len(image))] == image, (
                    f"wrong bytes are saved under {part.key.hex()[:8]} of rank {part.facts.rank}"
                )

    def _is_flipped(self, extents: Extents) -> bool:
        return any(start <= at < start + size for start, size in extents for at in self.file.flips)

    def _check_ages(self) -> None:
        """What is too old and not in use is gone, unless there was so much that the next turns of the loop go on."""
        ttl_s, wall = self.host.config.ttl_s, int(WALL + self.world.now)
        if self.depot._is_behind:
            return
        for namespace in self.index.namespaces.all() if ttl_s else ():
            for chunk in namespace.chunks.values():
                fresh = chunk.born + ttl_s > wall or chunk.state not in (ChunkState.WHOLE, ChunkState.CHAINED)
                assert fresh or not is_evictable(chunk), f"{chunk.key.hex()[:8]} is too old, and still there"

    # -- at the end

    def check_idle(self) -> None:
        """All requests have ended, and the clients are still there: everything was answered, and nothing is pinned."""
        living = {client.link.identity for client in self.host.clients if client.process.alive}
        for (identity, asked), count in self.unanswered.items():
            if identity in living and self.depot.client(identity) is not None:
                number, name = int.from_bytes(asked, "little"), self._links[identity].name
                assert not count, f"request {number} of {name} was not answered"
        sessions = [
            f"{self._links[identity].name} {request}"
            for identity, client in self.depot._clients.items()
            if identity in living
            for request in client.sessions
        ]
        assert not sessions, f"requests have ended, and their pins have not: {', '.join(sessions)}"

    def check_quiet(self) -> None:
        """All clients are gone: nothing is held for anybody."""
        self.host.check_pins(self)
        for lease in list(self.depot.leases._all()):
            assert self.depot.leases.end(lease.tenant, lease.request.name, self.depot.now) is lease
        status = self.depot.status()
        for what in ("clients", "sessions", "instances", "operations", "holds", "reserved_shards"):
            assert getattr(status, what) == 0, f"all clients left, and there are {getattr(status, what)} {what}"
        left = self.met.intersection(self.host.liveness_files)
        assert not left, f"cards of the dead stay: {sorted(left)}"
        assert (
            not self.depot.pins._by_request
            and not self.depot.removals
            and not any(each.hiding for each in self.index.namespaces.all())
        )
        assert not len(self.depot.lookups), "lookups that wait, and nobody asks"
        waiting = self.depot.lookups._late, self.depot.removals._ready, self.depot.removals._forgetting
        assert not any(waiting), f"requests that nobody will answer: {waiting}"
        tiering = self.depot.tiering
        assert not tiering.loads and not tiering.loads._arrivals and not tiering.forgettings, tiering
        assert not tiering.loads.arriving_bytes and not tiering.loads._wanted
        demoting_bytes = sum(each.leaving for each in self.index.accounts.all())
        assert not demoting_bytes, f"{demoting_bytes} bytes are still on their way out"
        for tier in tiering._tiers:
            assert not tier.saving and not tier.queue and not tier.queued_bytes, tier
        self.validate()
        self.check_sealed()
        for tier_worker in self.tier_workers:
            self.host.forgettings.check_store(tier_worker.store)
