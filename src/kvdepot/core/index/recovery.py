"""Rebuilds the index from the records of an earlier server. Called once before a server serves, and by cli/check_arena.

Invariant: nothing is restored that could be served wrong. A record must be valid by itself (extents inside the part of
the arena that still exists, a key, a rank whose layout is known) and with the others (one record per shard, no byte in
two shards). Each invalid record is dropped and counted. The chunks behind a dropped one are no prefix any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdepot.core.index.chunk import TRANSITIONS, Chunk, Event, Namespace, Shard, State
from kvdepot.core.index.index import Index
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.records import NamespaceRecord, ShardRecord
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.tiers.format import SALT_BYTES

__all__ = ["Restored", "restore"]

_MOST = 1 << 62
"""Limit of restored serials and numbers, so that those counted on from them still fit a record."""


@dataclass
class Restored:
    """What was restored, and why other records were dropped."""

    shards: int = 0
    chunks: int = 0
    dropped: list[str] = field(default_factory=list)
    """One line per dropped record."""
    damaged: list[int] = field(default_factory=list)
    """Slots of the table that do not belong to a complete record."""


def restore(index: Index, data: bytes | bytearray | None = None, limit: int | None = None) -> Restored:
    """Fill an empty index from its records.

    data: the table's bytes, if the caller has read them already. limit: bytes at or behind this offset of the arena
    are lost.
    """
    contents = index.records.read(data)
    restored = Restored(damaged=contents.damaged)
    shards: list[tuple[int, ShardRecord]] = []
    namespaces: dict[int, Namespace] = {}
    for slot, record in contents.records:
        if isinstance(record, ShardRecord):
            shards.append((slot, record))
        else:
            _add_namespace(index, namespaces, slot, record, restored)
    shards = _plausible(index, shards, namespaces, index.allocator.end if limit is None else limit, restored)
    shards.sort(key=_serial)  # in the order of their stores: neighbours in a chain are then neighbours in memory
    parents: dict[int, dict[bytes, bytes]] = {number: {} for number in namespaces}  # keys, by key
    for slot, record in shards:
        _add_shard(namespaces[record.namespace], slot, record, parents[record.namespace])
    for number, namespace in namespaces.items():
        _link(namespace, parents[number])
    for namespace in namespaces.values():
        if not namespace.chunks:
            index.records.erase(namespace.slot)
    serial = shards[-1][1].serial if shards else 0
    index.adopt(sorted((n for n in namespaces.values() if n.chunks), key=lambda namespace: namespace.number), serial)
    restored.shards = len(shards)
    restored.chunks = index.chunks
    return restored


def _serial(item: tuple[int, ShardRecord]) -> int:
    return item[1].serial


def _add_namespace(
    index: Index, namespaces: dict[int, Namespace], slot: int, record: NamespaceRecord, restored: Restored
) -> None:
    if not 1 <= record.world_size <= 1 << 16 or record.blocks_in_chunk < 1 or not 0 <= record.number < _MOST:
        restored.dropped.append(f"namespace {record.number}: a number is out of its range")
        index.records.erase(slot)
        return
    known = namespaces.get(record.number)
    if known is not None:  # the server died between writing the new record and erasing the old one
        index.records.erase(slot if len(record.layouts) <= len(known.layouts) else known.slot)
        if len(record.layouts) <= len(known.layouts):
            return
    namespace = Namespace(record.number, record.tenant, record.model, record.world_size, record.blocks_in_chunk)
    namespace.layouts = dict(record.layouts)
    namespace.slot, namespace.recorded = slot, len(namespace.layouts)
    namespaces[record.number] = namespace


def _plausible(
    index: Index,
    shards: list[tuple[int, ShardRecord]],
    namespaces: dict[int, Namespace],
    limit: int,
    restored: Restored,
) -> list[tuple[int, ShardRecord]]:
    """The valid records, with their extents occupied in the allocator; erases the others."""
    start, end = index.allocator.start, min(index.allocator.end, limit)
    wrong: dict[int, str] = {}  # slot -> why
    first: dict[tuple[int, int, bytes], tuple[int, ShardRecord]] = {}
    places: list[tuple[int, int, int]] = []  # offset, bytes, slot
    for item in shards:
        slot, record = item
        why = _fault(record, namespaces.get(record.namespace), start, end)
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
    index.allocator.occupy(places)
    return shards


def _fault(record: ShardRecord, owner: Namespace | None, start: int, end: int) -> str:
    """Why a record is invalid by itself; empty if it is valid. Extents must be in `[start, end)`."""
    if owner is None:
        return "its namespace is not recorded"
    if len(record.key) != HASH_BYTES or record.rank not in owner.layouts or not 0 <= record.rank < owner.world_size:
        return "it has no valid key, or an unknown rank"
    if (
        record.position < 0
        or record.size < 1
        or not 0 <= record.checksum < 1 << 64
        or not 0 <= record.serial < _MOST
        or not 0 <= record.born < 1 << 64
        or (record.salt and len(record.salt) != SALT_BYTES)
    ):
        return "a number is out of its range"
    total = 0
    for offset, length in record.extents:
        if offset < start or (offset - start) % PAGE or length < PAGE or length % PAGE:
            return "its extents are invalid"
        if offset + length > end:
            return "its bytes were cut off"
        total += length
    if total != Allocator.rounded(record.size):
        return "its extents do not have its size"
    return ""


def _add_shard(namespace: Namespace, slot: int, record: ShardRecord, parents: dict[bytes, bytes]) -> None:
    shard = Shard(record.extents, record.size, State.SEALED, record.checksum, slot=slot)
    taken = Allocator.rounded(record.size)
    chunk = namespace.chunks.get(record.key)
    if chunk is None:
        parents[record.key] = record.parent
        namespace.chunks[record.key] = Chunk(
            key=record.key, salt=record.salt, born=record.born, namespace=namespace, used=record.serial,
            shards={record.rank: shard}, sealed=1, position=record.position, bytes=taken,
        )  # fmt: skip
    else:
        chunk.born = min(chunk.born, record.born)
        chunk.used = record.serial
        chunk.shards[record.rank] = shard
        chunk.sealed += 1
        chunk.bytes += taken
    namespace.sizes.setdefault(record.rank, record.size)
    namespace.bytes += taken


def _link(namespace: Namespace, parents: dict[bytes, bytes]) -> None:
    """Link each chunk to its parent, if that exists, and chain those that are whole together with all before them."""
    chunks = namespace.chunks
    for chunk in chunks.values():
        before = chunks.get(parents[chunk.key]) if chunk.position > 1 else None
        if before is not None and before.position == chunk.position - 1:
            chunk.parent = before
            before.children += 1
    late = [chunk for chunk in chunks.values() if not _chain(chunk) and chunk.parent is not None]
    for chunk in sorted(late, key=lambda chunk: chunk.position):  # stored before their parents were
        _chain(chunk)


def _chain(chunk: Chunk) -> bool:
    """Derive a chunk's state from its shards and its parent; False if the parent is not chained (yet)."""
    if chunk.state is State.FILLING and chunk.sealed == chunk.namespace.world_size:
        chunk.state = TRANSITIONS[chunk.state][Event.COMPLETE]
    before = chunk.parent
    if chunk.position == 1 or (before is not None and before.state is State.CHAINED):
        if chunk.state is State.WHOLE:
            chunk.state = TRANSITIONS[chunk.state][Event.CHAIN]
        return True
    return False
