"""A depot without a server: messages and outcomes in, replies and copies out; no socket, no thread, no byte moved."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvdepot.config import Config
from kvdepot.core.depot import Depot, Reply
from kvdepot.core.index.index import Index
from kvdepot.devices.cpu import HostTensors
from kvdepot.errors import KVDepotError
from kvdepot.eviction import Lru
from kvdepot.keys import ChunkChain, derive_root
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.copier import Call, Copy, Mapped
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout, Mapping, Segment
from tests.conftest import clear

BLOCKS = 64
BLOCK = PAGE // 2
PER_CHUNK = 2  # blocks a chunk, so a chunk takes one page


def layout(fingerprint: bytes = b"f" * 32, block: int = BLOCK) -> Layout:
    return Layout([Mapping("kv", BLOCKS * block)], [Segment(0, 0, block, block)], BLOCKS, fingerprint)


def prompt(name: str, chunks: int) -> ChunkChain:
    chain = ChunkChain(1, derive_root(("salt", name)))
    chain.extend(range(chunks))
    return chain


@dataclass
class Page:
    """A client's lease."""

    fence: int = 0


@dataclass
class Tensors(HostTensors):
    """Mapped tensors of a client without any memory behind them, which know when they are unmapped."""

    closed: bool = False

    def close(self) -> None:
        assert not self.closed, "unmapped twice"
        self.closed = True
        super().close()


@dataclass
class Desk:
    """A depot, what it asked for that has not ended yet, and what it answered."""

    pages: int = 64
    settings: dict[str, Any] = field(default_factory=dict)
    map_layout: Callable[[Layout], Mapped] | None = None

    def __post_init__(self) -> None:
        self.index = Index(Allocator(0, self.pages * PAGE), Lru(), ttl_s=self.settings.get("ttl_s", 0))
        self.mapped: list[Tensors] = []
        config = Config(url="ipc:///nowhere", chunk_size=1, **self.settings)
        self.depot = Depot(config, self.index, self.map_layout or self.map)
        self.tasks: list[Copy | Call] = []
        self.answers: dict[tuple[bytes, bytes], Any] = {}
        self.leases: dict[bytes, Page] = {}
        self._numbers = itertools.count(1)

    def map(self, given: Layout) -> Mapped:
        self.mapped.append(Tensors(given))
        return self.mapped[-1]

    def hello(self, client: bytes = b"one") -> bytes:
        self.leases[client] = Page()
        self.depot.hello(client, self.leases[client])
        return client

    def take(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Reply):
                asked = (action.client, action.number)
                assert asked not in self.answers, f"{asked} was answered twice"
                assert self.depot.knows(action.client), f"{asked} was answered to the dead"
                self.answers[asked] = action.value
                continue
            if isinstance(action, Copy):
                assert not getattr(action.mapped, "closed", False), "a copy for tensors that are unmapped"
            self.tasks.append(action)

    def send(self, client: bytes, request: wire.Request) -> tuple[bytes, bytes]:
        number = next(self._numbers).to_bytes(8, "little")
        self.take(self.depot.handle(client, number, request))
        return client, number

    def finish(self, task: Copy | Call, outcome: bool | None = None) -> None:
        """Let a task end; a copy as its fence says unless told otherwise."""
        self.tasks = [other for other in self.tasks if other is not task]
        result: Any
        if isinstance(task, Call):
            try:
                result = task.run()
            except KVDepotError as exc:
                result = exc
            busy = [t for t in self.tasks if isinstance(t, Copy) and getattr(t.mapped, "closed", False)]
            assert not busy, "tensors were unmapped during a copy"
        else:
            arrived = task.fence is None or task.fence() < task.ticket
            result = [0] * len(task.pieces) if (arrived if outcome is None else outcome) else None
        self.take(self.depot.finished(task.token, result))

    def settle(self) -> None:
        while self.tasks or self.depot.removals:
            if self.tasks:
                self.finish(self.tasks[0])
            else:
                self.go_on()

    def go_on(self) -> None:
        """A turn of the server's loop in which nothing has arrived."""
        self.take(self.depot.expire(self.depot.now))

    def ask(self, client: bytes, request: wire.Request) -> Any:
        """Send, let everything end, and give the answer."""
        asked = self.send(client, request)
        self.settle()
        return self.answers[asked]

    def register(self, client: bytes, instance: int = 1, **options: Any) -> None:
        assert self.ask(client, wire.Register(instance, layout(**options))) is None

    def die(self, client: bytes) -> None:
        self.take(self.depot.died(client))

    def copies(self) -> list[Copy]:
        return [task for task in self.tasks if isinstance(task, Copy)]

    def assert_empty(self) -> None:
        clear(self.index)
        self.index.validate()
        counts = (self.index.chunks, self.index.reserved, self.index.held, self.depot.operations)
        assert counts == (0, 0, 0, 0)
        assert self.index.allocator.free_bytes == self.index.allocator.capacity


def shards(
    chain: ChunkChain,
    first: int = 0,
    end: int = 0,
    model: str = "m",
    request: str = "r",
    world_size: int = 1,
    rank: int = 0,
    blocks: list[int] | None = None,
    skip: int = 0,
) -> wire.Shards:
    end = end or len(chain)
    ids = list(range((end - first) * PER_CHUNK)) if blocks is None else blocks
    packed = np.array(ids, "<u4").tobytes()
    return wire.Shards(
        request, model, world_size, rank, chain.parent(first), first, chain.slice(first, end), packed, skip
    )


def store(chain: ChunkChain, instance: int = 1, ticket: int = 1, **options: Any) -> wire.Store:
    return wire.Store(instance, ticket, [shards(chain, **options)])


def retrieve(chain: ChunkChain, instance: int = 1, **options: Any) -> wire.Retrieve:
    return wire.Retrieve(instance, [shards(chain, **options)])


def lookup(chain: ChunkChain, request: str = "r", model: str = "m", readers: int = 1, **options: Any) -> wire.Lookup:
    return wire.Lookup(model, options.get("world_size", 1), PER_CHUNK, request, readers, bytes(chain.hashes))
