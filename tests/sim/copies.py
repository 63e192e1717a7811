"""The copies of simulated workers: the real lane on a process of its own, with memory whose bytes arrive in two halves.

A worker can be killed, stopped and slowed down in the middle of a copy, and so can its server. Of a worker that was
killed in a store, the other half may arrive up to two seconds later, as a device's DMA may run on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvdepot.client.connection import CHECK_S
from kvdepot.client.copies import Arenas
from kvdepot.client.lane import _IDLE_S as IDLE_S
from kvdepot.client.lane import Lane
from kvdepot.core.index.chunk import Chunk
from kvdepot.core.transfers import LINGER_S
from kvdepot.devices.blocks import ArenaBytes, CopyPiece
from kvdepot.devices.host import HostBlocks
from kvdepot.errors import DeviceError, Unavailable
from kvdepot.memory.allocator import Extents
from kvdepot.memory.shm import SHM
from kvdepot.protocol import wire
from tests.sim.content import Memory
from tests.sim.world import Process

if TYPE_CHECKING:
    from tests.sim.host import Client, Host
    from tests.sim.shared import ArenaFile

Bytes = npt.NDArray[np.uint8]


class _Turns:
    """The condition with which a lane's threads wake each other. Only one runs at a time, so it locks nothing."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._changes = 0

    def __enter__(self) -> None:
        for process in self._client.processes:
            process.check()

    def __exit__(self, *error: object) -> None: ...

    def notify_all(self) -> None:
        self._changes += 1
        for process in self._client.processes:
            process.poke()

    def wait(self, timeout: float) -> bool:
        before = self._changes
        return self.wait_for(lambda: self._changes != before, timeout)

    def wait_for(self, done: Callable[[], bool], timeout: float) -> bool:
        return self._client.running().wait(done, timeout, CHECK_S) or done()


class View:
    """The arena of one run of a server, as a worker has mapped it. Uses of it are locks, which end with their owner."""

    def __init__(self, host: Host, file: ArenaFile, boot: bytes) -> None:
        self.key = file.name, boot
        self.file = file
        self.bytes = file.bytes
        self._host = host

    def is_freed(self) -> bool:
        """As ArenaView.is_freed; simulated memory stays."""
        return False

    @contextlib.contextmanager
    def use(self, extents: Iterable[tuple[int, int]]) -> Iterator[Bytes]:
        """As ArenaView.use."""
        if self.file.boot != self.key[1]:
            raise Unavailable("the server that placed these chunks has been replaced")
        used = self.file.uses.setdefault(object(), list(extents))
        try:
            yield self.bytes
        finally:  # also when its process is killed
            for key in [key for key, each in self.file.uses.items() if each is used]:
                del self.file.uses[key]


class _Arenas(Arenas):
    def __init__(self, host: Host) -> None:
        super().__init__(SHM)
        self._host = host
        self._known: list[View] = []

    def of(self, name: str, boot: bytes) -> Any:
        found = next((view for view in self._known if view.key == (name, boot)), None)
        if found is not None:
            return found
        file = self._host.files.get(name)
        if self._host.world.chance(self._host.map_failures):
            self._host.world.counters["mapping_failed"] += 1
            raise Unavailable("the arena cannot be mapped")
        if file is None or file.boot != boot:
            raise Unavailable(f"arena {name} belongs to another server, or to none")
        found = View(self._host, file, boot)
        self._known = [*self._known[-1:], found]
        return found


class Blocks(HostBlocks):
    """A worker's paged KV. Each byte is as its source is when it is copied."""

    task_bytes = 6000  # a few chunks a slice

    def __init__(self, client: Client, memory: Memory) -> None:
        super().__init__(memory.layout, {mapping.name: memory.bytes for mapping in memory.layout.mappings})
        self.memory = memory
        self._client = client
        self._host = client.host
        self.copying: bool | None = None  # whether it stores; None: it copies nothing
        self.moved: list[Extents] = []  # what the last call has copied whole, while the engine held its blocks

    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        if not isinstance(arena, View):
            super().move(arena, pieces, is_store)  # into memory of the worker's own, to be compared
            return
        world, is_slow = self._host.world, self._host.world.chance(0.1)
        self.copying = is_store
        self.moved = []
        try:
            for piece in pieces:
                if world.chance(self._host.copy_failures):
                    world.counters["copy_failed"] += 1
                    raise DeviceError("a simulated device has failed")
                if self._host.at_copy is not None:
                    act, self._host.at_copy = self._host.at_copy, None
                    world.after(0, act, self._client.name)
                self._move_in_halves(arena, piece, is_store, is_slow)
                self.moved.append(piece.extents)
        finally:
            self.copying = None

    def _move_in_halves(self, arena: View, piece: CopyPiece, is_store: bool, is_slow: bool) -> None:
        world = self._host.world
        self.check(arena, piece, is_store)
        target, sources = self._target(arena, piece, is_store), None
        cut = world.random.randrange(len(target))
        before = target[cut:].copy()
        super().move(arena, [piece], is_store)
        sources, target[cut:] = target[cut:].copy(), before
        is_there = False
        try:
            self._client.running().sleep(self._host.copy_s(is_slow))
            self.check(arena, piece, is_store)
            before = target[:cut].copy()
            super().move(arena, [piece], is_store)
            target[:cut] = before
            is_there = True
        finally:
            server = self._host.server
            if not is_there and is_store and server is not None and server.boot == arena.key[1]:
                world.counters["store_arrived_after_death"] += 1
                world.after(0.9 * LINGER_S * world.random.random(), self._arrive, server, arena, piece, cut, sources)

    def _arrive(self, server: Any, arena: View, piece: CopyPiece, cut: int, data: Bytes) -> None:
        """The rest of a dead worker's store."""
        if server.alive:
            for offset, size in piece.extents:
                start = max(offset, min(each for each, _ in piece.extents) + cut)
                at = start - min(each for each, _ in piece.extents) - cut
                arena.bytes[start : offset + size] = data[at : at + max(0, offset + size - start)]

    def _target(self, arena: View, piece: CopyPiece, is_store: bool) -> Bytes:
        if not is_store:
            return self.memory.bytes
        low = min(start for start, _ in piece.extents)
        return arena.bytes[low : max(start + size for start, size in piece.extents)]

    def check(self, arena: View, piece: CopyPiece, is_store: bool) -> None:
        """A living engine's blocks are touched only while they are lent for it."""
        memory, chunk = self.memory, self._chunk(arena, piece.extents)
        if memory.dead:
            return
        fingerprint = memory.layout.fingerprint
        seeds = self._host.truth[fingerprint, chunk.key][1] if chunk is not None else None
        for i, block in enumerate(piece.block_ids.tolist()):
            what = f"{memory.name}: block {block} is {'read' if is_store else 'written'} after it was given back"
            if is_store:
                assert seeds is None or memory.tags[block] == seeds[i], what
            elif i >= piece.skip:
                lent = memory.lent.get(block)
                assert lent is not None and (seeds is None or lent == seeds[i]), what

    def _chunk(self, arena: View, extents: Extents) -> Chunk | None:
        """The chunk that has this place, if the server that placed it is still there."""
        server = self._host.server
        if server is None or not server.serving or server.boot != arena.key[1]:
            return None
        return next(
            (
                chunk
                for namespace in server.index.namespaces.all()
                for chunk in namespace.chunks.values()
                for rank, shard in chunk.shards.items()
                if shard.extents == extents and rank == self.memory.rank
            ),
            None,
        )


class SimLane(Lane):
    """A lane whose thread is a process of the simulation, which is stopped and killed with the engine's."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, "", client.now)
        self._sim = client
        self._changed: Any = _Turns(client)
        self.arenas = _Arenas(client.host)
        self._is_due = False
        self._idle_s = IDLE_S
        self._process = Process(client.host.world, f"{client.name}.lane", self._live_on)
        client.processes.append(self._process)

    def _live_on(self) -> None:
        while self._closed is None:
            pause_s = self.turn()
            # While there is nothing to do, looks at what is overdue become rare: hours would cost thousands of turns.
            is_idle = not self._live and pause_s >= IDLE_S
            self._idle_s = min(1.5 * self._idle_s, 20.0) if is_idle else IDLE_S
            pause_s = self._idle_s if is_idle else pause_s
            if not self._is_due:
                self._process.wait(self._is_woken, pause_s, pause_s)
            self._is_due = False

    def _is_woken(self) -> bool:
        return self._is_due or self._sim.hears()

    def _wake(self) -> None:
        self._is_due = True
        self._process.poke()

    def _copy(self, operation: Any) -> None:
        done, blocks, placement = operation.copied, operation.blocks, operation.placement
        try:
            super()._copy(operation)
            if isinstance(operation.request, wire.Store):
                name = placement.boot, self._sim.link.identity, placement.operation
                self._sim.host.carried.setdefault(name, []).extend(blocks.moved)
            elif isinstance(operation.request, wire.Compare):
                self._check_equal(operation, done)
        except AssertionError as exc:  # a lane fails the operation, whatever it is
            self._process.fail(exc)
            raise

    def _check_equal(self, operation: Any, done: int) -> None:
        self._sim.host.world.counters["compared"] += 1
        file = self._sim.host.files.get(operation.placement.arena)
        flips = file.flips if file is not None else set()
        for piece, found in zip(operation.pieces[done:], operation.differences[done:], strict=True):
            is_flipped = any(start <= at < start + size for start, size in piece.extents for at in flips)
            assert found == [0.0] or is_flipped, "equal KV differs"

    def close(self) -> bool:
        with self._changed:
            self._end_all(Unavailable("this client is closed"))
        self._wake()
        self._sim.running().wait(lambda: not self._process.alive, 60.0, CHECK_S)
        self._release()
        return True
