"""Records that survive the server's process, in the arena's file: one per sealed shard, namespace and writer.

Written by core/index/ on the deciding thread; read by core/index/recovery.py when a server takes an arena over, and by
cli/check.py. Invariant: a shard has a record only while its bytes are complete. It is written after the last byte
has arrived and erased before the first byte can be overwritten, so the records are true whenever the server dies.

The table is an array of slots. A record is msgpack, split over as many slots as it needs (usually one):

    offset  0, uint32   CRC-32 of the rest of the slot
    offset  4, uint32   number of the next slot of this record; 0xFFFFFFFF: this is the last
    offset  8, uint8    0 free, 1 first slot of a record, 2 further slot
    offset  9, uint8    bytes of the record in this slot
    offset 10           those bytes

The first slot is written last and erased first. A slot that was being written when the server died has a wrong CRC.

The table has a slot for each 16 KiB of the arena; real chunks are far larger. A shard that finds no free slot is used
like any other, but does not survive the server (`Index.unrecorded`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias
from zlib import crc32

import msgspec
import numpy as np

from kvdepot.memory.allocator import Extents

SLOT_BYTES = 128
ARENA_BYTES_A_SLOT = 16384
_SLOT = struct.Struct("<IIBB118s")
_BODY = struct.Struct("<IBB118s")
_ROOM = 118
_LAST = 0xFFFFFFFF
_FREE, _FIRST, _FURTHER = 0, 1, 2
_STEP = 512
"""Slots whose pages are allocated at once."""


class NamespaceRecord(msgspec.Struct, tag=0, array_like=True, frozen=True, gc=False):
    """A namespace; see core/index/chunk.py. Records of shards refer to it by `number`.

    group: its place in `groups`, which has the reach and blocks per chunk of each KV cache group of its model. first:
    number of the first group's namespace. is_quarantined: whether no lookup finds its chunks.
    """

    number: int
    tenant: str
    model: str
    world_size: int
    blocks_in_chunk: int
    layouts: dict[int, bytes]
    chunk_tokens: int
    group: int
    first: int
    groups: list[tuple[int, int]]
    is_quarantined: bool = False


class WriterRecord(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False):
    """The name of a writer (wire.Register), to which records of shards refer by `number`, from 1 on."""

    number: int
    name: str


class ShardRecord(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """One sealed shard.

    parent, position: see core/index/chunk.py (empty and 0: a chunk without a chain). extents: see memory/allocator.py.
    size: bytes of KV in the extents. serial: running number of the seal. checksum: of the KV; 0 = none was computed.
    salt, born: as in core/index/chunk.py. writer: number of the record of its writer; 0: none is known.
    """

    namespace: int
    rank: int
    key: bytes
    parent: bytes
    position: int
    extents: Extents
    size: int
    serial: int
    checksum: int
    salt: bytes = b""
    born: int = 0
    writer: int = 0


Record: TypeAlias = NamespaceRecord | ShardRecord | WriterRecord

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


@dataclass
class Contents:
    """The contents of a table: complete records with their first slots, and the slots that belong to none."""

    records: list[tuple[int, Record]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)


class Records:
    """The table in `memory` (a whole number of slots). Not thread-safe; the deciding thread owns it."""

    def __init__(self, memory: memoryview, ensure: Callable[[int, int], bool] = lambda offset, size: True) -> None:
        """ensure(offset, size): make sure that these bytes of `memory` can be written; False if they cannot."""
        self._memory = memory
        self._ensure = ensure
        self.capacity = len(memory) // SLOT_BYTES
        self._free: list[int] = []
        self._fresh = 0  # slots from here on were never used
        self._ready = 0  # slots before this one are allocated
        self._further: dict[int, list[int]] = {}  # first slot -> the others, for records with several

    @property
    def used(self) -> int:
        return self._fresh - len(self._free)

    def write(self, record: Record) -> int | None:
        """Add a record; returns its first slot, or None if there is no room for it."""
        data = _encode(record)
        slots = [slot for _ in range(0, len(data), _ROOM) if (slot := self._take()) is not None]
        if len(slots) * _ROOM < len(data):
            self._free += slots
            return None
        following = _LAST
        for part in range(len(slots) - 1, -1, -1):
            piece = data[part * _ROOM : (part + 1) * _ROOM]
            body = _BODY.pack(following, _FURTHER if part else _FIRST, len(piece), piece)
            start = slots[part] * SLOT_BYTES
            self._memory[start : start + SLOT_BYTES] = crc32(body).to_bytes(4, "little") + body
            following = slots[part]
        if len(slots) > 1:
            self._further[slots[0]] = slots[1:]
        return slots[0]

    def erase(self, slot: int | None) -> None:
        """Remove the record that `write` put at this slot; None: do nothing."""
        if slot is None:
            return
        for each in (slot, *self._further.pop(slot, ())):
            self._wipe(each)
            self._free.append(each)

    def _wipe(self, slot: int) -> None:
        self._memory[slot * SLOT_BYTES : slot * SLOT_BYTES + 10] = bytes(10)

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._fresh == self._ready:
            step = min(_STEP, self.capacity - self._ready)
            if not step or not self._ensure(self._ready * SLOT_BYTES, step * SLOT_BYTES):
                return None
            self._ready += step
        self._fresh += 1
        return self._fresh - 1

    def read(self, data: bytes | bytearray | None = None) -> Contents:
        """Read all records of a table that an earlier server wrote. Call it before anything is written.

        data: the table's bytes, if the caller can read them without touching pages that were never written; they may be
            truncated.
        Wipes and frees the slots that do not belong to a complete record.
        """
        data = bytes(self._memory) if data is None else data
        contents = Contents()
        slots_read = min(self.capacity, len(data) // SLOT_BYTES)
        kinds = np.frombuffer(data, np.uint8)[: slots_read * SLOT_BYTES].reshape(-1, SLOT_BYTES)[:, 8]
        written = np.flatnonzero(kinds).tolist()
        used: set[int] = set()
        for slot in np.flatnonzero(kinds == _FIRST).tolist():
            begin = slot * SLOT_BYTES
            total, following, _, length, piece = _SLOT.unpack_from(data, begin)
            if total != crc32(data[begin + 4 : begin + SLOT_BYTES]):
                continue
            text: bytes = piece[:length]
            further: list[int] = []
            if following != _LAST:
                rest, further = _follow(data, following, slots_read)
                text += rest
                if not further or not used.isdisjoint(further):
                    continue
            try:
                record = _decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            used.add(slot)
            if further:
                used.update(further)
                self._further[slot] = further
            contents.records.append((slot, record))
        contents.damaged = [slot for slot in written if slot not in used]
        self._fresh = self._ready = written[-1] + 1 if written else 0
        self._free = [slot for slot in range(self._fresh) if slot not in used]
        for slot in contents.damaged:
            self._wipe(slot)
        return contents


def _follow(data: bytes | bytearray, slot: int, end_slot: int) -> tuple[bytes, list[int]]:
    """The rest of a record from its second slot on, and these slots; no slots if they do not lead to its end."""
    text = b""
    slots: list[int] = []
    while slot < end_slot and len(slots) < end_slot:
        begin = slot * SLOT_BYTES
        total, following, kind, length, piece = _SLOT.unpack_from(data, begin)
        if kind != _FURTHER or total != crc32(data[begin + 4 : begin + SLOT_BYTES]):
            break
        slots.append(slot)
        text += piece[:length]
        if following == _LAST:
            return text, slots
        slot = following
    return b"", []
