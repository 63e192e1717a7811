"""A core without a server, and requests for it: no socket, no thread, no byte moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdepot.config import Config
from kvdepot.core.admission import stored_salts
from kvdepot.core.index.index import Index
from kvdepot.devices.cpu import HostTensors
from kvdepot.errors import KVDepotError
from kvdepot.eviction import POLICIES
from kvdepot.keys import ChunkChain, derive_root
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.copier import Call, Copy, Mapped
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout, Mapping, Segment
from kvdepot.tiers import TierConfig
from tests.conftest import clear
from tests.core.groups import BLOCKS as PER_CHUNK
from tests.core.groups import Reaches, fingerprint, wire_groups
from tests.harness import Harness

BLOCKS = 64
BLOCK = PAGE // PER_CHUNK  # so a chunk takes one page


def layout(fingerprint: bytes = b"f" * 32, block: int = BLOCK) -> Layout:
    return Layout([Mapping("kv", BLOCKS * block)], [Segment(0, 0, block, block)], BLOCKS, fingerprint)


def prompt(name: str, chunks: int) -> ChunkChain:
    chain = ChunkChain(1, derive_root(("salt", name)))
    chain.extend(range(chunks))
    return chain


@dataclass
class Tensors(HostTensors):
    """Mapped tensors of a client without any memory behind them, which know when they are unmapped."""

    closed: bool = False

    def close(self) -> None:
        assert not self.closed, "unmapped twice"
        self.closed = True
        super().close()


class Desk(Harness):
    """A core whose tasks wait until the test lets them end; no byte is moved."""

    def __init__(
        self,
        pages: int = 64,
        settings: dict[str, Any] | None = None,
        map_layout: Callable[[Layout], Mapped] | None = None,
        tiers: Sequence[TierConfig] = (),
        policy: str = "lru",
    ) -> None:
        config = Config(url="ipc:///nowhere", chunk_size=1, **(settings or {}))
        index = Index(
            Allocator(0, pages * PAGE), POLICIES[policy], ttl_s=config.ttl_s, chunk_tokens=config.chunk_tokens,
            salt_ttls=stored_salts(config.salt_ttls, ["blue", "red"]),
        )  # fmt: skip
        self.mapped: list[Tensors] = []
        super().__init__(config, index, map_layout or self.map, tiers, tenant=lambda user: user)

    def map(self, given: Layout) -> Mapped:
        self.mapped.append(Tensors(given))
        return self.mapped[-1]

    def submitted(self, task: Copy | Call) -> None:
        assert not isinstance(task, Copy) or not getattr(task.mapped, "closed", False), "a copy of unmapped tensors"
        super().submitted(task)

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
        self.finished(task.token, result)

    def settle(self) -> None:
        while self.tasks or self.depot.removals:
            if self.tasks:
                self.finish(self.tasks[0])
            else:
                self.expire()

    def ask(self, client: bytes, request: wire.Request) -> Any:
        """Send, let everything end, and give the answer."""
        asked = self.send(client, request)
        self.settle()
        return self.answers[asked]

    def register(self, client: bytes, instance: int = 1, **options: Any) -> None:
        assert self.ask(client, wire.Register(instance, layout(**options))) is None

    def register_groups(self, reaches: Reaches, world_size: int = 1, client: bytes = b"one", **options: Any) -> None:
        """Register each group of each rank under the instance number that `instance_of` tells."""
        for rank in range(world_size):
            for request in group_requests(reaches, world_size, rank, **options):
                assert self.ask(client, request) is None

    def copies(self) -> list[Copy]:
        return [task for task in self.tasks if isinstance(task, Copy)]

    def assert_empty(self) -> None:
        clear(self.index)
        self.index.validate()
        counts = (self.index.chunks, self.index.reserved, self.index.held, self.depot.operations)
        assert counts == (0, 0, 0, 0)
        assert self.index.allocator.free_bytes == self.index.allocator.capacity


def instance_of(reaches: Reaches, group: int, rank: int = 0) -> int:
    """The number under which `register_groups` registers a group of a rank."""
    return 1 + rank * len(reaches) + group


def group_requests(
    reaches: Reaches, world_size: int = 1, rank: int = 0, model: str = "m", chunk_tokens: int = 0
) -> list[wire.Register]:
    """One rank's registrations of its KV cache groups."""
    groups = wire_groups(reaches, rank)
    return [
        wire.Register(
            instance_of(reaches, number, rank), layout(fingerprint(number, rank)), model, world_size, rank, PER_CHUNK,
            chunk_tokens, number, groups,
        )
        for number in range(len(reaches))
    ]  # fmt: skip


def group_stores(
    reaches: Reaches, chain: ChunkChain, parts: Sequence[Iterable[int]] | None = None, world_size: int = 1, **more: Any
) -> list[wire.Store]:
    """Stores of parts of a prompt on every rank. parts: numbers of chunks by group; by default what resuming at the
    prompt's end needs."""
    needed = [range(max(0, len(chain) - reach) if reach else 0, len(chain)) for reach in reaches]
    return [
        store(chain, instance_of(reaches, group, rank), first=i, end=i + 1, world_size=world_size, rank=rank, **more)
        for group, numbers in enumerate(needed if parts is None else parts)
        for i in numbers
        for rank in range(world_size)
    ]


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
