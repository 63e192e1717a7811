"""The table of records: the next server reads what was written, even if other parts of the table are damaged."""

from __future__ import annotations

from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.memory.records import SLOT_BYTES, NamespaceRecord, Record, Records, ShardRecord, WriterRecord

SHARDS = st.builds(
    ShardRecord,
    namespace=st.integers(1, 3),
    rank=st.integers(0, 7),
    key=st.binary(min_size=32, max_size=32),
    parent=st.sampled_from([b"", b"p" * 32]),
    position=st.integers(0, 2**31),
    extents=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=20).map(tuple),
    size=st.integers(1, 2**40),
    serial=st.integers(0, 2**40),
    checksum=st.integers(0, 2**64 - 1),
    writer=st.integers(0, 1024),
)
NAMESPACES = st.builds(
    NamespaceRecord,
    number=st.integers(1, 9),
    tenant=st.text(max_size=5),
    model=st.text(max_size=200),
    world_size=st.integers(1, 9),
    blocks_in_chunk=st.integers(1, 9),
    layouts=st.dictionaries(st.integers(0, 8), st.binary(min_size=32, max_size=32), max_size=9),
    chunk_tokens=st.integers(0, 512),
    group=st.integers(0, 3),
    first=st.integers(1, 9),
    groups=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), max_size=4),
)
WRITERS = st.builds(WriterRecord, number=st.integers(1, 1024), name=st.text(max_size=256))


def small(key: int, extents: int = 1) -> ShardRecord:
    return ShardRecord(1, 0, key.to_bytes(32, "big"), b"", 0, ((4096, 4096),) * extents, 4096, key, 0)


def table(slots: int) -> memoryview:
    return memoryview(bytearray(slots * SLOT_BYTES))


def found(memory: memoryview) -> dict[int, Record]:
    return dict(Records(memoryview(bytearray(memory))).read().records)


@given(st.lists(st.tuples(SHARDS | NAMESPACES | WRITERS, st.booleans()), max_size=10))
@settings(max_examples=25, deadline=None)
def test_the_next_server_reads_what_was_written_and_not_erased(records: list[tuple[Record, bool]]) -> None:
    memory = table(400)
    one = Records(memory)
    expected: dict[int, Record] = {}
    for record, erased in records:
        slot = one.write(record)
        assert slot is not None
        if erased:
            one.erase(slot)
            expected.pop(slot, None)
        else:
            expected[slot] = record
    assert found(memory) == expected
    next_one = Records(memory)
    assert next_one.read().damaged == []
    assert next_one.used == one.used
    for slot in expected:
        next_one.erase(slot)
    assert found(memory) == {} and next_one.used == 0


def test_a_record_of_a_large_arena_with_checksum_and_writer_takes_one_slot() -> None:
    records = Records(table(1))
    shard = ShardRecord(
        9, 7, b"k" * 32, b"p" * 32, 9999, ((1 << 36, 1 << 24),), 1 << 24, 1 << 24, 1 << 63, b"", 1 << 31
    )
    assert records.write(msgspec.structs.replace(shard, writer=127)) == 0


def test_without_a_free_slot_nothing_is_written_and_slots_come_back() -> None:
    memory = table(3)
    records = Records(memory)
    slots = [records.write(small(i)) for i in range(3)]
    assert records.write(small(3)) is None
    records.erase(slots[1])
    assert records.write(small(4, extents=20)) is None  # needs more than one
    assert records.used == 2
    assert records.write(small(5)) == slots[1]
    assert {record.key[-1] for record in found(memory).values() if isinstance(record, ShardRecord)} == {0, 2, 5}


def test_no_record_is_written_where_there_is_no_memory() -> None:
    given_out: list[tuple[int, int]] = []

    def ensure(offset: int, size: int) -> bool:
        given_out.append((offset, size))
        return len(given_out) < 3

    records = Records(table(4096), ensure)
    written = 0
    while records.write(small(written)) is not None:
        written += 1
    end = 0
    for offset, size in given_out[:-1]:
        assert offset == end
        end = offset + size
    assert written == end // SLOT_BYTES > 0


@given(SHARDS, st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=40, deadline=None)
def test_a_record_with_a_changed_byte_is_dropped_alone(record: ShardRecord, place: int, change: int) -> None:
    memory = table(64)
    records = Records(memory)
    first, slot, last = records.write(small(1)), records.write(record), records.write(small(2))
    used = last - slot
    place = slot * SLOT_BYTES + place % (used * SLOT_BYTES)
    memory[place] ^= change
    assert found(memory) == {first: small(1), last: small(2)}
    again = Records(memory)
    again.read()
    assert again.used == 2
    assert Records(memory).read().damaged == [], "what makes no sense is wiped"


@pytest.mark.parametrize("written", range(0, 3 * SLOT_BYTES, 7))
def test_a_record_whose_writing_was_cut_short_does_not_exist(written: int) -> None:
    before, after = table(8), table(8)
    for memory in (before, after):
        Records(memory).write(small(1))
    records = Records(after)
    records.read()
    slot = records.write(small(2, extents=40))
    assert slot == 1 and records.used == 4
    # Slots are written from the last to the first.
    torn = bytearray(before)
    for number in (3, 2, 1):
        start = number * SLOT_BYTES
        part = min(written, SLOT_BYTES)
        torn[start : start + part] = after[start : start + part]
        written -= part
    assert found(memoryview(torn)) == {0: small(1)}


@pytest.mark.parametrize("cut", [0, 1, SLOT_BYTES - 1, SLOT_BYTES, 2 * SLOT_BYTES + 60, 5 * SLOT_BYTES + 9])
def test_a_table_that_is_cut_off_is_read_up_to_there(cut: int) -> None:
    memory = table(8)
    records = Records(memory)
    written = [small(1), small(2, extents=40), small(3)]
    assert [records.write(record) for record in written] == [0, 1, 4]
    next_one = Records(memoryview(bytearray(memory)))
    read = next_one.read(bytes(memory[:cut]))
    whole = cut // SLOT_BYTES
    ends = zip([0, 1, 4], written, [1, 4, 5], strict=True)
    assert read.records == [(slot, record) for slot, record, end in ends if end <= whole]
    assert read.damaged == (list(range(1, whole)) if whole < 4 else [])


def test_links_of_a_record_that_run_in_a_circle_are_no_record() -> None:
    memory = table(4)
    records = Records(memory)
    slot = records.write(small(1, extents=40))
    (first,) = found(memory)
    assert first == slot
    start = 2 * SLOT_BYTES  # its last slot, made to point at the one before
    body = (1).to_bytes(4, "little") + bytes(memory[start + 8 : start + SLOT_BYTES])
    memory[start : start + SLOT_BYTES] = crc32(body).to_bytes(4, "little") + body
    assert found(memory) == {}
