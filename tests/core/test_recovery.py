"""Recovery of an index from its records: exactly the sealed chunks are restored, with their chains."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Namespace
from kvdepot.core.index.index import Index
from kvdepot.core.index.recovery import Restored, restore
from kvdepot.core.index.runs import Run
from kvdepot.core.index.writers import MOST_WRITERS
from kvdepot.eviction import Lru
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.records import SLOT_BYTES, NamespaceRecord, Records, ShardRecord, WriterRecord
from tests.conftest import clear
from tests.core.groups import BLOCKS, CHUNK_TOKENS, SHAPES, Rack, Reaches, deepest, fingerprint, register
from tests.core.shelf import keys

START = 4096 + 64
LAYOUT = b"l" * 32
PROMPTS = [keys("a", 6), keys("b", 4), [*keys("a", 2), *keys("c", 4)]]


def make(
    pages: int = 40, slots: int = 400, memory: bytearray | memoryview | None = None, chunk_tokens: int = CHUNK_TOKENS
) -> Index:
    records = Records(memoryview(bytearray(slots * SLOT_BYTES) if memory is None else memory))
    return Index(Allocator(START, START + pages * PAGE), Lru, records, chunk_tokens=chunk_tokens)


def restarted(
    index: Index, data: bytes | None = None, limit: int | None = None, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Index, Restored]:
    pages = index.allocator.capacity // PAGE
    after = make(pages, memory=bytearray(index.records._memory if data is None else data), chunk_tokens=chunk_tokens)
    restored = restore(after, limit=limit)
    after.validate()
    return after, restored


def boundary(index: Index, chain: Sequence[bytes], model: str = "m", world_size: int = 1) -> int:
    found = [
        matching.match(namespace, b"".join(chain)).matched
        for namespace in matching.for_lookup(index.namespaces, ("", model, world_size))
    ]
    return max(found, default=0)


def boundaries(index: Index, world_size: int = 1) -> list[int]:
    return [boundary(index, chain[:end], "m", world_size) for chain in PROMPTS for end in range(len(chain) + 1)]


def facts(index: Index) -> Any:
    """Everything by which users could distinguish two indices."""
    return [
        (
            namespace.number, namespace.tenant, namespace.model, namespace.world_size, namespace.blocks_in_chunk,
            namespace.chunk_tokens, namespace.group, namespace.reach, [group.number for group in namespace.groups],
            namespace.is_simple, namespace.trunk is not None and namespace.trunk.number,
            sorted(
                (
                    key, chunk.position, chunk.depth, chunk.children,
                    chunk.parent is not None and (chunk.parent.namespace.number, chunk.parent.key),
                    [(rank, shard.extents, shard.size, shard.checksum) for rank, shard in sorted(chunk.shards.items())],
                )
                for key, chunk in namespace.chunks.items()
            ),
        )
        for namespace in sorted(index.namespaces.all(), key=lambda each: each.number)
    ]  # fmt: skip


def record(**changes: Any) -> ShardRecord:
    fields = {
        "namespace": 1, "rank": 0, "key": b"k" * 32, "parent": b"", "position": 1, "extents": ((START, PAGE),),
        "size": PAGE, "serial": 1, "checksum": 0,
    } | changes  # fmt: skip
    return ShardRecord(**fields)


def restored_from(*shards: ShardRecord | WriterRecord) -> tuple[Index, Restored]:
    """An index made from the records of a namespace and of these shards."""
    memory = memoryview(bytearray(16 * SLOT_BYTES))
    records = Records(memory)
    for each in (NamespaceRecord(1, "", "m", 1, 4, {0: LAYOUT}, 0, 0, 1, [(0, 4)]), *shards):
        records.write(each)
    index = make(memory=memory)
    restored = restore(index)
    index.validate()
    return index, restored


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": 2}, {"rank": 1}, {"rank": -1}, {"key": b"short"}, {"position": -1}, {"size": 0},
        {"size": PAGE + 1}, {"extents": ()}, {"extents": ((START + 1, PAGE),)}, {"extents": ((START - PAGE, PAGE),)},
        {"extents": ((START + 40 * PAGE, PAGE),)}, {"extents": ((START, 0),)}, {"extents": ((START, -PAGE),)},
        {"extents": ((START, PAGE), (START, PAGE)), "size": 2 * PAGE}, {"serial": -1},
        {"extents": ((START + 39 * PAGE, 2 * PAGE),), "size": 2 * PAGE}, {"checksum": -1},
        {"writer": 7},
    ],
)  # fmt: skip
def test_a_record_that_makes_no_sense_is_dropped_with_its_reason_and_erased(changes: dict[str, Any]) -> None:
    sound = record(key=b"g" * 32, extents=((START + 5 * PAGE, PAGE),))
    after, restored = restored_from(record(**changes), sound)
    assert (restored.shards, len(restored.dropped), after.records.used) == (1, 1, 2)


def test_a_chunk_from_the_future_is_as_old_as_the_arena_is_taken_over() -> None:
    index, _ = restored_from(record(born=5000), record(key=b"g" * 32, extents=((START + PAGE, PAGE),), born=900))
    for wall, born in ((1000, {900, 1000}), (1500, {900, 1000})):
        memory = bytearray(index.records._memory)
        index = make(memory=memory)
        restore(index, wall=wall)
        index.validate()
        assert {chunk.born for each in index.namespaces.all() for chunk in each.chunks.values()} == born


@pytest.mark.parametrize("seed", range(30))
def test_memory_that_clients_of_the_earlier_server_use_is_kept_until_they_end(seed: int) -> None:
    rng = random.Random(seed)
    index = make(pages=40)
    rack = Rack(rng.choice([(0,), (0, 2)]), index=index)
    for chain in PROMPTS:
        rack.store_needed(chain)
    used = [(START + rng.randrange(39 * PAGE), rng.randrange(1, 3 * PAGE)) for _ in range(rng.randrange(1, 5))]
    after = make(pages=40, memory=bytearray(index.records._memory))
    restored = restore(after, used=used)
    after.validate()
    assert (restored.dropped, recorded(after)) == ([], recorded(index)), "nothing is lost"
    whole = {(at - START) // PAGE for start, size in used for at in range(start, start + size)} & set(range(40))
    kept = {
        (at - START) // PAGE for each in restored.in_use for at, size in each.extents for at in range(at, at + size)
    }
    assert whole == kept
    clear(after)
    after.validate()
    again = Rack((0,), model="again", index=after)
    again.store(0, keys("many", after.allocator.free_bytes // PAGE))
    pages = {at for each in again.namespaces[0].chunks.values() for at, _ in each.shards[0].extents}
    assert not pages & {START + page * PAGE for page in whole}
    for each in restored.in_use:
        each.end(after)
    clear(after)
    after.validate()
    assert after.allocator.free_bytes == after.allocator.capacity and after.held == 0


def test_shards_of_two_writers_with_one_number_are_dropped() -> None:
    after, restored = restored_from(record(writer=1), WriterRecord(1, "one"), WriterRecord(1, "two"))
    assert (restored.shards, len(restored.dropped), after.records.used) == (0, 1, 0)


def test_a_writer_has_one_record_while_it_has_shards_and_there_is_a_bound() -> None:
    count = 2 * MOST_WRITERS + 2
    index = make(pages=count, slots=2 * count)
    rack, chain = Rack((0,), index=index), keys("a", count)
    for number in range(count):
        chunk = rack.reserve(0, chain, number)
        assert chunk is not None
        chunk.shards[0].writer = f"writer {number // 2}"
        index.seal(chunk, 0)
    assert (index.records.used, index.unrecorded) == (1 + 3 * MOST_WRITERS, 2), "a namespace, and two shards each"
    after, restored = restarted(index)
    assert (restored.shards, restored.dropped) == (count - 2, [])
    for each in (index, after):
        clear(each)
        each.validate()
        assert len(each.namespaces.writers) == 0 and each.records.used <= 1, "the namespace that is registered"


def test_two_shards_that_claim_the_same_bytes_are_both_dropped() -> None:
    _, restored = restored_from(
        record(extents=((START, 3 * PAGE),), size=3 * PAGE),
        record(key=b"g" * 32, extents=((START + 2 * PAGE, PAGE),)),
        record(key=b"h" * 32, extents=((START + 3 * PAGE, PAGE),)),
    )
    assert (restored.shards, len(restored.dropped)) == (1, 2)
    assert all("same bytes" in line for line in restored.dropped)


def test_the_later_of_two_records_of_a_shard_counts() -> None:
    earlier = record(serial=1, checksum=11, extents=((START + PAGE, PAGE),))
    after, restored = restored_from(record(serial=2, checksum=22), earlier)
    assert restored.shards == 1
    (namespace,) = after.namespaces.all()
    assert namespace.chunks[b"k" * 32].shards[0].checksum == 22


def test_a_chunk_without_a_slot_serves_but_does_not_survive() -> None:
    rack, chain = Rack((0,), index=make(slots=3)), keys("a", 5)
    rack.store_all(chain)
    assert rack.boundary(chain) == 5
    assert rack.index.unrecorded == 3
    rack.index.validate()
    assert boundary(restarted(rack.index)[0], chain) == 2
    rack.namespaces[0].live = 0
    clear(rack.index)
    assert rack.index.records.used == 0


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reaches", [(0,), *SHAPES])
def test_all_groups_come_back_with_the_same_boundaries(reaches: Reaches, world_size: int) -> None:
    index = make(120)
    rack = Rack(reaches, world_size=world_size, index=index)
    for chain in PROMPTS:
        rack.store_needed(chain)
        rack.store_needed(chain[:3])
    before = boundaries(index, world_size)
    assert before.count(6) == 2 and 3 in before
    after, restored = restarted(index)
    assert (restored.dropped, restored.damaged) == ([], [])
    assert facts(after) == facts(index)
    assert boundaries(after, world_size) == before
    assert after.allocator.free_bytes == index.allocator.free_bytes
    assert after.records.used == index.records.used
    # The engine that comes back finds them, and what it stores joins them.
    again = Rack(reaches, world_size=world_size, index=after)
    assert after.namespaces.all() == again.namespaces
    longer = [*PROMPTS[0], *keys("d", 2)]
    again.store_needed(longer)
    assert again.boundary(longer) == 8
    assert boundaries(restarted(after)[0], world_size) == boundaries(after, world_size)


@pytest.mark.parametrize(("reaches", "missing"), [(reaches, g) for reaches in SHAPES for g in range(len(reaches))])
def test_a_group_without_a_record_is_known_of_and_empty(reaches: Reaches, missing: int) -> None:
    rack, chain = Rack(reaches, index=make()), PROMPTS[0]
    for group in range(len(reaches)):
        if group != missing:
            rack.store(group, chain)
    after, _ = restarted(rack.index)
    assert boundary(after, chain) == 0
    if len(reaches) == 1:
        assert after.namespaces.all() == []
        return
    assert [(each.group, each.reach, len(each.chunks)) for each in after.namespaces.all()] == [
        (group, reach, 0 if group == missing else 6) for group, reach in enumerate(reaches)
    ]
    known = after.namespaces.all()
    again = Rack(reaches, index=after)
    assert again.namespaces == known and len({each.number for each in known}) == len(reaches)
    again.store(missing, chain)
    after.validate()
    assert again.boundary(chain) == 6
    last, restored = restarted(after)
    assert boundary(last, chain) == 6 and restored.dropped == []
    assert Rack(reaches, index=last).namespaces == last.namespaces.all()


def test_a_model_with_other_groups_does_not_see_the_old_parts() -> None:
    rack, chain = Rack((0, 2), index=make()), PROMPTS[0]
    rack.store_all(chain)
    after, _ = restarted(rack.index)
    other = register(after, (0, 3))
    assert [len(each.chunks) for each in other] == [0, 0]
    assert matching.match(other[0], b"".join(chain)).matched == 0
    assert boundary(after, chain) == 0, "lookups are asked of the registered engine's"
    assert Rack((0, 2), index=after).boundary(chain) == 6


def test_a_server_of_another_chunk_size_finds_each_model_under_its_own() -> None:
    rack, chain = Rack((0, 2), index=make()), PROMPTS[0]
    rack.store_all(chain)
    after, _ = restarted(rack.index, chunk_tokens=3 * CHUNK_TOKENS)
    assert {each.chunk_tokens for each in after.namespaces.all()} == {CHUNK_TOKENS}
    assert Rack((0, 2), index=after).boundary(chain) == 6


def test_a_record_of_some_ranks_is_replaced_by_one_of_all() -> None:
    memory = bytearray(40 * SLOT_BYTES)
    records = Records(memoryview(memory))
    records.write(NamespaceRecord(1, "", "m", 2, BLOCKS, {0: fingerprint(0, 0)}, CHUNK_TOKENS, 0, 1, [(0, BLOCKS)]))
    records.write(ShardRecord(1, 0, PROMPTS[1][0], b"root", 1, ((START, PAGE),), PAGE, 1, 7))
    index = make(memory=memory)
    restore(index)
    rack = Rack((0,), world_size=2, index=index)
    rack.store_all(PROMPTS[1])
    contents = Records(memoryview(bytearray(memory))).read()
    (record,) = [each for _, each in contents.records if isinstance(each, NamespaceRecord)]
    assert (record.chunk_tokens, record.groups, len(record.layouts)) == (CHUNK_TOKENS, [(0, BLOCKS)], 2)
    assert boundary(restarted(index)[0], PROMPTS[1], "m", 2) == 4


Content = dict[tuple[str, int, bytes, int], Any]
"""What is recorded: extents, checksum and writer by model, group, key and rank."""
WRITERS = ["", "one", "two " * 64]


def recorded(index: Index) -> Content:
    return {
        (namespace.model, namespace.group, key, rank): (shard.extents, shard.checksum, shard.writer)
        for namespace in index.namespaces.all()
        for key, chunk in namespace.chunks.items()
        for rank, shard in chunk.shards.items()
        if shard.slot is not None
    }


@pytest.mark.parametrize("seed", range(40))
def test_a_restart_finds_recorded_boundaries_and_damage_only_takes_some(seed: int) -> None:
    rng = random.Random(seed)
    index = make(rng.choice([12, 30, 80]), slots=rng.choice([25, 400]))
    racks = {
        model: Rack(reaches, world_size=world_size, model=model, index=index)
        for model, reaches, world_size in [("m", rng.choice([(0,), *SHAPES]), 1), ("n", rng.choice(SHAPES), 2)]
    }
    for step in range(rng.randrange(20, 60)):
        rack, chain = rng.choice(list(racks.values())), rng.choice(PROMPTS)
        chain = chain[: rng.randint(1, len(chain))]
        group = rng.randrange(len(rack.reaches))
        parts = [chunk for each in rack.namespaces for chunk in each.chunks.values()]
        match rng.randrange(8):
            case 0 if parts:
                chunk = rng.choice(parts)
                sealed = [rank for rank, shard in chunk.shards.items() if shard.sealed]
                if sealed:
                    index.mark_corrupt(chunk, rng.choice(sealed))
            case 1 if parts:
                index.hide(rng.choice(parts))
            case 2 | 3:
                _store_some(rng, rack, group, chain, range(rng.randrange(len(chain)), len(chain)), step)
            case _:
                for each, reach in enumerate(rack.reaches):
                    _store_some(
                        rng, rack, each, chain, range(max(0, len(chain) - reach) if reach else 0, len(chain)), step
                    )
        index.validate()
    before = recorded(index)
    after, restored = restarted(index)
    assert restored.dropped == [] and restored.damaged == []
    assert recorded(after) == before
    _check_boundaries(after, racks)
    data = bytearray(index.records._memory)
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(index.records.used * SLOT_BYTES)] ^= 1 << rng.randrange(8)
    damaged, _ = restarted(index, bytes(data))
    assert recorded(damaged).items() <= before.items()
    _check_boundaries(damaged, racks)
    for model, rack in racks.items():
        again = Rack(rack.reaches, world_size=rack.world_size, model=model, index=damaged)
        again.store_needed(fresh := keys(f"fresh {model}", 2))
        assert again.boundary(fresh) == 2
        damaged.validate()


def _store_some(rng: random.Random, rack: Rack, group: int, chain: Sequence[bytes], numbers: range, step: int) -> None:
    """Store parts, until there is no room; sometimes not on every rank."""
    for number in numbers:
        for rank in range(rack.world_size if rng.random() < 0.9 else 1):
            parent = chain[number - 1] if number else b"root"
            run = Run(chain[number], PAGE, parent, number + 1)
            for chunk in rack.index.reserve(rack.namespaces[group], rank, run, 0).chunks:
                chunk.shards[rank].writer = rng.choice(WRITERS)
                if rng.random() < 0.95:  # others are still being written when the server dies
                    rack.index.seal(chunk, rank, checksum=1 + step)


def _check_boundaries(index: Index, racks: dict[str, Rack]) -> None:
    """Lookups answer what the records allow, counted by hand."""
    there = Counter((model, group, key) for model, group, key, _ in recorded(index))
    for model, rack in racks.items():
        for chain in PROMPTS:
            found = boundary(index, chain, model, rack.world_size)
            assert found == deepest(
                rack.reaches,
                chain,
                lambda group, key: there[model, group, key] == rack.world_size,  # noqa: B023
            )


TWO_LAYOUTS = {rank: fingerprint(0, rank) for rank in range(2)}
TWO, THREE = [(0, 2), (1, 2)], [(0, 2), (0, 2), (2, 2)]


def sound_records() -> list[NamespaceRecord]:
    """Those of a model with two groups and of one with three; the first group of each may have none."""
    return [
        NamespaceRecord(
            first + group, "", model, 1, 2, {0: fingerprint(0, 0)}, CHUNK_TOKENS, group, first, list(groups)
        )
        for model, first, groups in (("m", 1, TWO), ("n", 3, THREE))
        for group in range(len(groups))
    ]


CHANGES: list[tuple[str, Any]] = [
    *(("number", number) for number in range(1, 7)),
    *(("first", number) for number in range(1, 8)),
    *(("group", number) for number in range(3)),
    *(("groups", groups) for groups in ([], TWO, THREE, [(0, 2)], [(1, 2)], [(1, 2), (0, 2)], [(0, 2), (1, 3)])),
    ("model", "m"), ("model", "n"), ("tenant", "t"), ("world_size", 2), ("layouts", TWO_LAYOUTS),
    ("blocks_in_chunk", 3), ("chunk_tokens", 0), ("chunk_tokens", 48),
]  # fmt: skip
"""What can be other than it should be in one record that makes sense by itself."""
WRONG: list[tuple[str, Any]] = [
    ("number", -1), ("number", 1 << 62), ("first", -1), ("first", 1 << 62), ("group", -1), ("group", 2),
    ("groups", [(0, 2), (-1, 2)]), ("groups", [(0, 2), ((1 << 16) + 1, 2)]), ("groups", [(0, 0), (1, 2)]),
    ("groups", [(0, 2), (1, 3)]), ("groups", [(0, 2)] * 65), ("world_size", 0), ("world_size", (1 << 16) + 1),
    ("chunk_tokens", -1), ("chunk_tokens", 1 << 62), ("blocks_in_chunk", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: str(value)[:20])
def test_a_namespace_record_that_makes_no_sense_is_dropped_with_its_parts(name: str, value: Any) -> None:
    memory, chain = bytearray(100 * SLOT_BYTES), PROMPTS[1][:1]
    records = Records(memoryview(memory))
    first, second = sound_records()[:2]
    records.write(first)
    second = msgspec.structs.replace(second, **{name: value})
    records.write(second)
    records.write(ShardRecord(1, 0, chain[0], b"root", 1, ((START, PAGE),), PAGE, 1, 7))
    number = second.number if second.number > 0 else 2
    records.write(ShardRecord(number, 0, chain[0], b"", 0, ((START + PAGE, PAGE),), PAGE, 2, 7))
    index = make(memory=memory)
    restored = restore(index)
    index.validate()
    assert restored.shards == 1 and len(restored.dropped) == 2 and "namespace" in restored.dropped[0]
    assert boundary(index, chain) == 0 and len(index.namespaces.all()) == 2


def identity(namespace: Namespace) -> tuple[object, ...]:
    groups = tuple((each.reach, each.blocks_in_chunk) for each in namespace.groups)
    return namespace.tenant, namespace.model, namespace.world_size, namespace.chunk_tokens, groups


@settings(max_examples=400, deadline=None)
@given(
    lost=st.sets(st.integers(0, 4), max_size=2),
    changes=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(CHANGES)), max_size=5),
    odd_positions=st.booleans(),
)
def test_records_that_contradict_each_other_never_mix_models(
    lost: set[int], changes: list[tuple[int, tuple[str, Any]]], odd_positions: bool
) -> None:
    """lost: records that are not there. changes: field and value, by record."""
    memory = bytearray(400 * SLOT_BYTES)
    records, chain = Records(memoryview(memory)), PROMPTS[1][:2]
    namespaces = sound_records()
    for number, (name, value) in changes:
        namespaces[number] = msgspec.structs.replace(namespaces[number], **{name: value})
    namespaces = [record for number, record in enumerate(namespaces) if number not in lost]
    for record in namespaces:
        assert records.write(record) is not None
    place = START
    for record in {record.number: record for record in namespaces}.values():
        is_bounded = bool(record.groups) and record.groups[record.group % len(record.groups)][0] != 0
        for rank in range(2):
            for i, key in enumerate(chain):
                position = 0 if is_bounded != odd_positions else i + 1
                parent = chain[i - 1] if position > 1 else b"root" * position
                extents = ((place, PAGE),)
                records.write(ShardRecord(record.number, rank, key, parent, position, extents, PAGE, place, 7))
                place += PAGE
    index = make(memory=memory)
    restore(index)
    index.validate()
    numbers = [each.number for each in index.namespaces.all()]
    assert len(set(numbers)) == len(numbers), "shards of one would be taken for the other's"
    for first in index.namespaces.all():
        origins = set()
        for namespace in first.groups if first.groups[0] is first else ():
            if not namespace.chunks:
                continue
            like = [
                record
                for record in namespaces
                if record.number == namespace.number
                and (record.tenant, record.model, record.world_size) == identity(first)[:3]
                and (record.chunk_tokens or CHUNK_TOKENS) == first.chunk_tokens
                and tuple(record.groups or [(0, record.blocks_in_chunk)]) == identity(first)[4]
                and record.group == namespace.group
            ]
            assert like, "it has shards of another model's record"
            origins.add(frozenset(record.first for record in like if record.groups))
        assert len(origins) < 2 or frozenset.intersection(*origins), "groups of several models are joined"


def test_records_of_models_without_parts_are_erased() -> None:
    memory = bytearray(100 * SLOT_BYTES)
    records = Records(memoryview(memory))
    for record in sound_records():
        records.write(record)
    place = ((START, PAGE),)
    records.write(ShardRecord(2, 0, PROMPTS[1][0], b"", 0, place, PAGE, 1, 7))
    index = make(memory=memory)
    assert restore(index).shards == 1
    left = Records(memoryview(bytearray(memory))).read().records
    assert [record.number for _, record in left if isinstance(record, NamespaceRecord)] == [2]
    assert [each.model for each in index.namespaces.all()] == ["m", "m"]


def test_models_with_contradicting_records_are_dropped_whole_and_no_others() -> None:
    memory, chain = bytearray(100 * SLOT_BYTES), PROMPTS[1][:1]
    records = Records(memoryview(memory))
    for number, model in ((1, "m"), (2, "n"), (3, "sound")):  # two name one lost first group
        first = 5 if model != "sound" else 7
        layouts = {0: fingerprint(1, 0)}
        records.write(NamespaceRecord(number, "", model, 1, BLOCKS, layouts, CHUNK_TOKENS, 1, first, [(0, 2), (1, 2)]))
        records.write(ShardRecord(number, 0, chain[0], b"", 0, ((START + number * PAGE, PAGE),), PAGE, number, 7))
    index = make(memory=memory)
    restored = restore(index)
    index.validate()
    assert restored.shards == 1 and {each.model for each in index.namespaces.all()} == {"sound"}
    assert [line.split(":")[0] for line in restored.dropped[:2]] == ["namespace 1", "namespace 2"]
    assert len(restored.dropped) == 4 and index.records.used == 2
