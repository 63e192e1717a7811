"""The simulation holds, is deterministic, and notices when something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvdepot.client.connection import Connection
from kvdepot.client.worker import WorkerClient
from kvdepot.core import depot
from kvdepot.core.actions import Reply
from kvdepot.core.connections import Rates
from kvdepot.core.depot import Depot
from kvdepot.core.forgetting import Removals
from kvdepot.core.index import chunk as chunks
from kvdepot.core.index import index, matching, recovery
from kvdepot.core.index.accounts import Accounts
from kvdepot.core.index.chunk import Account, State, join_groups
from kvdepot.core.index.namespaces import Namespaces
from kvdepot.core.leases import Leases
from kvdepot.core.registrations import Registrations
from kvdepot.core.sessions import Sessions
from kvdepot.core.tiering.forgetting import Forgettings
from kvdepot.core.tiering.lookup import Lookups
from kvdepot.core.tiering.saving import Saves
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.core.transfers import Transfers
from kvdepot.core.waiting import WaitingLookups
from kvdepot.memory import records
from kvdepot.memory.copier import Copy
from kvdepot.memory.records import Records
from kvdepot.protocol.handshake import Challenge
from kvdepot.tiers import worker as tier_worker
from kvdepot.tiers.format import Header
from tests.sim.run import Broken, simulate


@pytest.mark.faults
def test_no_invariant_breaks_in_the_first_seeds() -> None:
    for seed in range(40):
        assert simulate(seed).events > 100


@pytest.mark.faults
def test_the_same_seed_is_the_same_run_also_where_strings_hash_differently() -> None:
    seeds = [3, 11]
    here = [simulate(seed).digest() for seed in seeds]
    assert here == [simulate(seed).digest() for seed in seeds]
    code = f"from tests.sim.run import simulate\nprint(*[simulate(seed).digest() for seed in {seeds}])"
    for hash_seed in ("0", "7"):
        there = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        assert there.stdout.split() == here


# -- planted bugs: each breaks one function of the real code

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], None]
BREAKS: dict[str, tuple[Break, int]] = {}


def breaks(first_seed: int) -> Callable[[Break], Break]:
    """Plants a bug. It was last seen to be noticed soon after this seed: that saves time, and proves nothing."""

    def register(bug: Break) -> Break:
        BREAKS[bug.__name__] = bug, first_seed
        return bug

    return register


@breaks(0)
def lets_in_who_proves_nothing(patch: Patch) -> None:
    patch.setattr(Challenge, "check", lambda self, prove, secret: None)


@breaks(0)
def serves_strangers(patch: Patch) -> None:
    def handle(self: Any, identity: bytes, number: bytes, request: Any, now: float = 0.0) -> Any:
        if identity not in self._clients:
            return [Reply(identity, number, "ok")]
        return serve(self, identity, number, request, now)

    serve = Depot.handle
    patch.setattr(Depot, "handle", handle)


@breaks(0)
def shows_every_tenant_everything(patch: Patch) -> None:
    patch.setattr(Depot, "welcome", _as_one_tenant(Depot.welcome))


def _as_one_tenant(welcome: Any) -> Any:
    return lambda self, identity, liveness, user="", tenant="", *rest: welcome(
        self, identity, liveness, user, "", *rest
    )


@breaks(5)
def has_no_limit_of_a_rate(patch: Patch) -> None:
    patch.setattr(Rates, "charge", lambda self, client, requests: True)


@breaks(0)
def seals_before_the_copy_has_ended(patch: Patch) -> None:
    start = Transfers._start

    def start_sealed(self: Any, operation: Any, *rest: Any) -> Any:
        tasks = start(self, operation, *rest)
        for chunk, rank in operation.chunks if operation.is_store else ():
            self._index.seal(chunk, rank)
        return tasks

    patch.setattr(Transfers, "_start", start_sealed)
    patch.setattr(Transfers, "_end_store", lambda self, operation, wall: [])


@breaks(0)
def ignores_the_fence(patch: Patch) -> None:
    start = Transfers._start
    patch.setattr(Transfers, "_start", lambda self, operation, pieces, *_: start(self, operation, pieces, None, 0))


@breaks(0)
def never_raises_the_fence(patch: Patch) -> None:
    def give_up(self: Any, request_ids: set[str], timeout_s: float) -> None:
        stores = [each for request_id in request_ids for each in self.stores.get(request_id, ())]
        self.client.wait(lambda: all(each.done() for each in stores), timeout_s)

    patch.setattr(WorkerClient, "give_up_stores", give_up)


@breaks(0)
def answers_copies_twice(patch: Patch) -> None:
    end = Transfers._end
    patch.setattr(Transfers, "_end", lambda self, *args: 2 * [a for a in end(self, *args) if isinstance(a, Reply)])


@breaks(0)
def forgets_to_answer_failed_stores(patch: Patch) -> None:
    end = Transfers._end

    def silent(self: Any, *args: Any) -> Any:
        actions = end(self, *args)
        return [a for a in actions if not (isinstance(a, Reply) and a.value is False)]

    patch.setattr(Transfers, "_end", silent)


@breaks(2)
def releases_pins_early(patch: Patch) -> None:
    pin = Sessions._pin

    def unpinned(self: Any, pending: Any, pins: Any, matched: int) -> int:
        value = pin(self, pending, pins, matched)
        self.end(pending.asker, pending.lookup.request)
        return value

    patch.setattr(Sessions, "_pin", unpinned)


@breaks(31)
def keeps_the_pins_of_the_dead(patch: Patch) -> None:
    died = Depot.died

    def forgetful(self: Any, identity: bytes, *rest: Any) -> Any:
        self._clients[identity].sessions.clear()
        return died(self, identity, *rest)

    patch.setattr(Depot, "died", forgetful)


@breaks(687)
def answers_unregister_while_a_copy_runs(patch: Patch) -> None:
    unregister = Registrations.unregister

    def at_once(self: Any, client: Any, number: int, tell: list[bytes]) -> Any:
        return [*unregister(self, client, number, []), *(Reply(client.identity, asked, None) for asked in tell)]

    patch.setattr(Registrations, "unregister", at_once)


@breaks(12)
def unmaps_while_a_copy_runs(patch: Patch) -> None:
    unregister = Registrations.unregister

    def careless(self: Any, client: Any, number: int, tell: list[bytes]) -> Any:
        instance = client.instances.get(number)
        if instance is not None:
            instance.copies = 0
        return unregister(self, client, number, tell)

    patch.setattr(Registrations, "unregister", careless)


@breaks(0)
def seals_what_did_not_arrive(patch: Patch) -> None:
    copied = Transfers.copied

    def credulous(self: Any, token: Any, sums: Any, *times: Any) -> Any:
        return copied(self, token, [0] * (token.end - token.first) if sums is None else sums, *times)

    patch.setattr(Transfers, "copied", credulous)


@breaks(0)
def evicts_what_is_held(patch: Patch) -> None:
    def is_evictable(chunk: Any) -> bool:
        return not chunk.children and not chunk.gone and not any(shard.is_open for shard in chunk.shards.values())

    patch.setattr(chunks, "is_evictable", is_evictable)
    patch.setattr(index, "is_evictable", is_evictable)


@breaks(31)
def writes_blocks_that_a_retrieve_must_skip(patch: Patch) -> None:
    start = Transfers._start

    def unskipped(self: Any, operation: Any, pieces: Any, *rest: Any) -> Any:
        for piece in pieces:
            piece.skip = 0
        return start(self, operation, pieces, *rest)

    patch.setattr(Transfers, "_start", unskipped)


@breaks(0)
def tells_no_failed_blocks(patch: Patch) -> None:
    patch.setattr(WorkerClient, "_retrieve_ended", lambda self, submitted: None)


@breaks(30)
def takes_a_broken_connection_for_a_dead_server(patch: Patch) -> None:
    def lose(self: Any, error: Any) -> None:
        self._leave()
        self._requests.fail_all(error)

    patch.setattr(Connection, "lose", lose)


@breaks(11)
def waits_for_lookups_without_a_deadline(patch: Patch) -> None:
    ask = Connection.ask
    patch.setattr(Connection, "ask", lambda self, request, done, deadline_s=None: ask(self, request, done, None))


@breaks(12)
def never_looks_whether_the_server_is_gone(patch: Patch) -> None:
    patch.setattr("kvdepot.client.connection._GONE_CHECK_S", 1e9)


@breaks(14)
def leaves_records_of_what_was_evicted(patch: Patch) -> None:
    patch.setattr(Records, "erase", lambda self, slot: None)


@breaks(424)
def believes_damaged_records(patch: Patch) -> None:
    patch.setattr(records, "crc32", lambda data: 0)


@breaks(78)
def ignores_checksums(patch: Patch) -> None:
    patch.setattr(Transfers, "_is_as_stored", lambda self, chunk, rank, got: True)


@breaks(14)
def forgets_to_record(patch: Patch) -> None:
    record = Namespaces.record

    def every_other(self: Any, chunk: Any, rank: int, serial: int) -> None:
        record(self, chunk, rank, serial)
        slot = chunk.shards[rank].slot
        if serial % 2 and slot is not None:
            self._records._wipe(slot)

    patch.setattr(Namespaces, "record", every_other)


@breaks(0)
def copies_one_block_too_few(patch: Patch) -> None:
    def short(self: Any, operation: Any, pieces: Any, *rest: Any) -> Any:
        tasks = start(self, operation, pieces, *rest)
        for task in tasks:
            if isinstance(task, Copy) and not task.is_store:
                task.pieces[-1].skip = max(task.pieces[-1].skip, 1) if len(task.pieces[-1].block_ids) > 1 else 0
        return tasks

    start = Transfers._start
    patch.setattr(Transfers, "_start", short)


# -- planted bugs of what lies behind memory


@breaks(282)
def seals_corrupt_loads(patch: Patch) -> None:
    accept = tier_worker.Mover._accept

    def credulous(self: Any, part: Any, blob: Any, *rest: Any) -> Any:
        found = accept(self, part, blob, *rest)
        return Header.unpack(blob.buffers[0]) if found is tier_worker.NotLoaded.CORRUPT else found

    patch.setattr(tier_worker.Mover, "_accept", credulous)


@breaks(707)
def believes_headers_of_others(patch: Patch) -> None:
    def names(self: Header, facts: Any, salt: bytes, key: bytes, size: int) -> bool:
        return (self.salt, self.key, self.size) == (salt, key, size)

    patch.setattr(Header, "names", names)


@breaks(0)
def answers_lookups_again_at_their_deadline(patch: Patch) -> None:
    overdue, answer = Tiering._overdue, Sessions.answer
    late = set()

    def noted(self: Any, tier_lookup: Any, now: float) -> Any:
        late.add(tier_lookup)
        return overdue(self, tier_lookup, now)

    def again(self: Any, tier_lookup: Any) -> Any:
        return (2 if tier_lookup in late else 1) * answer(self, tier_lookup)

    patch.setattr(Tiering, "_overdue", noted)
    patch.setattr(Sessions, "answer", again)


@breaks(0)
def waits_for_tiers_without_a_deadline(patch: Patch) -> None:
    patch.setattr(Tiering, "_overdue", lambda self, tier_lookup, now: [])


@breaks(45)
def lets_tier_lookups_hold_nothing(patch: Patch) -> None:
    tier_lookup = Tiering.look_up

    def careless(self: Any, *args: Any) -> Any:
        found = tier_lookup(self, *args)
        if found is not None and not found[0].ended:
            self.release(found[0])
        return found

    patch.setattr(Tiering, "look_up", careless)


@breaks(2)
def keeps_what_tier_lookups_held(patch: Patch) -> None:
    patch.setattr(Lookups, "release", lambda self, tier_lookup: tier_lookup.held.clear())


@breaks(118)
def gives_room_back_at_the_deadline(patch: Patch) -> None:
    overdue = Tiering._overdue

    def hasty(self: Any, tier_lookup: Any, now: float) -> Any:
        lookups = self._lookups
        if not tier_lookup.ended:
            for name, arrival in list(lookups._arrivals.items()):
                place = name[:2]
                if arrival.tier_lookups == [tier_lookup] and tier_lookup.held.pop(place, None) is not None:
                    lookups._index.release([arrival.chunk])
                    shard = arrival.chunk.shards[arrival.rank]
                    lookups.arriving_bytes -= shard.size
                    lookups._index.discard(arrival.chunk, arrival.rank)
                    del lookups._arrivals[name]
        return overdue(self, tier_lookup, now)

    patch.setattr(Tiering, "_overdue", hasty)


@breaks(585)
def takes_in_what_was_forgotten_on_its_way(patch: Patch) -> None:
    arrived = Lookups.arrived

    def welcoming(self: Any, token: Any, outcome: Any) -> Any:
        for arrival in token.arrivals:
            if arrival.chunk.state is State.PENDING_REMOVAL:
                arrival.chunk.state = State.FILLING
        return arrived(self, token, outcome)

    patch.setattr(Lookups, "arrived", welcoming)


@breaks(1551)
def loads_what_is_being_forgotten(patch: Patch) -> None:
    patch.setattr(Forgettings, "is_under_way", lambda self, namespace, salt: False)


@breaks(59)
def forgets_in_the_nearest_tier_alone(patch: Patch) -> None:
    begin = Forgettings.begin

    def lazy(self: Any, *args: Any) -> Any:
        tiers, self._tiers = self._tiers, self._tiers[:1]
        tier_tasks = begin(self, *args)
        self._tiers = tiers
        return tier_tasks

    patch.setattr(Forgettings, "begin", lazy)


@breaks(12)
def saves_what_nobody_holds(patch: Patch) -> None:
    dispatch, saved = Saves.dispatch, Saves.saved

    def loose(self: Any, tier: Any) -> Any:
        saves = dispatch(self, tier)
        for save in saves:
            self._index.release([queued.chunk for queued in save.token.batch])
        return saves

    def end(self: Any, token: Any, outcome: Any) -> None:
        token.batch = [queued for queued in token.batch if not queued.chunk.gone]
        self._index.hold([queued.chunk for queued in token.batch])
        saved(self, token, tier_worker.Saved([True] * len(token.batch)))

    patch.setattr(Saves, "dispatch", loose)
    patch.setattr(Saves, "saved", end)


@breaks(37)
def counts_what_leaves_memory_for_ever(patch: Patch) -> None:
    part_demoted = Saves._part_demoted

    def miscounted(self: Any, demotion: Any) -> None:
        before = [account.leaving for account in self._index.accounts.all()]
        part_demoted(self, demotion)
        for account, leaving in zip(self._index.accounts.all(), before, strict=True):
            account.mark_leaving(leaving - account.leaving)

    patch.setattr(Saves, "_part_demoted", miscounted)


@breaks(7)
def takes_a_tenants_last_chunk_above_its_floor(patch: Patch) -> None:
    patch.setattr("kvdepot.eviction.shares._victim_above_floor", lambda share, by, charge_of: share.victim())


@breaks(7)
def forgets_caps(patch: Patch) -> None:
    def uncapped(self: Any, bounds: Any) -> None:
        set_bounds(self, bounds)
        self.cap = self._capacity

    set_bounds = Account.set_bounds
    patch.setattr(Account, "set_bounds", uncapped)


@breaks(19)
def evicts_what_is_leased(patch: Patch) -> None:
    patch.setattr(Leases, "_hold", _holds_nothing)


def _holds_nothing(self: Any, lease: Any, tops: Any, matched: int) -> None:
    size = sum(size for _, size in tops) - lease.held
    self._leased[self._account(lease)] += size
    lease.held += size
    self.bytes += size
    lease.chunks = matched


@breaks(19)
def leases_what_others_were_promised(patch: Patch) -> None:
    patch.setattr(Accounts, "lease_budget", lambda self, account: 1 << 60)
    patch.setattr(Accounts, "above_floors", property(lambda self: 1 << 60))


@breaks(31)
def ends_leases_with_their_client(patch: Patch) -> None:
    leave = Sessions.leave

    def thorough(self: Any, client: Any) -> Any:
        for lease in list(self._leases._all()):
            self._leases.end(lease.tenant, lease.request.name, self._leases.now)
        return leave(self, client)

    patch.setattr(Sessions, "leave", thorough)


@breaks(38)
def serves_what_is_too_old(patch: Patch) -> None:
    patch.setattr(depot, "expire", lambda index, *_: 0)


@breaks(123)
def finds_what_is_being_removed(patch: Patch) -> None:
    match = matching.match

    def careless(namespace: Any, hashes: bytes) -> Any:
        hiding, namespace.hiding = namespace.hiding, []
        try:
            return match(namespace, hashes)
        finally:
            namespace.hiding = hiding

    patch.setattr(matching, "match", careless)


@breaks(78)
def gives_what_was_forgotten_while_it_was_copied(patch: Patch) -> None:
    def credulous(self: Any, chunk: Any, rank: int, got: int) -> bool:
        return bool(chunk.shards[rank].sealed)

    patch.setattr(Transfers, "_is_as_stored", credulous)


@breaks(8)
def says_that_it_has_forgotten_before_it_has(patch: Patch) -> None:
    begin = Removals.begin

    def hasty(self: Any, *args: Any, **kwargs: Any) -> Any:
        removal = begin(self, *args, **kwargs)
        removal.left[:] = removal.left[:1]
        return removal

    patch.setattr(Removals, "begin", hasty)


# -- planted bugs of lookups that wait for stores


@breaks(0)
def waits_for_stores_without_a_deadline(patch: Patch) -> None:
    patch.setattr(WaitingLookups, "overdue", lambda self, now: [])


@breaks(21)
def answers_while_more_is_being_stored(patch: Patch) -> None:
    patch.setattr(WaitingLookups, "may_wait", lambda self, *args: False)


@breaks(28)
def keeps_waiting_for_stores_that_have_failed(patch: Patch) -> None:
    stored = WaitingLookups.stored

    def only_good(self: Any, parts: Any) -> Any:
        return stored(self, [part for part in parts if part.sealed])

    patch.setattr(WaitingLookups, "stored", only_good)


@breaks(18)
def keeps_what_a_lookup_held_while_it_waited(patch: Patch) -> None:
    def hold(self: Any, pending: Any, chunks: Any) -> None:
        self._index.hold(chunks)
        pending.held = list(chunks)

    patch.setattr(Sessions, "_hold_prefix", hold)


@breaks(0)
def answers_twice_after_a_store(patch: Patch) -> None:
    go_on = Sessions._go_on
    patch.setattr(Sessions, "_go_on", lambda self, *args: 2 * go_on(self, *args))


@breaks(6)
def answers_the_dead_when_their_store_has_ended(patch: Patch) -> None:
    patch.setattr(Sessions, "leave", _leave_waiting(Sessions.leave))
    patch.setattr(Sessions, "_forgo", lambda self, pending: self._reply_or_wait(pending, [], [], 0.0))


def _leave_waiting(leave: Any) -> Any:
    def left(self: Any, client: Any) -> Any:
        client.pending = {request: each for request, each in client.pending.items() if each.tier_lookup}
        return leave(self, client)

    return left


# -- planted bugs of KV cache groups


@breaks(0)
def looks_for_the_parts_of_all_groups_but_one(patch: Patch) -> None:
    match = matching.match

    def careless(namespace: Any, hashes: bytes) -> Any:
        groups = namespace.groups
        if groups[-1].reach and len(groups) > 1:
            namespace.groups = groups[:-1]
        try:
            return match(namespace, hashes)
        finally:
            namespace.groups = groups

    patch.setattr(matching, "match", careless)


@breaks(16)
def serves_the_state_of_another_boundary(patch: Patch) -> None:
    find = matching.find

    def stale(namespace: Any, rank: int, hashes: bytes) -> Any:
        found = find(namespace, rank, hashes)
        if namespace.reach == 1 and found[0] is not None:
            earlier = next(iter(namespace.chunks.values()))
            if earlier.sealed == namespace.world_size:
                return [earlier, *found[1:]]
        return found

    patch.setattr(matching, "find", stale)


@breaks(5)
def takes_windows_for_one_chunk_shorter(patch: Patch) -> None:
    match = matching.match

    def short(namespace: Any, hashes: bytes) -> Any:
        windows = [group for group in namespace.groups if group.reach > 1]
        for group in windows:
            group.reach -= 1
        try:
            return match(namespace, hashes)
        finally:
            for group in windows:
                group.reach += 1

    patch.setattr(matching, "match", short)


@breaks(0)
def pins_the_unbounded_groups_alone(patch: Patch) -> None:
    match = matching.match

    def loose(*args: Any) -> Any:
        pin = match(*args)
        pin.chunks = [chunk for chunk in pin.chunks if not chunk.namespace.reach]
        return pin

    patch.setattr(matching, "match", loose)


@breaks(6)
def pins_parts_that_no_window_reaches(patch: Patch) -> None:
    match = matching.match

    def greedy(namespace: Any, hashes: bytes) -> Any:
        pin = match(namespace, hashes)
        held = {(chunk.namespace.group, chunk.key) for chunk in pin.chunks}
        for group in namespace.groups if pin.matched else ():
            keys = [hashes[32 * i : 32 * i + 32] for i in range(pin.matched) if group.reach]
            pin.chunks += [group.chunks[k] for k in keys if k in group.chunks and (group.group, k) not in held]
        return pin

    patch.setattr(matching, "match", greedy)


@breaks(0)
def tells_no_failed_requests(patch: Patch) -> None:
    patch.setattr(WorkerClient, "take_failed_requests", lambda self: set())


@breaks(0)
def stores_all_groups_as_the_first(patch: Patch) -> None:
    namespace = Registrations.namespace
    patch.setattr(Registrations, "namespace", lambda self, *args: namespace(self, *args).groups[0])


@breaks(76)
def takes_groups_for_models_after_a_restart(patch: Patch) -> None:
    patch.setattr(recovery, "join_groups", lambda groups: None)


@breaks(112)
def restores_windows_as_unbounded(patch: Patch) -> None:
    def joined(groups: list[Any]) -> None:
        for group in groups:
            group.reach = 0
        join_groups(groups)

    patch.setattr(recovery, "join_groups", joined)


@breaks(0)
def loads_no_bounded_parts_from_tiers(patch: Patch) -> None:
    patch.setattr("kvdepot.core.tiering.lookup.needed_parts", lambda reach, end: range(0))


@breaks(230)
def loads_windows_of_tiers_one_chunk_shorter(patch: Patch) -> None:
    patch.setattr("kvdepot.core.tiering.lookup.needed_parts", lambda reach, end: range(max(0, end - reach + 1), end))


@pytest.mark.faults
@pytest.mark.parametrize("bug", BREAKS)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, first_seed = BREAKS[bug]
    plant(monkeypatch)
    with pytest.raises(Broken) as broken:
        for seed in range(first_seed, first_seed + 1000):
            simulate(seed)
    cause = broken.value.__cause__
    assert isinstance(cause, AssertionError), f"it was planted badly: {cause!r}"
