"""Stories of requests for a real Depot: clients, their memory, the copies it asks for, and an oracle for every byte.

A story replaces the server's socket and threads. It decides in which order copies and calls end, which client dies, and
when the server is killed and restarted on its arena. The rest is real: `wire.decode_request`, `Depot`, `Index`,
`Records`, `restore`, mapped shared memory, `copier.copy`.

The oracle: a chunk's bytes are a function of its name, and are written into the client's blocks just before a store is
sent. So a retrieve that answers True must bring these bytes. Names whose bytes the story itself has overwritten (for
example by two concurrent requests on one block, which no engine makes) are **tainted** and no longer checked.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from fuzz.choices import Choices, Script

from kvdepot.config import Config
from kvdepot.core.actions import Reply
from kvdepot.core.forgetting import Removals
from kvdepot.core.index.index import Index
from kvdepot.core.index.recovery import restore
from kvdepot.devices.cpu import HostTensors
from kvdepot.errors import InternalError, KVDepotError, LayoutError, ProtocolError
from kvdepot.eviction import Lru
from kvdepot.keys import HASH_BYTES, ROOT
from kvdepot.memory import copier as copier
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.copier import Call, Copy, Mapped
from kvdepot.memory.records import SLOT_BYTES, Records
from kvdepot.memory.shm import SHM
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout, Mapping, Segment
from kvdepot.protocol.quotas import Quota
from kvdepot.testing.harness import Harness

__all__ = ["REACHED", "depot", "depot_seeds"]

REACHED: Counter[str] = Counter()
"""How often the stories reached each kind of event, to show that the targets test something."""

PAGES = 12
START = 64
SLOTS = 24
FILE_BYTES = 28 << 10
CLIENTS = 3
FRAME = 255
STEPS = 48

Name: TypeAlias = tuple[int, str, int, int, int, bytes]  # instance, model, world size, rank, blocks in chunk, key
Block: TypeAlias = tuple[int, int]  # instance, block id


@dataclass(frozen=True)
class Variant:
    """The tensors that every client registers under one instance number."""

    offset: int
    blocks: int
    block_bytes: int
    segments: int

    def layout(self, name: str) -> Layout:
        size = self.block_bytes // self.segments
        return Layout(
            [Mapping(name, FILE_BYTES)],
            [Segment(0, self.offset + i * size, self.block_bytes, size) for i in range(self.segments)],
            self.blocks,
            bytes([self.segments]) * 32,
        )


VARIANTS = {0: Variant(0, 16, 64, 2), 1: Variant(4096, 8, 3072, 1)}
"""By instance number. A chunk of two blocks takes one page (0) or two (1)."""


@dataclass
class Arena:
    bytes: npt.NDArray[np.uint8]

    def ensure(self, offset: int, size: int) -> bool:
        assert offset >= 0 and offset + size <= len(self.bytes), (offset, size)
        return True


class Client:
    """One run of a client: a later one may have its identity, but not its memory and liveness file."""

    _lives = itertools.count()

    def __init__(self, identity: bytes, symbol: str) -> None:
        self.identity = identity
        self.symbol = symbol  # what its registrations call its file, in every replay alike
        self.ticket = 0
        self.file = f"kvdepot-fuzz-{os.getpid()}-{next(self._lives)}"
        fd = os.open(SHM / self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, FILE_BYTES)
        self._map = mmap.mmap(fd, FILE_BYTES)
        os.close(fd)
        self.memory = np.frombuffer(self._map, np.uint8)

    def block(self, instance: int, number: int) -> npt.NDArray[np.uint8]:
        variant = VARIANTS[instance]
        start = variant.offset + number * variant.block_bytes
        return self.memory[start : start + variant.block_bytes]

    def close(self) -> None:
        (SHM / self.file).unlink()


@dataclass(eq=False)
class Question:
    """A request without an answer so far."""

    client: Client | None  # None: a stranger
    request: wire.Request
    chunks: list[tuple[Name, list[int], int]] = field(default_factory=list)  # name, blocks, how many are skipped
    blocks: set[Block] = field(default_factory=set)  # in use until the answer
    checked: bool = True

    @property
    def is_store(self) -> bool:
        return isinstance(self.request, wire.Store)


def content(name: Name, index: int) -> npt.NDArray[np.uint8]:
    """The bytes of block `index` of a chunk."""
    instance, *rest = name
    digest = blake2b(repr((rest, index)).encode(), digest_size=64).digest()
    return np.frombuffer(digest * (VARIANTS[instance].block_bytes // 64), np.uint8)


class Desk(Harness):
    """A story: the requests, the order in which tasks end, the deaths of clients, and the kills of the server."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.arena = Arena(np.zeros(START + PAGES * PAGE, np.uint8))
        self.table = bytearray(SLOTS * SLOT_BYTES)
        self.verify = choices.of(("off", "always"))
        self.sound = True  # False: bytes can no longer be told, layouts of the story's own are about
        self.tainted: set[Name] = set()
        self.clients: dict[int, Client] = {}
        self.files: dict[str, str] = {}  # what registrations call a file -> its name
        self.old: list[Client] = []
        self.opened: list[Mapped] = []
        self.numbers = itertools.count(1 << 32)  # not those of the harness's own hellos
        self.asked: dict[tuple[bytes, bytes], Question] = {}
        self.stored: list[tuple[int, wire.Shards]] = []
        self.begin()

    def begin(self) -> None:
        """Start a server."""
        index = Index(Allocator(START, START + PAGES * PAGE), Lru, Records(memoryview(self.table)))
        self.restored = restore(index)
        index.validate()
        config = Config(
            url="ipc:///nowhere", chunk_size=1, max_clients=CLIENTS, max_queued=4, max_sessions=3, verify=self.verify
        )
        super().__init__(config, index, self.map, step_chunks=1)
        self.corrupt = 0

    def map(self, layout: Layout) -> Mapped:
        """HostTensors.open, for files of this story only."""
        mappings = []
        for mapping in layout.mappings:
            if mapping.name not in self.files:
                raise LayoutError(f"{mapping.name!r} is no file of this story")
            mappings.append(Mapping(self.files[mapping.name], mapping.size))
        mapped = HostTensors.open(msgspec.structs.replace(layout, mappings=mappings))
        self.opened.append(mapped)
        return mapped

    # -- the depot's side

    def replied(self, reply: Reply, frame: bytes) -> None:
        question = self.asked.pop((reply.client, reply.number), None)
        if question is None:
            super().replied(reply, frame)  # to a hello
            return
        assert not isinstance(reply.value, InternalError), reply.value
        self.judge(question, reply.value)

    def submitted(self, task: Copy | Call) -> None:
        if isinstance(task, Copy):
            self.check_copy(task)
        super().submitted(task)

    def check_copy(self, task: Copy) -> None:
        """A copy must stay within registered blocks and the arena, and not overlap another copy."""
        layout = task.mapped.layout
        size = sum(segment.size for segment in layout.segments)
        under_way = [(other.is_store, e) for other in self.copies() for piece in other.pieces for e in piece.extents]
        assert task.mapped.rows, "a copy for tensors that are unmapped"
        targets = [int(number) for piece in task.pieces for number in piece.block_ids]
        assert task.is_store or len(set(targets)) == len(targets), "two chunks are retrieved into one block"
        for piece in task.pieces:
            ids = piece.block_ids
            assert len(ids) and int(ids.min()) >= 0 and int(ids.max()) < layout.num_blocks, ids
            assert 0 <= piece.skip < len(ids)
            assert sum(length for _, length in piece.extents) == Allocator.rounded(size * len(ids))
            for start, length in piece.extents:
                assert START <= start < start + length <= START + PAGES * PAGE and (start - START) % PAGE == 0
                for is_store, (other, reach) in under_way:
                    apart = start + length <= other or other + reach <= start
                    assert apart or not (is_store or task.is_store), "two copies are at the same bytes of the arena"
            under_way += [(task.is_store, extent) for extent in piece.extents]

    def copies(self) -> list[Copy]:
        return [task for task in self.tasks if isinstance(task, Copy)]

    def end_task(self, position: int, fails: bool = False) -> None:
        """End a task."""
        task = self.tasks.pop(position)
        outcome: Any
        if isinstance(task, Copy):
            outcome = None if fails else copier.copy(self.arena, task)
        else:
            try:
                outcome = task.run()
            except KVDepotError as exc:
                outcome = exc
            assert all(copy.mapped.rows for copy in self.copies()), "tensors were unmapped during a copy"
        self.finished(task.token, outcome)
        REACHED["corruptions found"] += self.depot.counters["corrupt_chunks"] - self.corrupt
        self.corrupt = self.depot.counters["corrupt_chunks"]

    def judge(self, question: Question, value: Any) -> None:
        """A retrieve that answers True must have brought the bytes."""
        if isinstance(question.request, wire.Store) and value is True:
            self.stored += [(question.request.instance, part) for part in question.request.shards]
        if not isinstance(question.request, wire.Retrieve) or isinstance(value, KVDepotError):
            return
        asked = sum(len(part.hashes) // HASH_BYTES for part in question.request.shards)
        assert isinstance(value, list) and len(value) == asked, (value, asked)
        client = question.client
        if client is None or not (self.sound and question.checked and len(question.chunks) == asked):
            return
        for good, (name, ids, skip) in zip(value, question.chunks, strict=True):
            if good and name not in self.tainted:
                REACHED["chunks checked"] += 1
                for i, number in enumerate(ids):
                    expected = content(name, i) if i >= skip else 0xEE
                    there = client.block(name[0], number)
                    assert (there == expected).all(), f"block {i} of {name} was retrieved wrong"

    # -- the clients' side

    def say(self, place: int, frame: bytes) -> None:
        """Deliver a frame from the client at this place."""
        client = self.clients.get(place)
        identity = bytes([place]) if client is None else client.identity
        number, request = wire.decode_request(frame)
        if isinstance(request, ProtocolError | wire.Hello | wire.Prove):
            self.deliver(identity, frame)  # answered with an error, or by a proof that nobody looks at
            return
        question = Question(client, request)
        if client is not None:
            if isinstance(request, wire.Register):
                variant = VARIANTS.get(request.instance)
                self.sound &= variant is not None and request.layout == variant.layout(client.symbol)
            elif isinstance(request, wire.Store | wire.Retrieve) and request.instance in VARIANTS:
                self.prepare(client, question, request)
        self.asked[identity, number] = question
        self.deliver(identity, frame)

    def prepare(self, client: Client, question: Question, request: wire.Store | wire.Retrieve) -> None:
        """Fill the blocks, and find the requests that conflict."""
        instance = request.instance
        for part in request.shards:
            count = len(part.hashes) // HASH_BYTES
            ids = struct.unpack(f"<{len(part.block_ids) // 4}I", part.block_ids[: len(part.block_ids) // 4 * 4])
            if not count or not ids or len(ids) % count or max(ids) >= VARIANTS[instance].blocks:
                return  # it must be refused; otherwise check_copy fails
            each = len(ids) // count
            for i in range(count):
                key = part.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
                name = (instance, part.model, part.world_size, part.rank, each, key)
                skip = part.skip_blocks if i == 0 and not question.is_store else 0
                question.chunks.append((name, list(ids[i * each : (i + 1) * each]), skip))
        if isinstance(request, wire.Store) and request.ticket != client.ticket:
            self.tainted.update(name for name, _, _ in question.chunks)  # no fence of ours will stop it
        for name, ids, _ in question.chunks:
            for i, number in enumerate(ids):
                block = instance, number
                others = [q for q in (*self.asked.values(), question) if q.client is client and block in q.blocks]
                for other in others:
                    if question.is_store != other.is_store or not question.is_store:
                        other.checked = False
                        self.tainted.update(n for n, _, _ in other.chunks if other.is_store)
                if others:
                    question.checked = False
                    if question.is_store:
                        self.tainted.add(name)
                else:
                    question.blocks.add(block)
                    client.block(instance, number)[:] = content(name, i) if question.is_store else 0xEE
        for _, ids, _ in question.chunks:
            question.blocks |= {(instance, number) for number in ids}

    def give_up_stores(self, client: Client) -> None:
        """The engine raises the fence, and immediately reuses the blocks of its stores."""
        self.liveness_files[client.identity].fence = client.ticket
        mine = [question for question in self.asked.values() if question.client is client]
        for question in mine:
            if question.is_store:
                for block in question.blocks:
                    client.block(*block)[:] = 0xDD
                    for other in mine:
                        other.checked &= other.is_store or block not in other.blocks
                question.blocks = set()

    def introduce(self, place: int) -> None:
        """A client says hello, for the first time or again."""
        identity = bytes([place])
        if place not in self.clients:
            symbol = f"kv-{place}"
            client = Client(identity, symbol)
            self.clients[place] = client
            self.files[symbol] = client.file
        self.hello(identity)

    def join(self, place: int) -> None:
        """Say hello and request both registrations."""
        self.introduce(place)
        for instance, variant in VARIANTS.items():
            register = wire.Register(instance, variant.layout(self.clients[place].symbol))
            self.say(place, wire.encode_request(next(self.numbers), register))
            if self.tasks and self.choices.below(8):
                self.end_task(len(self.tasks) - 1)

    def kill(self, place: int) -> None:
        client = self.clients.pop(place, None)
        if client is None:
            return
        client.memory[:] = 0xCC
        self.old.append(client)
        self.asked = {asked: question for asked, question in self.asked.items() if question.client is not client}
        self.die(client.identity)

    def restart(self) -> None:
        """kill -9, and a new server on the same arena: exactly the sealed and recorded chunks must be back."""
        recorded = sum(
            shard.slot is not None
            for namespace in self.index.namespaces.all()
            for chunk in namespace.chunks.values()
            for shard in chunk.shards.values()
        )
        self.asked.clear()
        self.begin()
        REACHED["shards back after a restart"] += recorded
        assert self.restored.shards == recorded and not self.restored.dropped and not self.restored.damaged
        for place in list(self.clients):
            self.join(place)

    # -- the story

    def request(self, client: Client) -> wire.Request:
        """A mostly valid request."""
        pick = self.choices
        kind = pick.below(12)
        instance = pick.below(2) if kind < 8 else 0
        request = f"r{pick.below(3)}"
        if kind < 4:
            client.ticket += 1
            return wire.Store(instance, client.ticket, self.shards(client, instance, request))
        if kind < 6 or (kind == 7 and pick.below(3)):
            if self.stored and pick.below(4):
                instance, part = self.stored[-1 - pick.below(len(self.stored)) % 16]
                count = len(part.block_ids) // 4
                ids = self.blocks(client, instance, count)
                return wire.Retrieve(instance, [msgspec.structs.replace(part, request=request, block_ids=ids)])
            return wire.Retrieve(instance, self.shards(client, instance, request))
        if kind == 6:
            if pick.below(4) == 0:
                return self.group(client, instance)
            model = pick.of(("m", "m", ""))
            shape = (2, 1, 2) if pick.below(4) == 0 else (1, 0, 2)
            return wire.Register(instance, VARIANTS[instance].layout(client.symbol), model, *shape)
        if kind == 7:
            return wire.Unregister(instance)
        if kind < 10:
            hashes = b"".join(self.keys(pick.below(3), 0, 1 + pick.below(4)))
            model, ranks, blocks = pick.of(("m", "n", "h")), 1 + pick.below(2), pick.of((2, 0, 1))
            return wire.Lookup(model, ranks, blocks, request, pick.below(3), hashes)
        if kind == 10:
            return wire.EndSession(request)
        return pick.of(
            (wire.Status(), wire.Noop(), wire.ChunkSize(), wire.Clear("m"), wire.Count("m"), wire.Prefixes("m"))
        )

    def group(self, client: Client, instance: int) -> wire.Register:
        """A registration as one KV cache group of a model with two: mostly a window behind full attention."""
        pick = self.choices
        reaches = pick.of(((0, 1), (0, 2), (0, 0), (1, 2), (2, 0)))
        layouts = [variant.layout(client.symbol) for variant in VARIANTS.values()]
        groups = [
            wire.Group(reach, 2, 2 * layout.block_bytes, layout.fingerprint)
            for reach, layout in zip(reaches, layouts, strict=True)
        ]
        number = instance if pick.below(8) else pick.below(4)
        return wire.Register(instance, layouts[instance], "h", 1, 0, 2, pick.of((0, 0, 64)), number, groups)

    @staticmethod
    def keys(prompt: int, first: int, end: int) -> list[bytes]:
        """Chunks `[first, end)` of a prompt; prompts 0 and 1 share their beginning."""
        names = [bytes([max(1, prompt) if i < 2 else prompt, i]) for i in range(first, end)]
        return [blake2b(name, digest_size=HASH_BYTES).digest() for name in names]

    def blocks(self, client: Client, instance: int, count: int) -> bytes:
        """Block ids: free ones, like an engine's, or rarely any."""
        pick = self.choices
        busy = {block for question in self.asked.values() if question.client is client for block in question.blocks}
        start, step = pick.below(20), pick.of((1, 1, 1, 1, 1, 3, 7, 0))
        numbers = list(range(VARIANTS[instance].blocks + (pick.below(16) == 15)))
        free = [number for number in numbers if (instance, number) not in busy]
        if pick.below(8) < 7 and count <= len(free):
            ids = [free[(start + i) % len(free)] for i in range(count)]
        else:
            ids = [numbers[(start + i * step) % len(numbers)] for i in range(count)]
        return struct.pack(f"<{count}I", *ids)

    def shards(self, client: Client, instance: int, request: str) -> list[wire.Shards]:
        pick = self.choices
        parts = []
        for _ in range(1 + (pick.below(4) == 0)):
            prompt, first = pick.below(3), pick.of((0, 0, 1, 2))
            hashes = self.keys(prompt, first, first + 1 + pick.below(3))
            each = pick.of((2, 2, 2, 2, 2, 2, 1, 3))
            ids = self.blocks(client, instance, each * len(hashes))
            parent = self.keys(prompt, first - 1, first)[0] if first else ROOT
            world_size = 1 + (pick.below(8) == 0)
            rank = pick.below(world_size)
            if pick.below(6) == 0:
                parent, first = b"", 0  # an engine's own hashes
            skip = pick.of((0, 0, 0, 1))
            model = pick.of(("n", "h", "h", "m", "m", "m", "m", "m"))
            parts.append(wire.Shards(request, model, world_size, rank, parent, first, b"".join(hashes), ids, skip))
        return parts

    def step(self) -> None:
        pick = self.choices
        what = pick.below(STEPS)
        place = pick.below(CLIENTS)
        client = self.clients.get(place)
        number = next(self.numbers)
        if client is None and what < 12:
            self.join(place)
        elif what < 18 and client is not None:
            self.say(place, wire.encode_request(number, self.request(client)))
        elif what == 18 and client is not None:
            frame = bytearray(wire.encode_request(number, self.request(client)))
            for _ in range(1 + pick.below(3)):
                frame[8 + pick.below(len(frame) - 8)] = pick.below(256)
            self.say(place, bytes(frame))
        elif what == 19:
            self.say(place, number.to_bytes(8, "little") + pick.text(FRAME))
        elif what < 42:
            if self.tasks:
                self.end_task(pick.below(len(self.tasks)), fails=pick.below(6) == 0)
        elif what < 44 and client is not None:
            self.give_up_stores(client)
        elif what == 44:
            self.restart()
        elif what == 45:
            if self.verify == "always":
                self.arena.bytes[START + pick.below(PAGES) * PAGE + pick.below(64)] ^= 1 << pick.below(8)
        elif what == 46:
            self.kill(place)
        else:
            self.introduce(place)
        if (self.depot.removals or self.depot.lists) and number % 2:
            self.expire()
        if number % 4 == 0:  # it looks at everything: most of a story's time
            self.index.validate()

    def end(self) -> None:
        """End all tasks; then every request must have its answer, and only sessions may hold chunks."""
        while self.tasks:
            self.end_task(0)
        while self.depot.removals or self.depot.lists:
            self.expire()
        self.index.validate()
        assert not self.asked, f"never answered: {[question.request for question in self.asked.values()]}"
        for place in list(self.clients):
            self.kill(place)
        while self.tasks:
            self.end_task(0)
        self.index.validate()
        status = self.depot.status()
        left = {
            name: getattr(status, name) for name in ("clients", "sessions", "holds", "reserved_shards", "operations")
        }
        assert not any(left.values()), left
        clear(self.index)
        assert self.index.allocator.free_bytes == self.index.allocator.capacity, "bytes belong to nobody"
        assert not self.index.records.used and not self.index.namespaces.all(), self.index.records

    def close(self) -> None:
        for mapped in self.opened:
            mapped.close()
        for client in (*self.clients.values(), *self.old):
            client.close()


def clear(index: Index) -> None:
    """Remove every chunk that nothing holds."""
    removals = Removals(index)
    removals.begin(index.namespaces.all(), None, hides=False)
    while removals:
        removals.step()


def depot(data: bytes) -> None:
    """Run a story: no exception, one answer per request, every byte right, `validate` after every step."""
    desk = Desk(Choices(data))
    try:
        for place in range(2):
            desk.join(place)
        while desk.choices:
            desk.step()
        desk.end()
    finally:
        desk.close()


def depot_seeds() -> list[bytes]:
    """Stories that contain each kind of message in its wire form, between stores and ends of copies."""
    shards = wire.Shards("r0", "m", 1, 0, ROOT, 0, b"".join(Desk.keys(0, 0, 2)), struct.pack("<4I", 0, 1, 2, 3))
    requests: list[wire.Request] = [
        wire.Store(0, 1, [shards]),
        wire.Lookup("m", 1, 2, "r0", 1, shards.hashes),
        wire.Retrieve(0, [shards]),
        wire.Register(0, VARIANTS[0].layout("kv-0"), "m", 1, 0, 2),
        wire.Register(
            0,
            VARIANTS[0].layout("kv-0"),
            "h",
            1,
            0,
            2,
            64,
            0,
            [wire.Group(0, 2, 128, bytes(32)), wire.Group(2, 2, 128, bytes([1]) * 32)],
        ),
        wire.Unregister(1),
        wire.EndSession("r0"),
        wire.Clear("m"),
        wire.Count("m"),
        wire.Prefixes("m", "bytes", 3),
        wire.Inspect("m", bytes(32)),
        wire.Describe(bytes(32), bytes(32), bytes(4 * 16), 16),
        wire.SetQuota("t", Quota(4096, 8192, 2.0, 60)),
        wire.Status(),
        wire.Noop(),
        wire.ChunkSize(),
    ]
    script = Script().below(0, 2)
    seeds = []
    for request in requests:
        for _ in range(2):
            frame = wire.encode_request(0, request)[wire.ID_BYTES :]
            script.below(19, STEPS).below(0, CLIENTS).text(frame, FRAME)
            script.below(24, STEPS).below(0, CLIENTS).below(0, 256).below(1, 6)
        seeds.append(script.data)
    return seeds
