"""Recovery of an index from its records: exactly the sealed chunks are restored, with their chains."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.index import Index
from kvdepot.core.index.recovery import Restored, restore
from kvdepot.eviction import Lru
from kvdepot.keys import ChunkChain, derive_root
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.records import SLOT_BYTES, NamespaceRecord, Records, ShardRecord
from tests.conftest import clear
from tests.core.shelf import reserve, sealed

START = 4096 + 64
LAYOUT = b"l" * 32


def make(pages: int = 40, slots: int = 200, memory: memoryview | None = None) -> Index:
    table = memoryview(bytearray(slots * SLOT_BYTES)) if memory is None else memory
    return Index(Allocator(START, START + pages * PAGE), Lru, Records(table))


def memory_of(index: Index) -> bytes:
    return bytes(index.records._memory)


def restarted(
    index: Index, pages: int = 40, data: bytes | None = None, limit: int | None = None
) -> tuple[Index, Restored]:
    after = make(pages, memory=memoryview(bytearray(memory_of(index) if data is None else data)))
    restored = restore(after, limit=limit)
    after.validate()
    return after, restored


def chain(name: str, chunks: int) -> list[bytes]:
    made = ChunkChain(1, derive_root(("name", name)))
    made.extend(range(chunks))
    return [made.parent(0), *(made.parent(i + 1) for i in range(chunks))]


def put(index: Index, namespace: Namespace, keys: list[bytes], rank: int = 0, size: int = PAGE, first: int = 0) -> None:
    """Store chunks `first ..` of a chain."""
    for i in range(first, len(keys) - 1):
        if matching.is_missing(namespace, rank, keys[i + 1]):
            chunk = reserve(index, namespace, rank, keys[i + 1], keys[i], i + 1, size)
            assert chunk is not None
            index.seal(chunk, rank, checksum=i + 7)


def matched(index: Index, keys: list[bytes], model: str = "m", world_size: int = 1) -> int:
    return max(
        (
            matching.match(namespace, b"".join(keys[1:])).matched
            for namespace in matching.for_lookup(index.namespaces, ("", model, world_size))
        ),
        default=0,
    )


def facts(index: Index) -> Any:
    """Everything by which users could distinguish two indices."""
    return sorted(
        (
            namespace.number,
            namespace.tenant,
            namespace.model,
            namespace.world_size,
            namespace.blocks_in_chunk,
            namespace.layouts,
            sorted(
                (key, chunk.position, chunk.depth, chunk.children, rank, shard.extents, shard.size, shard.checksum)
                for key, chunk in namespace.chunks.items()
                for rank, shard in chunk.shards.items()
                if shard.sealed
            ),
        )
        for namespace in index.namespaces.all()
        if any(s.sealed for c in namespace.chunks.values() for s in c.shards.values())
    )


def test_chains_ranks_namespaces_and_loose_chunks_come_back() -> None:
    index = make()
    one = index.namespaces.find("m", 1, 0, LAYOUT, 4)
    two = index.namespaces.find("n", 2, 0, LAYOUT, 2)
    assert index.namespaces.find("n", 2, 1, b"k" * 32, 2) is two
    long, other = chain("a", 6), chain("b", 3)
    put(index, one, long)
    put(index, two, other)
    put(index, two, other[:3], rank=1, size=2 * PAGE)
    loose = reserve(index, one, 0, b"x" * 32, b"", 0, PAGE)
    assert loose is not None
    index.seal(loose, 0)
    after, restored = restarted(index)
    assert facts(after) == facts(index)
    assert (restored.shards, restored.chunks, restored.dropped, restored.damaged) == (12, 10, [], [])
    assert after.allocator.free_bytes == index.allocator.free_bytes
    assert matched(after, long) == 6
    assert matched(after, other, "n", 2) == 2
    assert after.records.used == index.records.used
    # The rank that was missing is stored by the engine that comes back.
    again = after.namespaces.find("n", 2, 1, b"k" * 32, 2)
    put(after, again, other, rank=1, size=2 * PAGE)
    assert matched(after, other, "n", 2) == 3
    after.validate()


def test_what_was_reserved_is_gone_and_its_space_is_free() -> None:
    index = make()
    namespace = index.namespaces.find("m", 1, 0, LAYOUT, 4)
    keys = chain("a", 3)
    put(index, namespace, keys[:3])
    assert reserve(index, namespace, 0, keys[3], keys[2], 3, 5 * PAGE) is not None
    after, _ = restarted(index)
    assert matched(after, keys) == 2
    assert after.allocator.free_bytes == after.allocator.capacity - 2 * PAGE
    assert (after.reserved, after.held) == (0, 0)


def test_a_removed_chunk_does_not_come_back() -> None:
    index = make(pages=4)
    namespace = index.namespaces.find("m", 1, 0, LAYOUT, 4)
    old, new = chain("a", 3), chain("b", 2)
    put(index, namespace, old)
    put(index, namespace, new)  # evicts the tail of the old one
    after, _ = restarted(index, pages=4)
    assert (matched(after, old), matched(after, new)) == (2, 2)
    assert clear(index) == 4
    after, restored = restarted(index, pages=4)
    assert (after.chunks, after.records.used, restored.damaged) == (0, 0, [])
    assert after.namespaces.all() == []


def test_a_layout_that_changed_meanwhile_does_not_see_the_old_chunks() -> None:
    index = make()
    keys = chain("a", 2)
    put(index, index.namespaces.find("m", 1, 0, LAYOUT, 4), keys)
    after, _ = restarted(index)
    other = after.namespaces.find("m", 1, 0, b"other layout".ljust(32), 4)
    assert other.chunks == {}
    assert other.number != 1
    same = after.namespaces.find("m", 1, 0, LAYOUT, 4)
    assert len(same.chunks) == 2


def test_the_least_recently_stored_goes_first_after_a_restart() -> None:
    index = make(pages=3)
    namespace = index.namespaces.find("m", 1, 0, LAYOUT, 4)
    names = ["a", "b", "c"]
    for name in names:
        put(index, namespace, chain(name, 1))
    after, _ = restarted(index, pages=3)
    (namespace,) = after.namespaces.all()
    put(after, namespace, chain("d", 1))
    assert [matched(after, chain(name, 1)) for name in [*names, "d"]] == [0, 1, 1, 1]


def test_what_was_cut_off_is_dropped_alone_with_what_hangs_on_it_no_prefix() -> None:
    index = make(pages=8)
    namespace = index.namespaces.find("m", 1, 0, LAYOUT, 4)
    keys = chain("a", 8)
    put(index, namespace, keys)
    places = {key: namespace.chunks[key].shards[0].extents[0][0] for key in keys[1:]}
    limit = sorted(places.values())[5]
    after, restored = restarted(index, pages=8, limit=limit)
    lost = [i for i, key in enumerate(keys[1:]) if places[key] >= limit]
    assert len(lost) == len(restored.dropped) == 3
    assert all("cut off" in line for line in restored.dropped)
    assert matched(after, keys) == min(lost)
    (namespace,) = after.namespaces.all()
    after.namespaces.find("m", 1, 0, LAYOUT, 4)
    for i in lost:
        put(after, namespace, keys[: i + 2], first=i)
    assert matched(after, keys) == 8, "what is stored again joins what was left"


def record(**changes: Any) -> ShardRecord:
    fields = {
        "namespace": 1, "rank": 0, "key": b"k" * 32, "parent": b"", "position": 1, "extents": ((START, PAGE),),
        "size": PAGE, "serial": 1, "checksum": 0,
    } | changes  # fmt: skip
    return ShardRecord(**fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": 2}, {"rank": 1}, {"rank": -1}, {"key": b"short"}, {"position": -1}, {"size": 0},
        {"size": PAGE + 1}, {"extents": ()}, {"extents": ((START + 1, PAGE),)}, {"extents": ((START - PAGE, PAGE),)},
        {"extents": ((START + 40 * PAGE, PAGE),)}, {"extents": ((START, 0),)}, {"extents": ((START, -PAGE),)},
        {"extents": ((START, PAGE), (START, PAGE)), "size": 2 * PAGE}, {"serial": -1},
        {"extents": ((START + 39 * PAGE, 2 * PAGE),), "size": 2 * PAGE}, {"checksum": -1},
    ],
)  # fmt: skip
def test_a_record_that_makes_no_sense_is_dropped_with_its_reason_and_erased(changes: dict[str, Any]) -> None:
    memory = memoryview(bytearray(16 * SLOT_BYTES))
    records = Records(memory)
    records.write(NamespaceRecord(1, "", "m", 1, 4, {0: LAYOUT}))
    records.write(record(**changes))
    records.write(record(key=b"g" * 32, extents=((START + 5 * PAGE, PAGE),)))
    after = make(memory=memory)
    restored = restore(after)
    after.validate()
    assert (restored.shards, len(restored.dropped), after.records.used) == (1, 1, 2)


def test_two_shards_that_claim_the_same_bytes_are_both_dropped() -> None:
    memory = memoryview(bytearray(16 * SLOT_BYTES))
    records = Records(memory)
    records.write(NamespaceRecord(1, "", "m", 1, 4, {0: LAYOUT}))
    records.write(record(extents=((START, 3 * PAGE),), size=3 * PAGE))
    records.write(record(key=b"g" * 32, extents=((START + 2 * PAGE, PAGE),)))
    records.write(record(key=b"h" * 32, extents=((START + 3 * PAGE, PAGE),)))
    after = make(memory=memory)
    restored = restore(after)
    after.validate()
    assert (restored.shards, len(restored.dropped)) == (1, 2)
    assert all("same bytes" in line for line in restored.dropped)


def test_of_a_shard_recorded_twice_the_later_one_counts() -> None:
    memory = memoryview(bytearray(16 * SLOT_BYTES))
    records = Records(memory)
    records.write(NamespaceRecord(1, "", "m", 1, 4, {0: LAYOUT}))
    records.write(record(serial=2, checksum=22))
    records.write(record(serial=1, checksum=11, extents=((START + PAGE, PAGE),)))
    after = make(memory=memory)
    assert restore(after).shards == 1
    (namespace,) = after.namespaces.all()
    assert namespace.chunks[b"k" * 32].shards[0].checksum == 22


def test_a_chunk_without_a_slot_serves_but_does_not_survive() -> None:
    index = make(slots=3)
    namespace = index.namespaces.find("m", 1, 0, LAYOUT, 4)
    keys = chain("a", 5)
    put(index, namespace, keys)
    assert matched(index, keys) == 5
    assert index.unrecorded == 3
    index.validate()
    after, _ = restarted(index)
    assert matched(after, keys) == 2
    clear(index)
    assert index.records.used == 0


# -- a chunk whose bytes are not what was stored


def test_a_corrupt_chunk_is_no_hit_nor_are_those_behind_it_until_it_is_stored_again() -> None:
    index = make()
    namespace = index.namespaces.find("m", 1, 0, LAYOUT, 4)
    keys, branch = chain("a", 5), chain("a", 5)
    put(index, namespace, keys)
    chunk = namespace.chunks[keys[3]]
    place = chunk.shards[0].extents
    index.mark_corrupt(chunk, 0)
    index.validate()
    assert matched(index, branch) == 2
    assert sealed(index, namespace, 0, keys[3]) is None
    after, _ = restarted(index)
    assert matched(after, keys) == 2
    index.hold([chunk])
    assert not matching.is_missing(namespace, 0, keys[3]), "somebody still reads its bytes"
    index.release([chunk])
    put(index, namespace, keys)
    index.validate()
    assert chunk.shards[0].extents == place
    assert matched(index, keys) == 5
    index.mark_corrupt(chunk, 0)
    again = reserve(index, namespace, 0, keys[3], keys[2], 3, PAGE)
    assert again is chunk
    index.discard(chunk, 0)
    index.validate()
    assert matched(index, keys) == 2
    clear(index)
    index.validate()
    assert index.allocator.free_bytes == index.allocator.capacity


# -- anything, in any order


@pytest.mark.parametrize("seed", range(40))
def test_a_restart_at_any_time_finds_what_was_sealed_then(seed: int) -> None:
    """The oracle tracks whether each shard is sealed; evictions are read from the index."""
    rng = random.Random(seed)
    pages = rng.choice([8, 20, 60])
    index = make(pages, slots=rng.choice([30, 400]))
    chains = [chain(name, 6) for name in "abc"]
    reserved: list[tuple[Chunk, int]] = []
    for _ in range(rng.randrange(20, 200)):
        keys = rng.choice(chains)
        model, world = rng.choice([("m", 1), ("n", 2)])
        rank = rng.randrange(world)
        namespace = index.namespaces.find(model, world, rank, LAYOUT + bytes([rank]), 4)
        namespace.live = 1  # an engine is registered
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                i = rng.randrange(6)
                size = rng.choice([PAGE, PAGE, 3 * PAGE - 100])
                if matching.is_missing(namespace, rank, keys[i + 1]):
                    chunk = reserve(index, namespace, rank, keys[i + 1], rng.choice([keys[i], b""]), i + 1, size)
                    if chunk is not None:
                        reserved.append((chunk, rank))
            case 4 | 5 if reserved:
                chunk, rank = reserved.pop(rng.randrange(len(reserved)))
                if rng.random() < 0.7:
                    index.seal(chunk, rank, rng.randrange(2**64))
                else:
                    index.discard(chunk, rank)
            case 6 if rng.random() < 0.2:
                clear(index, rng.choice(["", "m"]))
            case 7:
                sealed = [
                    (c, r) for s in index.namespaces.all() for c in s.chunks.values()
                    for r, shard in c.shards.items() if shard.sealed
                ]  # fmt: skip
                if sealed and rng.random() < 0.3:
                    index.mark_corrupt(*rng.choice(sealed))
        index.validate()
    after, restored = restarted(index, pages)
    assert restored.dropped == [] and restored.damaged == []
    before = {
        (namespace.model, key, rank): (shard.extents, shard.size, shard.checksum)
        for namespace in index.namespaces.all() for key, chunk in namespace.chunks.items()
        for rank, shard in chunk.shards.items() if shard.slot is not None
    }  # fmt: skip
    found = {
        (namespace.model, key, rank): (shard.extents, shard.size, shard.checksum)
        for namespace in after.namespaces.all()
        for key, chunk in namespace.chunks.items()
        for rank, shard in chunk.shards.items()
    }
    assert found == before
    assert index.unrecorded or len(found) == sum(
        shard.sealed for s in index.namespaces.all() for c in s.chunks.values() for shard in c.shards.values()
    )
    # Any damage to the table only loses records.
    data = bytearray(memory_of(index))
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    damaged, _ = restarted(index, pages, bytes(data))
    left = {
        (namespace.model, key, rank): (shard.extents, shard.size, shard.checksum)
        for namespace in damaged.namespaces.all() for key, chunk in namespace.chunks.items()
        for rank, shard in chunk.shards.items()
    }  # fmt: skip
    assert left.items() <= before.items()
    # And the new one works.
    clear(after)
    fresh = chain("fresh", 3)
    put(after, after.namespaces.find("m", 1, 0, LAYOUT + b"\0", 4), fresh)
    assert matched(after, fresh) == 3
    after.validate()
