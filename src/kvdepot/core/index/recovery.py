"""Rebuilds the index from the records of an earlier server. Called once before a server serves, and by cli/check.py.

Invariant: nothing is restored that could be served wrong. A record must be valid by itself: extents inside the part of
the arena that still exists, a key, and a rank whose layout is known. It must also be valid with the others: one record
per shard, no byte in two shards, and a record of its writer. Each invalid record is dropped and counted. The chunks
behind a dropped one are no prefix any more. If the records of a model's namespaces contradict each other, everything of
that model is dropped.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvdepot.core.index import states
from kvdepot.core.index.accounts import queue
from kvdepot.core.index.chains import link
from kvdepot.core.index.chunk import Chunk, Namespace, Shard, join_groups
from kvdepot.core.index.index import Index
from kvdepot.memory.allocator import PAGE, Allocator, Extents
from kvdepot.memory.records import Contents, NamespaceRecord, ShardRecord, WriterRecord
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.wire import MAX_CHUNKS, MAX_GROUPS
from kvdepot.tiers.format import SALT_BYTES

_MOST = 1 << 62
"""Limit of restored serials and numbers. Later numbers, which are counted on from these, still fit a record."""


class _Recorded(NamedTuple):
    """A namespace, and the record that it was read from."""

    namespace: Namespace
    record: NamespaceRecord

    @property
    def identity(self) -> tuple[object, ...]:
        """The facts that the groups of one model have in common."""
        record = self.record
        return record.tenant, record.model, record.world_size, record.chunk_tokens, tuple(map(tuple, record.groups))


@dataclass
class Restored:
    """The result of `restore`, with the reasons why records were dropped."""

    shards: int = 0
    chunks: int = 0
    dropped: list[str] = field(default_factory=list)  # one line per dropped record
    damaged: list[int] = field(default_factory=list)  # slots of the table that do not belong to a complete record
    in_use: list[InUse] = field(default_factory=list)  # the memory that clients of the earlier server still use


class InUse(NamedTuple):
    """Memory that a client of an earlier server may still read or write. chunk: the chunk with these bytes, which is
    held meanwhile. None: no chunk has them, for example because a store had not ended; `shard` keeps the memory."""

    extents: Extents
    chunk: Chunk | None
    shard: Shard | None = None

    def end(self, index: Index) -> None:
        if self.chunk is not None:
            index.release([self.chunk])
        if self.shard is not None:
            index.give_back(self.shard)


def restore(
    index: Index,
    data: bytes | bytearray | None = None,
    limit: int | None = None,
    wall: int | None = None,
    used: Sequence[tuple[int, int]] = (),
) -> Restored:
    """Fill an empty index from its records.

    data: the table's bytes, if the caller has read them already. limit: bytes at or behind this offset of the arena are
    lost. wall: seconds since 1970 now; chunks with a later time get this time. None: any time is accepted. used:
    offsets and sizes of memory that clients of the earlier server still use.
    """
    contents = index.records.read(data)
    restored = Restored(damaged=contents.damaged)
    shards: list[tuple[int, ShardRecord]] = []
    namespaces: dict[int, _Recorded] = {}
    writers = _read_writers(index, contents)
    for slot, record in contents.records:
        if isinstance(record, ShardRecord) and record.writer and record.writer not in writers:
            restored.dropped.append(f"shard {record.key.hex()[:16]} of rank {record.rank}: its writer is not recorded")
            index.records.erase(slot)
        elif isinstance(record, ShardRecord):
            shards.append((slot, record))
        elif isinstance(record, NamespaceRecord):
            _add_namespace(index, namespaces, slot, record, restored)
    complete = _join(index, namespaces, restored)
    shards, places = _plausible(index, shards, namespaces, index.allocator.end if limit is None else limit, restored)
    gaps, used_slots = _match(index.allocator, used, places)
    index.allocator.occupy(sorted([*places, *gaps]) if gaps else places)
    # In the order of their stores, so that neighbours in a chain are neighbours in memory.
    shards.sort(key=lambda item: item[1].serial)
    parents: dict[int, dict[bytes, bytes]] = {number: {} for number in namespaces}  # keys, by key
    for slot, record in shards:
        shard = _add_shard(index, namespaces[record.namespace].namespace, slot, record, parents[record.namespace])
        shard.writer = writers[record.writer][1] if record.writer else ""
    index.namespaces.writers.adopt(writers, Counter(record.writer for _, record in shards))
    for namespace in complete:
        _link(index, namespace, parents.get(namespace.number, {}))
    for namespace in complete:
        if not namespace.chunks:
            index.records.erase(namespace.slot)
            namespace.slot, namespace.recorded = None, 0
    there = [each for each in complete if any(group.chunks for group in each.groups)]
    serial = shards[-1][1].serial if shards else 0
    _adopt(index, sorted(there, key=lambda namespace: namespace.number), serial)
    if wall is not None:
        _date(index, wall)
    for slot, record in shards if used_slots else ():
        if slot in used_slots:
            chunk = namespaces[record.namespace].namespace.chunks[record.key]
            index.hold([chunk])
            restored.in_use.append(InUse(record.extents, chunk))
    for start, size, _ in gaps:
        shard = Shard(((start, size),), size)
        index.accounts.lend(shard)
        restored.in_use.append(InUse(shard.extents, None, shard))
    restored.shards = len(shards)
    restored.chunks = index.chunks
    return restored


def _date(index: Index, wall: int) -> None:
    """Give the time `wall` to chunks with a later time (the clock was ahead), and record it."""
    for chunk in [chunk for each in index.namespaces.all() for chunk in each.chunks.values() if chunk.born > wall]:
        chunk.born = wall
        index.accounts.ages.record(chunk)
        for rank in chunk.shards:
            index.serial += 1
            index.namespaces.record(chunk, rank, index.serial)


def _adopt(index: Index, namespaces: list[Namespace], serial: int) -> None:
    """Hand namespaces to an empty index, with their chunks sealed and linked, and their extents occupied.

    serial: the highest serial of their shards.
    """
    index.namespaces.adopt(namespaces)
    index.serial = index.uses = serial
    found = [chunk for namespace in namespaces for chunk in namespace.chunks.values()]
    index.chunks = len(found)
    for chunk in found:
        chunk.account.charge(chunk.bytes)
        chunk.account.chunks += 1
        index.accounts.ages.record(chunk)
    queue(found)


def _read_writers(index: Index, contents: Contents) -> dict[int, tuple[int, str]]:
    """The slots and names of the writers that are recorded once, by number. Records of other writers are erased, and
    their shards are dropped."""
    found = [(slot, record) for slot, record in contents.records if isinstance(record, WriterRecord)]
    uses = Counter[int | str](fact for _, record in found for fact in (record.number, record.name))
    writers: dict[int, tuple[int, str]] = {}
    for slot, record in found:
        if uses[record.number] == uses[record.name] == 1 and record.name and record.number > 0:
            writers[record.number] = slot, record.name
        else:
            index.records.erase(slot)
    return writers


def _add_namespace(
    index: Index, namespaces: dict[int, _Recorded], slot: int, record: NamespaceRecord, restored: Restored
) -> None:
    is_sound = (
        1 <= record.world_size <= 1 << 16
        and 0 <= record.number < _MOST
        and 0 <= record.first < _MOST
        and 0 <= record.chunk_tokens < _MOST
        and all(0 <= reach <= MAX_CHUNKS and blocks >= 1 for reach, blocks in record.groups)
        and 0 <= record.group < len(record.groups) <= MAX_GROUPS
        and record.blocks_in_chunk == record.groups[record.group][1]
        and (record.group > 0 or record.first == record.number)
    )
    if not is_sound:
        restored.dropped.append(f"namespace {record.number}: a number is out of its range")
        index.records.erase(slot)
        return
    known = namespaces.get(record.number)
    if known is not None:  # the server died between writing the new record and erasing the old one
        known.namespace.is_quarantined |= record.is_quarantined
        index.records.erase(slot if len(record.layouts) <= len(known.namespace.layouts) else known.namespace.slot)
        if len(record.layouts) <= len(known.namespace.layouts):
            return
    namespace = Namespace(
        record.number, record.tenant, record.model, record.world_size, record.blocks_in_chunk, record.chunk_tokens,
        record.groups[record.group][0],
    )  # fmt: skip
    namespace.layouts, namespace.is_quarantined = dict(record.layouts), record.is_quarantined
    namespace.slot, namespace.recorded = slot, len(namespace.layouts)
    namespaces[record.number] = _Recorded(namespace, record)


def _join(index: Index, recorded: dict[int, _Recorded], restored: Restored) -> list[Namespace]:
    """The namespaces of all models whose records agree, all KV cache groups of each; drops the other models' records.

    A group without a record (nothing of it was stored) gets an empty namespace.
    """
    models: dict[int, list[_Recorded]] = {}  # by the number of the first group's namespace
    for each in recorded.values():
        models.setdefault(each.record.first, []).append(each)
    taken = set(recorded)
    numbers = itertools.count(max((*taken, *models), default=0) + 1)
    complete: list[Namespace] = []
    for first, known in models.items():
        groups = {each.record.group: each.namespace for each in known}
        agrees = len({each.identity for each in known}) == 1 and len(groups) == len(known)
        if not agrees or (0 not in groups and first in taken):
            for each in known:
                restored.dropped.append(f"namespace {each.record.number}: it contradicts another one of its model")
                index.records.erase(each.namespace.slot)
                del recorded[each.record.number]
            continue
        like = known[0].record
        for group, (reach, blocks) in enumerate(like.groups):
            if group not in groups:
                number = next(numbers) if group else first
                groups[group] = Namespace(
                    number, like.tenant, like.model, like.world_size, blocks, like.chunk_tokens, reach
                )
        joined = [groups[group] for group in range(len(like.groups))]
        join_groups(joined)
        is_quarantined = any(each.is_quarantined for each in joined)
        for namespace in joined:
            namespace.is_quarantined = is_quarantined
        complete += joined
    return complete


def _plausible(
    index: Index,
    shards: list[tuple[int, ShardRecord]],
    namespaces: dict[int, _Recorded],
    limit: int,
    restored: Restored,
) -> tuple[list[tuple[int, ShardRecord]], list[tuple[int, int, int]]]:
    """The valid records, and their extents with the slots, ascending; erases the invalid records."""
    start, end = index.allocator.start, min(index.allocator.end, limit)
    is_cut = limit < index.allocator.end
    lost = "its bytes were cut off" if is_cut else "its bytes lie behind the end of the arena, which is smaller now"
    wrong: dict[int, str] = {}  # slot -> why
    first: dict[tuple[int, int, bytes], tuple[int, ShardRecord]] = {}
    places: list[tuple[int, int, int]] = []  # offset, bytes, slot
    for item in shards:
        slot, record = item
        why = _fault(record, namespaces.get(record.namespace), start)
        if not why and any(offset + length > end for offset, length in record.extents):
            why = lost
        if why:
            wrong[slot] = why
            continue
        name = record.namespace, record.rank, record.key
        known = first.setdefault(name, item)
        if known is not item:
            first[name] = item if record.serial > known[1].serial else known
            wrong[slot if first[name] is known else known[0]] = "stored twice"
        for offset, length in record.extents:
            places.append((offset, length, slot))
    places.sort()
    reached, owner = start, -1
    for offset, length, slot in places:
        if slot not in wrong:
            if offset < reached:
                wrong[slot] = wrong[owner] = "two shards claim the same bytes"
            if offset + length > reached:
                reached, owner = offset + length, slot
    if wrong:
        for slot, record in shards:
            if slot in wrong:
                restored.dropped.append(f"shard {record.key.hex()[:16]} of rank {record.rank}: {wrong[slot]}")
                index.records.erase(slot)
        shards = [item for item in shards if item[0] not in wrong]
        places = [place for place in places if place[2] not in wrong]
    return shards, places


def _match(
    allocator: Allocator, used: Sequence[tuple[int, int]], places: Sequence[tuple[int, int, int]]
) -> tuple[list[tuple[int, int, int]], set[int]]:
    """The parts of used memory that no valid record has, in whole pages, and the slots of the records that have other
    parts. places: extents of records with their slots, ascending."""
    gaps, slots, reached = list[tuple[int, int, int]](), set[int](), allocator.start
    for start, size in sorted(used):
        at = max(reached, start - (start - allocator.start) % PAGE)
        reached = end = max(reached, min(allocator.end, start + size + (allocator.start - start - size) % PAGE))
        place = bisect_left(places, (at,))
        place -= place > 0 and sum(places[place - 1][:2]) > at
        while place < len(places) and places[place][0] < end:
            offset, length, slot = places[place]
            slots.add(slot)
            if offset > at:
                gaps.append((at, offset - at, -1))
            at, place = max(at, offset + length), place + 1
        if at < end:
            gaps.append((at, end - at, -1))
    return gaps, slots


def _fault(record: ShardRecord, recorded: _Recorded | None, start: int) -> str:
    """Why a record is invalid by itself; empty if it is valid. start: offset of the first chunk in the arena."""
    if recorded is None:
        return "its namespace is not recorded, or contradicts another"
    owner = recorded.namespace
    if len(record.key) != HASH_BYTES or record.rank not in owner.layouts or not 0 <= record.rank < owner.world_size:
        return "it has no valid key, or an unknown rank"
    if (
        record.position < 0
        or record.size < 1
        or not 0 <= record.checksum < 1 << 64
        or not 0 <= record.serial < _MOST
        or not 0 <= record.born < 1 << 64
        or (record.salt and len(record.salt) != SALT_BYTES)
        or (owner.reach and record.position)
    ):
        return "a number is out of its range"
    total = 0
    for offset, length in record.extents:
        if offset < start or (offset - start) % PAGE or length < PAGE or length % PAGE:
            return "its extents are invalid"
        total += length
    if total != Allocator.rounded(record.size):
        return "its extents do not have its size"
    return ""


def _add_shard(
    index: Index, namespace: Namespace, slot: int, record: ShardRecord, parents: dict[bytes, bytes]
) -> Shard:
    shard = Shard(record.extents, record.size, states.SEALED, record.checksum, slot=slot)
    taken = Allocator.rounded(record.size)
    chunk = namespace.chunks.get(record.key)
    if chunk is None:
        parents[record.key] = record.parent
        namespace.chunks[record.key] = Chunk(
            key=record.key, salt=record.salt, born=record.born, namespace=namespace, used=record.serial,
            account=index.accounts.of(namespace.tenant, record.salt), shards={record.rank: shard}, sealed=1,
            position=record.position, bytes=taken,
        )  # fmt: skip
    else:
        chunk.born = min(chunk.born, record.born)
        chunk.used = record.serial
        chunk.shards[record.rank] = shard
        chunk.sealed += 1
        chunk.bytes += taken
    namespace.sizes.setdefault(record.rank, record.size)
    namespace.bytes += taken
    return shard


def _link(index: Index, namespace: Namespace, parents: dict[bytes, bytes]) -> None:
    """Link each chunk to its parent, if that exists, and chain each whole chunk that has only whole chunks before
    it."""
    for chunk in namespace.chunks.values():
        before, _ = link(namespace, chunk.key, parents[chunk.key], chunk.position, chunk.salt)
        if before is not None:
            chunk.parent = before
            before.children += 1
    for chunk in namespace.chunks.values():
        if chunk.sealed == namespace.world_size:
            chunk.state = states.TRANSITIONS[chunk.state][states.COMPLETE]
            index.chains.join((chunk,))
