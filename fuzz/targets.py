"""Fuzz targets, for run.py and tests/test_fuzz.py: functions of bytes that return normally or raise.

A **target** turns bytes into an input of one part, and checks properties that hold for every input. It can be called
any number of times in one process, and leaves nothing behind.
"""

from __future__ import annotations

import math
import os
import random
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec
from fuzz.choices import Choices, Script

from kvdepot import config as settings
from kvdepot.core.forgetting import clear
from kvdepot.core.index import matching
from kvdepot.core.index.index import Index
from kvdepot.core.index.recovery import restore
from kvdepot.core.index.runs import Run
from kvdepot.errors import ArenaError, ConfigError, KVDepotError, ProtocolError
from kvdepot.eviction import Lru
from kvdepot.keys import HASH_BYTES, ROOT
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.arena import Arena, smallest_arena
from kvdepot.memory.arena_header import CHUNKS_OFFSET, HEADER_BYTES, MAGIC, ArenaHeader
from kvdepot.memory.records import SLOT_BYTES, NamespaceRecord, Records, ShardRecord
from kvdepot.memory.shm import SHM
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout, Mapping, Segment
from kvdepot.protocol.quotas import Quota
from kvdepot.protocol.wire import Group

__all__ = ["REACHED", "TARGETS", "Target"]


REACHED: Counter[str] = Counter()
"""How often inputs reached each kind of event, to show that the targets test something."""


class Target(NamedTuple):
    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


# -- the wire


def requests(data: bytes) -> None:
    """A frame is a request, which encodes to itself, or a ProtocolError; its id is returned in either case."""
    number, request = wire.decode_request(data)
    assert number == (data[: wire.ID_BYTES] if len(data) >= wire.ID_BYTES else bytes(wire.ID_BYTES))
    _kind_of_request(request)
    if not isinstance(request, ProtocolError):
        again = wire.encode_request(int.from_bytes(number, "little"), request)
        assert wire.decode_request(again) == (number, request)


def _kind_of_request(request: object) -> str:
    """Branches for the fuzzer, which sees none in the compiled decoder."""
    match request:
        case wire.Hello():
            return "hello"
        case wire.Prove():
            return "prove"
        case wire.Register():
            if request.groups:
                return "register, groups"
            return "register, many" if len(request.layout.segments) > 1 else "register"
        case wire.Unregister():
            return "unregister"
        case wire.Lookup():
            return "lookup"
        case wire.Store():
            return "store, many" if len(request.shards) > 1 else "store" if request.shards else "store of nothing"
        case wire.Retrieve():
            return "retrieve, many" if len(request.shards) > 1 else "retrieve"
        case wire.EndSession():
            return "end session"
        case wire.Clear():
            return "clear"
        case wire.Status() | wire.Noop() | wire.ChunkSize():
            return "one word"
    text = str(request)
    deep = text.count("[")
    if "truncated" in text:
        return "cut off"
    if "trailing" in text:
        return "too long"
    if "Invalid value" in text:
        return "unknown tag"
    if "malformed" in text:
        return "malformed"
    if "Invalid UTF-8" in text:
        return "no text"
    if "Expected" in text:
        return "field 0" if deep == 0 else "field 1" if deep == 1 else "field 2" if deep == 2 else "deep field"
    return "other"


def replies(data: bytes) -> None:
    """A frame is a reply with its id and boot, or raises ProtocolError."""
    try:
        number, boot, value = wire.decode_reply(data)
    except ProtocolError:
        return
    assert data.startswith(number.to_bytes(wire.ID_BYTES, "little") + boot)
    if isinstance(value, KVDepotError):
        assert str(value) is not None and value.code
        wire.encode_failure(data[: wire.ID_BYTES], boot, value)
    elif not _has_nan(value):
        again = wire.encode_answer(data[: wire.ID_BYTES], boot, value)
        assert wire.decode_reply(again) == (number, boot, value)


def _has_nan(value: object) -> bool:
    """Whether a value contains NaN, which is not equal to itself, or timestamps or extensions, which lose precision."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list):
        return any(map(_has_nan, value))
    if isinstance(value, dict):
        return any(_has_nan(key) or _has_nan(item) for key, item in value.items())
    return not isinstance(value, (str, bytes, int, type(None)))


def _request_seeds() -> list[bytes]:
    shards = wire.Shards("r", "model", 2, 1, ROOT, 0, bytes(64), struct.pack("<4I", 0, 1, 2, 3), 1)
    layout = Layout([Mapping("kv", 4096)], [Segment(0, 0, 64, 64)], 64, bytes(32))
    messages: list[wire.Request] = [
        wire.Hello(wire.VERSION, "kvdepot-card-0", bytes(16), True),
        wire.Prove(bytes(32)),
        wire.Register(1, layout, "model", 2, 1, 2),
        wire.Register(1, layout, "model", 2, 1, 2, 32, 0, [wire.Group(0, 2, 128, bytes(32))]),
        wire.Unregister(1),
        wire.Lookup("model", 2, 2, "r", 2, bytes(96)),
        wire.Store(1, 7, [shards, shards]),
        wire.Retrieve(1, [shards]),
        wire.EndSession("r"),
        wire.ChunkSize(),
        wire.Noop(),
        wire.Clear("model"),
        wire.SetQuota("tenant", Quota(4096, 8192, 2.0, 60)),
        wire.Status(),
    ]
    return [wire.encode_request(number, message) for number, message in enumerate(messages)]


def _reply_seeds() -> list[bytes]:
    number, boot = bytes(wire.ID_BYTES), bytes(range(wire.BOOT_BYTES))
    values = [None, True, 3, [True, False], "ok", {"chunks": 1, "counters": {"lookups": 2}}, [1, "arena", 256]]
    return [wire.encode_answer(number, boot, value) for value in values] + [
        wire.encode_failure(number, boot, error("what went wrong")) for error in (KVDepotError, ConfigError, ArenaError)
    ]


# -- settings

_FOLDER = tempfile.TemporaryDirectory(prefix="kvdepot-fuzz-")


def config(data: bytes) -> None:
    """A file, variables and flags give settings within their ranges, or a ConfigError. The result loads again."""
    pick = Choices(data)
    fields = settings.Config.__struct_fields__
    environ = {f"KVDEPOT_{pick.of(fields).upper()}": _word(pick) for _ in range(pick.below(3))}
    flags = {pick.of(fields): _word(pick) for _ in range(pick.below(3))}
    file = Path(_FOLDER.name) / "kvdepot.toml"
    file.write_bytes(pick.take(len(data)))
    try:
        loaded = settings.load(str(file), flags, environ)
    except ConfigError as exc:
        assert str(exc)
        return
    assert 1 <= loaded.chunk_tokens <= 1 << 20 and 1 <= loaded.copy_threads <= 256
    assert loaded.arena_gib >= 0 and loaded.drain_s >= 0 and loaded.url and loaded.arena_bytes >= 0
    assert "/" not in loaded.arena_name and not loaded.arena_name.startswith(".")
    assert all(not share.quota.fault() for share in loaded.tenants.values())
    again = {name: _said(getattr(loaded, name)) for name in fields if name not in settings.ONLY_IN_FILE}
    assert settings.load(None, again, {}) == msgspec.structs.replace(loaded, tenants={}, salts={})


def _said(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _word(pick: Choices) -> str:
    return pick.text(24).decode("utf-8", "replace")


def _config_seeds() -> list[bytes]:
    whole = settings.Config(url="ipc:///run/depot.sock", arena_gib=1.5, arena_name="depot")
    lines = [f"{name} = {msgspec.json.encode(getattr(whole, name)).decode()}" for name in whole.__struct_fields__]
    nothing = Script().below(0, 3).below(0, 3).data
    seeds = [nothing + "\n".join(lines).encode()] + [nothing + line.encode() for line in lines]
    seeds.append(nothing + b'[tenants.blue]\nfloor_gib = "1MiB"\ncap_gib = 2\nweight = 0.5\nttl_s = 60\n')
    seeds.append(nothing + b'[tenants.blue]\ndisk_floor_gib = "1MiB"\ndisk_cap_gib = 2\n[salts.secret]\nttl_s = 60\n')
    for number, name in enumerate(whole.__struct_fields__):
        words = Script().below(1, 3).below(number, len(whole.__struct_fields__))
        seeds.append(words.text(str(getattr(whole, name)).encode()[:24], 24).below(0, 3).data)
    return seeds


# -- the arena

_SLOTS = 64
_PAGES = 48
_START = PAGE + _SLOTS * SLOT_BYTES + 64


def _allocator() -> Allocator:
    return Allocator(_START, _START + _PAGES * PAGE)


def _check_restored(index: Index) -> None:
    """The restored index is consistent: extents are within the arena and disjoint, and totals are right."""
    index.validate()
    REACHED["chunks restored"] += index.chunks
    REACHED["chained chunks restored"] += sum(c.depth > 1 for s in index.namespaces.all() for c in s.chunks.values())
    places: list[tuple[int, int]] = []
    for namespace in index.namespaces.all():
        for chunk in namespace.chunks.values():
            for rank, shard in chunk.shards.items():
                assert 0 <= rank < namespace.world_size and rank in namespace.layouts, (rank, namespace)
                assert sum(length for _, length in shard.extents) == Allocator.rounded(shard.size) > 0, shard
                places += shard.extents
    places.sort()
    reached = index.allocator.start
    for start, length in places:
        assert start >= reached and length > 0, f"{start}+{length} overlaps, or lies before {reached}"
        assert (start - index.allocator.start) % PAGE == 0 == length % PAGE, f"{start}+{length} is no extent"
        reached = start + length
    assert reached <= index.allocator.end
    taken = sum(length for _, length in places)
    assert index.allocator.free_bytes + taken == index.allocator.capacity


def _check_usable(index: Index) -> None:
    """The index remains usable: the whole arena can be reserved, and is free again after that is removed."""
    namespace = index.namespaces.find("fuzz", 1, 0, bytes(32), 1)
    namespace.live += 1
    for number in range(index.allocator.capacity // PAGE + 1):
        made = index.reserve(namespace, 0, Run(number.to_bytes(HASH_BYTES, "big"), PAGE), 0)
        assert made.chunks, f"no room for page {number} although nothing is held"
        index.seal(made.chunks[0], 0)
    index.validate()
    namespace.live -= 1
    for _ in clear(index, index.namespaces.begin_removal(index.namespaces.all(), None, hides=False)):
        pass
    index.take_events()
    index.validate()
    assert index.allocator.free_bytes == index.allocator.capacity and not index.namespaces.all()
    assert not index.records.used, index.records


def _restored(table: bytes) -> Index:
    index = Index(_allocator(), Lru, Records(memoryview(bytearray(table))))
    restore(index)
    return index


def records(data: bytes) -> None:
    """A table of any bytes, or of false records with valid checksums, restores to a consistent index."""
    pick = Choices(data)
    table = bytearray(_SLOTS * SLOT_BYTES)
    if pick.below(4) == 0:
        raw = pick.take(len(table))
        table[: len(raw)] = raw
        if pick.below(2) == 0:  # sums that fit
            for slot in range(0, len(table), SLOT_BYTES):
                table[slot : slot + 4] = crc32(table[slot + 4 : slot + SLOT_BYTES]).to_bytes(4, "little")
    else:
        _Liar(pick, _START, _PAGES).write(Records(memoryview(table)))
        for _ in range(pick.of((0, 0, 1, 2, 5))):  # slots that name others, with sums that fit
            start = pick.below(_SLOTS) * SLOT_BYTES
            table[start + 4 : start + 8] = pick.of((pick.below(_SLOTS), 0xFFFFFFFF, 1 << 31)).to_bytes(4, "little")
            table[start + 8] = pick.below(4)
            table[start : start + 4] = crc32(table[start + 4 : start + SLOT_BYTES]).to_bytes(4, "little")
    index = _restored(bytes(table))
    _check_restored(index)
    first = _contents(index)
    # What one server took back, the next takes back too: restoring erased nothing that it kept.
    index = _restored(bytes(index.records._memory))
    assert _contents(index) == first
    _check_usable(index)


class _Liar:
    """Creates mostly valid records, in an arena of this number of pages behind `start`."""

    def __init__(self, pick: Choices, start: int, pages: int) -> None:
        self.pick = pick
        self.start = start
        self.pages = pages
        self.next_page = 0

    def number(self, most: int) -> int:
        odd = (-1, 0, 1, 2, 3, 1 << 16, 1 << 31, 1 << 63, (1 << 64) - 1)
        return self.pick.of(odd) if self.seldom(32) else self.pick.below(most)

    def seldom(self, one_in: int) -> bool:
        return self.pick.below(one_in) == one_in - 1

    def namespace(self, number: int) -> NamespaceRecord:
        pick = self.pick
        layouts = {
            rank: bytes([(number + 1) % 256]) * pick.of((32, 32, 32, 0, 200)) for rank in range(2 - self.seldom(8))
        }
        if self.seldom(8):
            layouts[self.number(4)] = b""
        model = pick.of(("m", "m" * 300)) + str(self.number(2))
        ranks = 1 + pick.below(2) if pick.below(8) else self.number(4)
        if pick.below(4):
            return NamespaceRecord(number, "", model, ranks, 2, layouts, 0, 0, number, [(0, 2)])
        groups = pick.of(([(0, 2), (2, 2)], [(0, 2), (0, 2)], [(1, 2)], [(2, 2), (1, 3)]))
        group, first = (number % len(groups), 0) if pick.below(4) else (self.number(3), self.number(3))
        return NamespaceRecord(number, "", model, ranks, 2, layouts, pick.of((0, 64)), group, first, groups)

    def record(self) -> NamespaceRecord | ShardRecord:
        pick = self.pick
        if self.seldom(12):
            return self.namespace(self.number(3))
        prompt, i = pick.below(6), pick.below(3)
        keys = [bytes([prompt, i]) * (HASH_BYTES // 2) for i in range(3)]
        key, parent, position = keys[i], keys[i - 1] if i else ROOT, i + 1
        if self.seldom(8):
            parent, position = pick.of((b"", ROOT, *keys)), self.number(4)
        if self.seldom(16):
            key = key[: pick.below(HASH_BYTES + 1)]
        extents = []
        for _ in range(1 + self.seldom(4)):
            page = pick.below(self.pages) if self.seldom(8) else self.next_page
            length = 1 + self.seldom(4)
            self.next_page = page + length
            extents.append((self.start + page * PAGE + 64 * self.seldom(32), length * PAGE))
        if self.seldom(16):
            extents = [(self.number(8), self.number(8)) for _ in range(pick.below(3))]
        size = sum(length for _, length in extents) - pick.of((0, 0, 0, 0, 0, 100, PAGE, -1))
        namespace, rank = (self.number(2), self.number(2)) if self.seldom(4) else (0, 0)
        return ShardRecord(
            namespace, rank, key, parent, position, tuple(extents), size % (1 << 63), self.number(256), self.number(3)
        )

    def write(self, table: Records) -> None:
        """Fill a table until the choices say otherwise."""
        for number in range(2 - self.seldom(8)):
            table.write(self.namespace(number))
        while self.pick and not self.seldom(32):
            table.write(self.record())


def _contents(index: Index) -> dict[tuple[object, ...], tuple[object, ...]]:
    """All properties of every shard that a retrieve depends on."""
    return {
        (
            namespace.model, namespace.world_size, namespace.blocks_in_chunk, namespace.group,
            tuple(each.reach for each in namespace.groups),
            namespace.layouts.get(rank), rank, key,
        ): (
            shard.extents, shard.size, shard.checksum, chunk.position and chunk.position,
        )
        for namespace in index.namespaces.all()
        for key, chunk in namespace.chunks.items()
        for rank, shard in chunk.shards.items()
        if shard.sealed
    }  # fmt: skip


def _stored(pick: Choices) -> tuple[Index, bytearray]:
    """An index with the stores of a story, and its table of records."""
    table = bytearray(_SLOTS * SLOT_BYTES)
    index = Index(_allocator(), Lru, Records(memoryview(table)))
    for _ in range(pick.below(40)):
        prompt, first, ranks = pick.below(4), pick.below(3), 1 + pick.below(2)
        groups = [Group(reach, 2, 0, bytes([ranks, reach]) * 16) for reach in pick.of(((0,), (0,), (0, 2), (1,)))]
        model, group = f"model-{ranks}" * pick.of((1, 20)), pick.below(len(groups))
        for rank in range(ranks):
            namespace = index.namespaces.find_groups(model, ranks, rank, groups)[group]
        namespace.live += 1  # as for a registered engine
        parent = ROOT if first == 0 else bytes([prompt, first - 1]) * 16
        for i in range(first, first + 1 + pick.below(3)):
            key = bytes([prompt, i]) * 16
            for rank in range(ranks):
                if not matching.is_missing(namespace, rank, key):
                    continue
                made = index.reserve(namespace, rank, Run(key, 1 + pick.below(3 * PAGE), parent, i + 1), 0)
                if not made.chunks:
                    continue
                (chunk,) = made.chunks
                if pick.below(8):
                    index.seal(chunk, rank, pick.below(1 << 32))
                else:
                    index.discard(chunk, rank)
            parent = key
    return index, table


def table(data: bytes) -> None:
    """However the bytes of a valid table are damaged, only stored shards are restored; if they are not, all of them."""
    pick = Choices(data)
    index, memory = _stored(pick)
    index.validate()
    stored = _contents(index)
    touched = False
    while pick:
        touched = True
        what, slot = pick.below(4), pick.below(_SLOTS) * SLOT_BYTES
        if what == 0:
            memory[pick.below(len(memory))] ^= 1 << pick.below(8)
        elif what == 1:
            memory[slot : slot + SLOT_BYTES] = bytes(SLOT_BYTES)
        elif what == 2:
            torn = pick.below(SLOT_BYTES)  # a write that was cut off
            memory[slot + torn : slot + SLOT_BYTES] = bytes(SLOT_BYTES - torn)
        else:
            memory[slot : slot + SLOT_BYTES] = pick.take(SLOT_BYTES).ljust(SLOT_BYTES, b"\0")
    again = _restored(bytes(memory))
    _check_restored(again)
    found = _contents(again)
    for name, shard in found.items():
        assert name in stored, f"{name} was never stored"
        assert stored[name][:3] == shard[:3], f"{name}: stored {stored[name]}, restored {shard}"
    if not touched:
        recorded = sum(
            shard.slot is not None
            for namespace in index.namespaces.all()
            for chunk in namespace.chunks.values()
            for shard in chunk.shards.values()
        )
        assert len(found) == recorded, f"{len(found)} shards came back of {recorded}"
    _check_usable(again)


def arena(data: bytes) -> None:
    """A file of any bytes is taken over with its valid contents, or refused with an ArenaError and not changed."""
    pick = Choices(data)
    size = smallest_arena() + (pick.below(16) if pick.below(4) == 0 else 15) * PAGE
    name = f"kvdepot-fuzz-{os.getpid()}-arena"
    path = SHM / name
    head = pick.take(64) if pick.below(4) == 0 else b""
    if not head:  # a header that is whole, and may lie
        odd = (size, size, size, size, 0, PAGE, SLOT_BYTES, 100, size // 2, 2 * size, (1 << 64) - 1)
        head = ArenaHeader(
            pick.of(odd), pick.of((PAGE, *odd)) if pick.below(4) == 0 else PAGE, pick.take(8).ljust(8, b"\0")
        ).pack()
        if pick.below(6) == 0:
            at = pick.below(len(head))
            head = head[:at] + bytes([head[at] ^ 1 << pick.below(8)]) + head[at + 1 :]
    elif pick.below(2):
        head = MAGIC + head
    inner = bytearray(PAGE)
    _Liar(pick, 2 * PAGE + CHUNKS_OFFSET, 16).write(Records(memoryview(inner)))
    content = (head.ljust(PAGE, b"\0") + bytes(inner)).ljust(size, b"\0")
    content = content[: pick.of((size, size, size, size, 2 * PAGE, PAGE, 30, size // 2))]
    path.write_bytes(content)
    path.chmod(0o600)
    try:
        try:
            taken = Arena(name, size, b"fuzzboot")
        except ArenaError as exc:
            assert str(exc)
            assert path.read_bytes() == content, "refused, but not left alone"
            return
        try:
            told = content[: len(ArenaHeader(0, 0, bytes(8)).pack())]
            summed = told[:12] + bytes(4) + told[16:]
            assert not any(told) or crc32(summed).to_bytes(4, "little") == told[12:16], "a damaged header was believed"
            ensure = taken.ensure
            records = Records(taken.table(), lambda offset, length: ensure(HEADER_BYTES + offset, length))
            index = Index(Allocator(taken.header.chunks_start, size), Lru, records)
            restore(index, taken.read_table(), taken.whole)
            _check_restored(index)
            taken.settle()
            assert path.stat().st_size == size
            assert index.allocator.end <= size
        finally:
            index = None  # type: ignore[assignment]
            taken.close(remove=False)
    finally:
        path.unlink()


def _random_seeds(count: int, size: int) -> Callable[[], list[bytes]]:
    """Random stories, far longer than those that a fuzzer begins with."""
    return lambda: [random.Random(number).randbytes(size) for number in range(count)]


TARGETS: dict[str, Target] = {
    "requests": Target(requests, _request_seeds),
    "replies": Target(replies, _reply_seeds),
    "config": Target(config, _config_seeds),
    "records": Target(records, _random_seeds(50, 900)),
    "table": Target(table, _random_seeds(50, 300)),
    "arena": Target(arena, _random_seeds(50, 500)),
}
