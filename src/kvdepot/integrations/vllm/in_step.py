"""Small loads within the step that computes the rest of the prompt: workers copy the chunks from the arena themselves.

Used by scheduler.py and worker.py. A load by the lane costs a request one step, because vLLM schedules the request once
the load has ended. vLLM can also load within a step, but cannot take that back once the next step is scheduled. So such
a load must not fail. Invariant: once the load is promised, nothing is asked of the server. A live server keeps the
chunks for the request's session. The scheduler uses their places in the arena (memory/arena_view.py) until the workers
have copied them, so that the successor of a dead server gives that memory to nobody before. The scheduler learns of the
copies by the step's output, or at once if the only worker runs in its process.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.logger import init_logger

from kvdepot.client.scheduler import Cached
from kvdepot.client.transfer import Operation
from kvdepot.devices.blocks import CopyPiece
from kvdepot.errors import KVDepotError
from kvdepot.memory.allocator import Extents
from kvdepot.memory.arena_view import ArenaView
from kvdepot.memory.extents import checksum
from kvdepot.protocol import wire

if TYPE_CHECKING:
    from kvdepot.client.copies import Arenas
    from kvdepot.devices.blocks import BlockMemory

log = init_logger(__name__)

_STEP_BYTES = wire.MAX_PLACED_BYTES
"""A step copies at most this many bytes on each rank: the other requests of the step wait some 10 ms for them."""


_uses_by_request: dict[str, ExitStack] = {}
"""Uses of the arena by steps of engines with one rank, by the id of the last request that such a step loads."""


class StepLoad(NamedTuple):
    """Chunks that workers are to copy before the step computes. blocks: block ids of all chunks; the first `skip` are
    not written. run: the run of the server in whose arena the chunks are. ranks: for each rank, the extents of its
    shards. size: bytes of a shard."""

    request_id: str
    run: bytes
    blocks: list[int]
    skip: int
    ranks: list[list[Extents]]
    size: int


class MappedArena(NamedTuple):
    """The arena that a worker has mapped (empty: none), the run of its server, and the fingerprint of the worker's
    layout."""

    name: str = ""
    run: bytes = b""
    layout: bytes = b""


class StepLoads:
    """The scheduler's part: it decides which loads happen within a step."""

    def __init__(self, ranks: int) -> None:
        """ranks: number of workers that load."""
        self._ranks = ranks
        self.folder = Path()
        """The arena's folder, as the scheduler's client sees it."""
        self._mapped: dict[int, MappedArena] = {}
        self._view: ArenaView | None = None
        self._promised = ExitStack()  # the arena's uses by the step that is being scheduled
        self._uses: dict[int, ExitStack] = {}  # by step, until its output is back
        self._left = _STEP_BYTES  # bytes that the step being scheduled may still load

    @property
    def arena(self) -> MappedArena:
        """The arena that all ranks have mapped; empty if they have not."""
        found = {*self._mapped.values()}
        return found.pop() if len(self._mapped) == self._ranks and len(found) == 1 else MappedArena()

    def mapped(self, ranks: dict[int, MappedArena]) -> None:
        self._mapped |= ranks

    def has_room(self, found: Cached, first: int, end: int) -> bool:
        """Whether chunks `[first, end)` of what was found can be loaded within the step that is being scheduled, as far
        as that is known without reading them."""
        held, run = found.held, self.arena.run
        if held is None or not run or run != found.incarnation or first < held.first:
            return False
        return (end - first) * held.size <= self._left

    def promise(self, found: Cached, first: int, end: int) -> bool:
        """Whether chunks `[first, end)` of what was found are loaded within the step that is being scheduled.

        Ask it while a server is there.
        """
        held, arena = found.held, self.arena
        if held is None or not self.has_room(found, first, end):
            return False
        try:
            if self._view is None or self._view.key != arena[:2]:
                self._view = ArenaView(self.folder, *arena[:2], mmap.ACCESS_READ)
            places = [place for rank in held.ranks for place in rank[first - held.first : end - held.first]]
            self._promised.enter_context(self._view.use(each for place in places for each in place.extents))
        except (KVDepotError, OSError, ValueError):  # another server is taking the arena over, or has done so
            return False
        for place in places:
            if place.checksum and checksum(self._view.bytes, place.extents, held.size) != place.checksum:
                return False  # a wrong checksum: the server finds it, too, and marks the chunk
        if self._view.withdrawals() != held.withdrawals:
            return False
        self._left -= (end - first) * held.size
        return True

    def built(self, step: int, loads: Sequence[StepLoad]) -> None:
        self._left = _STEP_BYTES
        if loads:
            self._uses[step] = self._promised.pop_all()
            if self._ranks == 1:
                _uses_by_request[loads[-1].request_id] = self._uses[step]
        self._promised.close()

    def ended(self, step: int) -> None:
        for each in [each for each in self._uses if each <= step]:
            self._close(self._uses.pop(each))

    def _close(self, use: ExitStack) -> None:
        use.close()
        for request_id in [request_id for request_id, each in list(_uses_by_request.items()) if each is use]:
            del _uses_by_request[request_id]

    def close(self) -> None:
        for use in (self._promised, *self._uses.values()):
            self._close(use)
        self._uses.clear()


class StepCopies:
    """A worker's part: it has mapped the arena."""

    def __init__(self, blocks: BlockMemory, arenas: Arenas) -> None:
        """blocks: the paged KV of this process. arenas: the arenas that this process has mapped."""
        self.mapped = MappedArena()
        self._blocks, self._arenas = blocks, arenas
        self._views: list[ArenaView] = []  # arenas of this run and of the run before, from which a step may still load
        self._tried = "", b""

    def follow(self, arena: tuple[str, bytes]) -> None:
        """Map the arena of the server that has welcomed this worker, unless that was tried before."""
        if arena == self._tried:
            return
        self._tried = arena
        try:
            self._views = [*self._views[-1:], self._arenas.of(*arena)]
            self._blocks.follow(self._views[-1])
            self.mapped = MappedArena(*arena, self._blocks.layout.fingerprint)
        except (KVDepotError, OSError, LookupError, RuntimeError, ValueError) as exc:  # or no address space
            log.info("kvdepot: small loads take a step of their own: %s", exc)

    def copy(self, load: StepLoad, rank: int) -> Operation:
        """Copy the rank's shards into its blocks. Blocks until all bytes are there; on an accelerator, work that is
        queued next on the current stream waits for them."""
        began, places = time.monotonic(), load.ranks[rank]
        view = next(view for view in self._views if view.key[1] == load.run)
        ids = np.array(load.blocks, np.intp).reshape(len(places), -1)
        skips = [load.skip, *[0] * (len(places) - 1)]
        pieces = [CopyPiece(*each) for each in zip(places, ids, skips, strict=True)]
        self._blocks.load_in_step(view, pieces)
        if (use := _uses_by_request.pop(load.request_id, None)) is not None:  # the scheduler is in this process
            use.close()
        size = len(places) * load.size - load.skip * self._blocks.layout.block_bytes
        return Operation("retrieve", [load.request_id], time.monotonic() - began, len(places), len(places), size)
