"""The simulated server process: the real core between a made-up socket, arena file and threads.

The shipped harness drives the core, one message or outcome an event; this checks as it goes. It can be killed, stopped
and shut down between any two events, also while workers copy (copies.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdepot.core.actions import Action, Prepare, Prepared, Reply, Stop
from kvdepot.core.index.recovery import InUse, restore
from kvdepot.core.lookups.search import Search
from kvdepot.core.tiering.forgetting import DroppedErase
from kvdepot.errors import KVDepotError, UnknownRequest
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import Allocator, Extents
from kvdepot.memory.records import Records, ShardRecord
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import _SEAL_BYTES as SEAL_BYTES
from kvdepot.protocol.handshake import SECRET_BYTES, is_sealed
from kvdepot.protocol.quotas import shortest
from kvdepot.protocol.status import Status
from kvdepot.tiers.worker import Erased, Load, Save, TierTask
from tests.harness import Harness, kind_of
from tests.sim.checks import LATE_S, Checks, Meant
from tests.sim.groups import longest
from tests.sim.lookups import Behind, Waits, keys_in
from tests.sim.odd import ODD_TENANT
from tests.sim.shared import ArenaFile, LivenessView, SealedIndex, ShardName
from tests.sim.tiers import WALL, Forgot, Store, TierWorker
from tests.sim.world import Link

if TYPE_CHECKING:
    from tests.sim.host import Host

TICK_S = 1.0
TIER_STOP_S = 2.0


class Server(Checks, Harness):
    """One run of a server, from its start to its end."""

    def __init__(self, host: Host, file: ArenaFile) -> None:
        self.host = host
        self.world = host.world
        self.file = file
        self.boot = self.world.random.randbytes(wire.BOOT_BYTES)
        self.alive = True
        self.frozen = False
        self.draining = False
        self.closing = False  # its loop has ended; threads may still be at work
        self.serving = False
        self.doing: Any = None  # the request or tier task that is being decided
        self.asker = b""  # who asked for it
        self.asked_shards = 0  # in all stores that were begun
        self.asked_chunks = self.found_chunks = self.sure_chunks = 0  # of engines' lookups; sure: by their first answer
        self.bytes = file.bytes
        file.owner = file.server = self  # the lock first, then the header: a client may look in between
        self.world.after(0.001 * self.world.random.random(), self._begin)

    def __repr__(self) -> str:
        state = "stopped" if self.frozen else "draining" if self.draining else "up" if self.alive else "dead"
        return f"<Server {self.boot.hex()[:4]} {state}>"

    def _begin(self) -> None:
        if not self.alive:
            return
        config = self.host.config
        self.file.boot = self.boot
        self.file.secret = self.world.random.randbytes(SECRET_BYTES)
        records = Records(memoryview(self.bytes.data)[: self.file.table_bytes], lambda *_: not self.host.shm_full)
        allocator = Allocator(self.file.start, len(self.bytes))
        index = SealedIndex(allocator, POLICIES[config.policy], records, config.ttl_s, chunk_tokens=config.chunk_tokens)
        index.server = self
        self.index = index
        self._in_use: list[InUse] = []  # by clients of the earlier server
        self._take_over()
        self.tier_workers = [self._tier_worker(store) for store in self.host.stores]
        tiers = [tier_worker.store.config for tier_worker in self.tier_workers]
        Harness.__init__(
            self, config, index, tiers, boot=self.boot, arena=self.file,
            open_liveness=lambda name: LivenessView(self.host, name), tenant=lambda user: user,
            step_chunks=(1, 3, 256)[self.world.seed % 3],
        )  # fmt: skip
        if self.host.has_storms:  # what does not fit is wanted
            self.depot.pins.budget.most_bytes //= 6
        self.now = self.world.now
        self.ended_leases: dict[tuple[str, str], str] = {}  # why, by tenant and name: the last one of each
        self.depot.leases._end = partial(self._lease_ended, self.depot.leases._end)  # type: ignore[method-assign]
        self.roomless: set[tuple[bytes, bytes]] = set()  # lookups that waited for room, or got less for want of it
        self.depot.lookups._wait_for_room = partial(self._found_no_room, self.depot.lookups._wait_for_room)  # type: ignore[method-assign]
        self.depot.transfers.store = partial(self._store_begins, self.depot.transfers.store)  # type: ignore[method-assign]
        self._completed: set[tuple[bytes, int]] = set()  # operations, by client
        self._said: Any = None  # the last answer
        self._behind = Behind(self)
        self._waits = Waits(self)
        self.met: set[str] = set()  # clients that have said hello
        for name in [name for name, liveness in self.host.liveness_files.items() if not liveness.locked]:
            del self.host.liveness_files[name]  # as shm.sweep_liveness_files
        self._late: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.condemned: dict[bytes, float] = {}  # keys that were forgotten or flipped, and when: no pin kept them
        self._lookups: dict[tuple[bytes, bytes], tuple[float, wire.Lookup, list[bytes]]] = {}
        self._answered: dict[tuple[bytes, bytes], wire.Hit] = {}  # lookups that were answered, and how
        """Those that wait for an answer: since when, and what of their prefix memory had then."""
        self._retrieves: dict[tuple[bytes, bytes], list[list[Meant]]] = {}
        """Those that wait for an answer: for each key the chunks that may be meant, their salts and since when."""
        self._forgetting: dict[tuple[bytes, bytes], Forgot] = {}
        self._removing: list[Forgot] = []  # of those: what memory has not been gone through for
        self._late_keys: set[bytes] = set()  # of what arrived from tiers after its lookup was answered
        self._well_since = 0.0
        self._reports = 0  # of tier tasks that have ended, on their way
        self._armed = float("inf")  # when `_expire` comes
        self._stepping = False  # `_step` comes
        self._links: dict[bytes, Link] = {}
        self._since_validated = 0
        self.serving = True
        self.host.network.listen(self)
        self.world.note(
            f"{self!r} serves {' '.join(tier_worker.store.config.options.write for tier_worker in self.tier_workers)}"
        )
        self.tick(self.now, WALL + self.now)
        self.world.after(TICK_S, self._event, self._tick)

    def _lease_ended(self, end: Callable[..., None], lease: Any, why: str) -> None:
        self.ended_leases[lease.tenant, lease.request.name] = why
        end(lease, why)

    def _tier_worker(self, store: Store) -> TierWorker:
        return TierWorker(self, store, shortest(store.config.options.ttl_s, self.host.config.ttl_s))

    def _take_over(self) -> None:
        """What the last server had sealed is there again; what it was writing is not."""
        left = self.file.left
        if left is None:
            return
        self.file.left = None
        used = sorted({use for uses in self.file.uses.values() for use in uses})
        restored = restore(self.index, used=used)
        self._in_use = restored.in_use
        self.world.counters["arena_taken_over_in_use"] += bool(used)
        found = self.shards()
        lost = left.keys() - found.keys()
        self.world.note(f"{self!r} takes over {restored.shards} shards, {len(lost)} are lost")
        self.world.counters["shards_recovered"] += len(found)
        self.world.counters["bounded_parts_recovered"] += sum(reach > 0 for _, _, _, reach, *_ in found)
        self.world.counters["records_damaged"] += len(restored.damaged)
        assert not found.keys() - left.keys(), "a restart made shards visible that were not"
        if self.file.table_flipped:
            self.world.counters["shards_lost_to_flips"] += len(lost)
        else:
            assert not lost, f"{len(lost)} of {len(left)} shards were sealed, and are gone after a restart"
            for name, depth in left.items():
                assert found[name] >= depth, f"a chunk was {depth} deep in its chain, and now {found[name]}"
        self.file.table_flipped = False
        assert not self.index.reserved and (used or not self.index.held), "holds of the dead"
        self.index.validate()

    def shards(self) -> dict[ShardName, int]:
        """What a restart must find: recorded shards, and how deep in its chain each is known to be."""
        found: dict[ShardName, int] = {}
        for namespace in self.index.namespaces.all():
            whole: set[bytes] = set()
            for chunk in sorted(namespace.chunks.values(), key=lambda chunk: chunk.depth):
                recorded = {
                    rank: shard for rank, shard in chunk.shards.items() if shard.sealed and shard.slot is not None
                }
                chained = chunk.depth == 1 or (chunk.depth > 1 and chunk.parent.key in whole)
                if chained and len(recorded) == namespace.world_size:
                    whole.add(chunk.key)
                for rank in recorded:
                    layout = namespace.layouts[rank]
                    name = namespace.tenant, namespace.model, namespace.group, namespace.reach, layout, chunk.key, rank
                    found[name] = chunk.depth if chunk.key in whole else 0
        return found

    # -- being a process

    def _event(self, act: Callable[..., None], *args: Any) -> None:
        """Everything the process does happens in one of these: not when it is dead, later when it is stopped."""
        if not self.alive:
            return
        if self.frozen:
            self._late.append((act, args))
            return
        self.now = self.world.now
        act(*args)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.world.counters["server_stopped_during_copy"] += bool(self.copying())
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        if not self.frozen:
            return
        self.frozen = False
        self._well_since = self.world.now
        late, self._late = self._late, []
        for act, args in late:
            self.world.after(0, self._event, act, *args)

    def kill(self) -> None:
        """SIGKILL. Half-copied pieces stay as they are; the kernel gives the lock up."""
        self.world.note(f"{self!r} killed")
        if self.serving:
            for is_store in self.copying():
                self.world.counters[f"server_killed_during_{'store' if is_store else 'retrieve'}"] += 1
            for tier_worker in self.tier_workers:
                for tier_task in tier_worker.running:
                    self.world.counters[f"server_killed_during_tier_{kind_of(tier_task.tier_task).lower()}"] += 1
                tier_worker.stop()
            self.file.left = self.shards()
            self._tear_record()
        self._end(all_arrives=False)

    def _tear_record(self) -> None:
        """It may die while it writes a record: then some of that is there, and it must not count."""
        shards = [
            s for n in self.index.namespaces.all() for c in n.chunks.values() for s in c.shards.values() if s.sealed
        ]
        if not shards or self.world.chance(0.5):
            return
        shard = self.world.random.choice(shards)
        table = self.bytes[: self.file.table_bytes]
        before = table.copy()
        record = ShardRecord(1, 0, self.world.random.randbytes(32), b"", 0, shard.extents, shard.size, 1 << 40, 0)
        if self.index.records.write(record) is not None:
            changed = np.flatnonzero(table != before)
            undone = changed[self.world.random.randrange(len(changed)) :]
            table[undone] = before[undone]
            self.world.counters["record_torn"] += 1

    def stop(self) -> None:
        """SIGTERM: end what is under way, for `drain_s` at most, then go and take the arena along."""
        self.world.note(f"{self!r} shuts down")
        self.draining = True
        self.world.after(self.host.config.drain_s, self._event, self._leave)
        self._event(self._drain)

    def _drain(self) -> None:
        self.world.counters["stopped_with_searches"] += bool(self.depot.tiering.loads)
        self.act(self.depot.stop_waiting())
        assert not self._lookups, "a server that ends has not answered every lookup"
        self._maybe_leave()

    def _maybe_leave(self) -> None:
        if not self.depot.operations and not self.depot.tiering.busy:
            self._leave()

    def _leave(self) -> None:
        """The loop has ended. Tiers' threads have a while to end what they are at."""
        if self.closing:
            return
        self.closing = True
        self.world.counters["server_left_with_copies" if self.depot.operations else "server_drained"] += 1
        for tier_worker in self.tier_workers:
            tier_worker.stop()
        self.world.after(TIER_STOP_S, self._event, self._go)
        self._maybe_go()

    def _maybe_go(self) -> None:
        if not any(tier_worker.running for tier_worker in self.tier_workers):
            self._go()

    def _go(self) -> None:
        if not self.alive:
            return
        self.world.counters["server_left_hung_tier"] += any(tier_worker.running for tier_worker in self.tier_workers)
        if self.host.config.on_stop == "keep":
            self.world.counters["arena_kept"] += 1
            self.file.left = self.shards()
        else:
            self.host.files.pop(self.file.name, None)
        self._end(all_arrives=True)

    def _end(self, all_arrives: bool) -> None:
        self.alive = False
        for forgot in self._removing if self.serving else ():
            forgot.void = True
            self.world.counters["server_died_while_removing"] += 1
        self.file.owner = None
        self.host.server = None
        self.host.down_since = self.world.now
        if self.serving:
            self.serving = False
            self.count()
            self.host.network.hang_up(all_arrives)

    def count(self) -> None:
        """Add what the depot counted to the run's counters."""
        counters = self.world.counters
        counters["tier_hit_chunks"] += self.depot.counters["tier_hit_chunks"]
        for name in ("expired_chunks", "awaited_chunks", "late_lookups", "shortened_lookups"):
            counters[name] += self.depot.counters[name]
        for tier in self.depot.tiering.status(self.world.now):
            counters.update({f"tier_{name}": count for name, count in tier.counters.items()})

    # -- hearing and answering

    def accepts(self) -> bool:
        return not self.frozen and not self.draining

    def is_well(self) -> bool:
        """Whether it answers at once."""
        return self.serving and not self.frozen and not self.draining and not self.host.network_slow

    def is_busy_for(self, link: Link) -> bool:
        """Whether it has operations of this client, or removes for it, which may wait for tiers."""
        client = self.depot._clients.get(link.identity)
        if client is None:
            return False
        removals = self.depot.removals
        removes = (*removals._ready, *removals._waiting, *removals._forgetting.values())
        is_removing = any(each.client is client for each in removes)
        return is_removing or bool(client.operations)

    def deliver(self, link: Link, frame: bytes) -> None:  # type: ignore[override]  # as a network's listener
        self._event(self._receive, link, frame)

    def _receive(self, link: Link, frame: bytes) -> None:
        if self.draining:
            return
        identity = link.identity
        self._links[identity] = link
        client = self.depot.client(identity)
        sealed = is_sealed(frame)
        number, request = wire.decode_request(
            frame[: wire.ID_BYTES] + frame[wire.ID_BYTES + SEAL_BYTES :] if sealed else frame
        )
        self.users.setdefault(identity, self.host.tenants.get(link.name.partition(".")[0], ""))
        if isinstance(request, wire.Lookup) and request.readers:
            self.asked_chunks += len(request.hashes) // 32
        is_odd = client is not None and client.tenant == ODD_TENANT
        if isinstance(request, KVDepotError):
            assert is_odd, request
            Harness.deliver(self, identity, frame)
            return
        greets = isinstance(request, wire.Hello | wire.Prove)
        assert sealed or greets or client is None or client.seal is None, "this client has stopped sealing"
        self.world.counters["sealed"] += sealed and client is not None
        self.world.note(f"{link.name} > {_short(number, request)}")
        self.doing, self.asker = request, identity
        if isinstance(request, wire.Prove):
            self.world.counters["proved_to_a_successor"] += identity not in self.connections._challenges
        if greets or client is None or is_odd:
            Harness.deliver(self, identity, frame)
        else:
            self._decide(identity, number, request, frame)
        self._check()

    def _decide(self, identity: bytes, number: bytes, request: wire.Request, frame: bytes) -> None:
        asked = identity, number
        at_once = False
        if isinstance(request, wire.Lookup):
            groups = self._asked_groups(identity, request)
            near = self._prefix(request, groups)
            self._lookups.setdefault(asked, (self.world.now, request, near))  # sent again, it has waited all along
            at_once = near == longest(groups, keys_in(request), request.tails, lambda group, key: True)
            if any(group.reach for group in groups) and not request.hurries:
                self._behind.begin(asked, request, groups)
        elif isinstance(request, wire.Store):
            self._behind.note_store()
            self.world.counters["copy_asked_again"] += self._is_under_way(identity, number)
        elif isinstance(request, wire.Retrieve):
            keys = {part.hashes[i : i + 32] for part in request.shards for i in range(0, len(part.hashes), 32)}
            self.world.counters["late_load_used"] += not keys.isdisjoint(self._late_keys)
            self._retrieves[asked] = self._meant(identity, request)
            self.world.counters["copy_asked_again"] += self._is_under_way(identity, number)
        elif isinstance(request, wire.ForgetChunks):
            forgot = self._forgetting[asked] = self.host.forgettings.begin(
                self.users[identity], request.model, request.salt
            )
            self._removing.append(forgot)
            for namespace in self.index.namespaces.all():
                for chunk in namespace.chunks.values():
                    if forgot.covers(namespace, chunk.salt):
                        self.condemned[chunk.key] = self.world.now
            for kind in {kind_of(running.tier_task) for each in self.tier_workers for running in each.running}:
                self.world.counters[f"forgotten_during_tier_{kind.lower()}"] += 1
        elif isinstance(request, wire.Complete):
            self._complete(identity, number, request, frame)
            return
        if self.depot.removals:
            self.world.counters[f"{type(request).__name__.lower()}_while_removing"] += 1
        Harness.deliver(self, identity, frame)
        if isinstance(request, wire.ForgetChunks):
            named = self.host.named
            for name in [name for name, each in named.items() if self.depot.leases._find(each.tenant, name) is None]:
                self.world.counters["pin_forgotten"] += 1
                del named[name]
        at_once &= asked not in self.roomless
        assert not at_once or asked not in self._lookups, "a lookup that memory can answer waits for tiers"

    def _complete(self, identity: bytes, number: bytes, request: wire.Complete, frame: bytes) -> None:
        """One that arrives twice, or at a successor, changes nothing."""
        asked, counters = (identity, request.operation), self.world.counters
        is_twice, is_late = asked in self._completed, request.boot != self.boot
        before = self._carried_counts()
        usable = [tier for tier in self.depot.tiering._tiers if tier.breaker.usable]
        dropped = sum(tier.counters["dropped_chunks"] for tier in usable)
        Harness.deliver(self, identity, frame)
        counters["queue_full"] += sum(tier.counters["dropped_chunks"] for tier in usable) > dropped
        self.host.carried.pop((request.boot, *asked), None)
        counters["completed_twice"] += is_twice
        counters["completed_at_a_successor"] += is_late
        if is_twice or is_late:
            assert isinstance(self._said, UnknownRequest), f"{self._said!r} to what has ended"
            assert self._carried_counts() == before
        else:
            self._completed.add(asked)

    def _is_under_way(self, identity: bytes, number: bytes) -> bool:
        client = self.depot.client(identity)
        return client is not None and int.from_bytes(number, "little") in client.operations

    def _carried_counts(self) -> list[int]:
        counted = [self.depot.counters[f"{name}_chunks"] for name in ("stored", "failed", "retrieved", "corrupt")]
        return [*counted, self.index.held, self.index.reserved, self.depot.operations]

    def _store_begins(self, store: Callable[..., Any], client: Any, number: bytes, asked: wire.Store, wall: int) -> Any:
        is_repeated = self._is_under_way(client.identity, number)
        actions = store(client, number, asked, wall)
        self.asked_shards += 0 if is_repeated else sum(len(part.hashes) // 32 for part in asked.shards)
        return actions

    def _found_no_room(self, wait: Callable[..., Any], search: Search, *rest: Any) -> Any:
        asked = search.client.identity, search.number
        self.world.counters["lookup_awaited_room"] += asked not in self.roomless and not search.request.hurries
        self.roomless.add(asked)
        return wait(search, *rest)

    def stopped(self, stop: Stop) -> None:
        if not self.draining:
            self.world.after(0, self.host.server_wants_to_stop)

    def submitted_to_tier(self, task: TierTask) -> None:
        self.tier_workers[task.tier].submit(task)

    def act(self, actions: list[Action]) -> None:
        super().act(actions)
        due = self.depot.next_deadline() or float("inf")  # 0: the next step of a removal, which comes by itself
        if due < self._armed:
            self._armed = self.world.deadline = due
            late_s = self.world.random.choice([0.0, LATE_S / 4])
            self.world.at(max(due, self.world.now) + late_s, self._event, self._expire)
        if not self.depot.next_deadline() and not self._stepping:
            self._stepping = True
            # Between two steps of a removal there is time for much else.
            self.world.after(self.world.spread(0.0001, 0.05), self._event, self._step)
        if self.draining:
            self._maybe_leave()

    def _step(self) -> None:
        self._stepping = False
        self._expire()

    def _expire(self) -> None:
        self._armed = float("inf")
        if not self.draining:
            self.doing = None
            self.world.counters["now_equals_deadline"] += self.now == self.depot.next_deadline()
            self._waits.expire()
            self.expire()
            self._check()

    def replied(self, reply: Reply, frame: bytes) -> None:
        value = self._said = reply.value
        self._hear_answer((reply.client, reply.number), value)
        link = self._links[reply.client]
        said = "a status" if isinstance(value, Status) else f"{value!r:.60}"  # which has our pid
        self.world.note(f"{link.name} < {int.from_bytes(reply.number, 'little')} {said}")
        if isinstance(value, KVDepotError):
            self.world.counters[f"answer_{type(value).__name__}"] += 1
        elif isinstance(value, wire.Welcome):
            client = self.depot.client(reply.client)
            assert client is not None
            self.met.add(client.liveness.name)
        if not link.reply(frame):
            self.world.counters["replies_without_connection"] += 1

    def _hear_answer(self, asked: tuple[bytes, bytes], value: Any) -> None:
        if asked in self._lookups:
            self._check_answer(asked, *self._lookups.pop(asked), value)
        if asked in self._retrieves:
            self._check_given(self._retrieves.pop(asked), value)
        forgot = self._forgetting.pop(asked, None)
        if forgot is not None and isinstance(value, KVDepotError):
            self.host.forgettings.all.remove(forgot)  # refused
            self._removing.remove(forgot)
        if forgot is not None and isinstance(value, wire.ForgetAnswer):
            forgot.clean = not value.left
            self.world.counters["forgotten" if forgot.clean else "forgotten_with_errors"] += 1

    def _tick(self) -> None:
        if self.closing:
            return
        world = self.world
        self.doing = None
        uses = [use for uses in self.file.uses.values() for use in uses]
        for use in [each for each in self._in_use if not _overlaps(each.extents, uses)]:
            use.end(self.index)
            self._in_use.remove(use)
        before = {client.identity: self._waits.awaited(client) for client in self.depot.clients}
        if self.draining:
            self.act(self.connections.drop_dead())
        else:
            Harness.tick(self, self.now, WALL + self.now)
            self._check_ages()
        for identity in [identity for identity in before if self.depot.client(identity) is None]:
            world.note(f"{self!r} finds {self._links[identity].name} dead")
            world.counters["clients_found_dead"] += 1
            self._behind.forget(identity)
            self._waits.died(identity, before[identity])
            for waiting in (self._lookups, self._retrieves):
                for asked in [asked for asked in waiting if asked[0] == identity]:
                    del waiting[asked]  # type: ignore[attr-defined]
        if self.alive:
            # Hours in which nothing happens cost no ticks: the next comes shortly before the next event.
            world.after(max(TICK_S, world.next_event() - world.now - TICK_S), self._event, self._tick)
            self._check()

    # -- memory

    def ensure(self, offset: int, size: int) -> bool:
        """As Arena.ensure."""
        assert self.file.start <= offset < offset + size <= len(self.bytes), (offset, size)
        if self.host.shm_full:
            self.world.counters["shm_full_during_store"] += 1
            return False
        return True

    def submitted(self, task: Prepare) -> None:
        self.world.after(self.host.copy_s() / 4, self._event, self._prepared, task)

    def _prepared(self, task: Prepare) -> None:
        if self.closing:
            return
        self.doing = None
        is_allocated = all(self.ensure(*extent) for extents in task.extents for extent in extents)
        self.finished(task.token, Prepared(is_allocated))
        self._check()

    def copying(self) -> list[bool]:
        """Of each copy that a worker is making, whether it is a store."""
        blocks = [each for engine in self.host.engines for each in engine.blocks if not each.memory.dead]
        return [each.copying for each in blocks if each.copying is not None]

    # -- tiers

    def has_tier_tasks(self) -> bool:
        return self._reports > 0 or any(any(tier_worker.unfinished()) for tier_worker in self.tier_workers)

    def tier_task_ended(self, tier_task: TierTask, outcome: Any) -> None:
        """On a tier's thread."""
        if self.closing:
            self._maybe_go()
        else:
            self._reports += 1
            self.world.after(0.00001, self._event, self._collect, tier_task, outcome)

    def _collect(self, tier_task: TierTask, outcome: Any) -> None:
        self._reports -= 1
        if self.closing:
            return
        counters = self.world.counters
        tier = self.depot.tiering._tiers[tier_task.tier]
        usable = tier.breaker.usable
        if isinstance(tier_task, Load):
            arrivals = tier_task.arrivals
            counters["load_for_several"] += any(len(set(map(id, each.tier_searches))) > 1 for each in arrivals)
            late = [each for each in arrivals if all(tier_search.ended for tier_search in each.tier_searches)]
        is_erased = isinstance(outcome, Erased) and not isinstance(tier_task, DroppedErase)
        counters["corrupt_erased"] += is_erased
        self.doing = tier_task
        self.finished(tier_task, outcome)
        if isinstance(tier_task, Load):
            keys = {each.chunk.key for each in late if not each.chunk.gone}
            counters["late_load_sealed"] += bool(keys)
            self._late_keys |= keys
        elif isinstance(tier_task, Save):
            for chunk, _, demotion in tier_task.batch:
                if demotion is not None and not demotion.saves:
                    counters["demoted" if chunk.gone else "demotion_overtaken"] += 1
        counters["tier_tripped"] += usable and not tier.breaker.usable
        counters["tier_back"] += not usable and tier.breaker.usable
        self._check()

    def flip_chunk(self) -> bool:
        """Flip a bit of a sealed shard whose checksum is looked at."""
        shards = [
            shard
            for namespace in self.index.namespaces.all()
            for chunk in namespace.chunks.values()
            for shard in chunk.shards.values()
            if shard.sealed and shard.checksum and chunk.key[0] < self.depot.transfers._summed_below
        ]
        if not shards:
            return False
        shard = self.world.random.choice(shards)
        at = self.world.random.randrange(shard.size)
        for start, size in shard.extents:
            if at < size:
                self.bytes[start + at] ^= 1 << self.world.random.randrange(8)
                self.file.flips.add(start + at)
                break
            at -= size
        return True


def _overlaps(extents: Extents, uses: list[tuple[int, int]]) -> bool:
    return any(start < at + length and at < start + size for start, size in extents for at, length in uses)


def _short(number: bytes, request: wire.Request) -> str:
    text = f"{int.from_bytes(number, 'little')} {type(request).__name__}"
    match request:
        case wire.Lookup():
            return f"{text} {request.request} {len(request.hashes) // 32} chunks {len(request.tails)} tails"
        case wire.Store() | wire.Retrieve() | wire.Compare():
            parts = [f"{p.request}@{p.depth}+{len(p.hashes) // 32}" for p in request.shards]
            return f"{text} {' '.join(parts)}"
        case wire.EndSession():
            return f"{text} {request.request}"
    return text
