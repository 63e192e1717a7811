"""What a simulated server has in shared memory: its arena and liveness files; and its index."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvdepot.core.index.chunk import Chunk
from kvdepot.core.index.runs import Reservation
from kvdepot.core.index.states import ChunkState
from kvdepot.errors import ArenaError
from kvdepot.protocol import wire
from kvdepot.tiers.worker import Load
from tests.core.wanted import WatchedIndex

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.server import Server

ShardName = tuple[
    str, str, int, int, bytes, bytes, int
]  # tenant, model, KV cache group, its reach, layout fingerprint, key, rank


@dataclass(eq=False)
class ArenaFile:
    """The arena in shared memory: it outlives its server unless that removes it."""

    name: str
    bytes: npt.NDArray[np.uint8]
    table_bytes: int
    boot: bytes = b""  # what its header says
    secret: bytes = b""  # of that server
    owner: Server | None = None  # who holds its lock
    server: Server | None = None  # who held it last
    left: dict[ShardName, int] | None = None  # shards that its last server had recorded, and their chunks' depths
    flips: set[int] = field(default_factory=set)  # where a bit of a sealed chunk was flipped
    table_flipped: bool = False  # since the last server began
    uses: dict[object, list[tuple[int, int]]] = field(default_factory=dict)  # by clients, of places in it

    @property
    def path(self) -> Path:
        return Path(self.name)

    def is_lost(self) -> bool:
        """As Arena.is_lost."""
        return False

    @property
    def start(self) -> int:
        """Where chunks begin."""
        return self.table_bytes + 64


class LivenessView:
    """The server's side of a liveness file."""

    def __init__(self, host: Host, name: str) -> None:
        found = host.liveness_files.get(name)
        if found is None:
            raise ArenaError(f"shared memory {name} cannot be opened")
        self.liveness = found
        self._host = host

    @property
    def name(self) -> str:
        return self.liveness.name

    @property
    def secret(self) -> bytes:
        return self.liveness.secret

    def is_alive(self) -> bool:
        return self.liveness.locked

    def has_left(self) -> bool:
        return self.liveness.left

    def close(self, remove: bool) -> None:
        if remove:
            self._host.liveness_files.pop(self.liveness.name, None)


class SealedIndex(WatchedIndex):
    """The index, with every seal checked against what the chunk must contain, and every eviction against the queues."""

    server: Server

    def meet(self, what: str) -> None:
        self.server.world.counters[what] += 1

    def _seal(self, chunk: Chunk, rank: int, checksum: int, born: int) -> None:
        for start, size in chunk.shards[rank].extents:
            self.server.file.flips.difference_update(range(start, start + size))
        self.server.check_bytes(chunk, rank, "sealed")
        self.server.check_carried(chunk.shards[rank])
        loads = isinstance(self.server.doing, Load)
        self.server.host.forgettings.arrived(chunk, rank, loads)
        super()._seal(chunk, rank, checksum, born)

    def mark_corrupt(self, chunk: Chunk, rank: int) -> None:
        self.server.condemned[chunk.key] = self.server.world.now
        self.server.world.counters["flip_found"] += chunk.state is not ChunkState.PENDING_REMOVAL
        super().mark_corrupt(chunk, rank)

    def reserve(self, *args: Any, **kwargs: Any) -> Reservation:
        made = super().reserve(*args, **kwargs)
        if made.refusal is not None and not isinstance(self.server.doing, wire.Store):
            self.server.world.counters["load_without_room"] += 1
        return made
