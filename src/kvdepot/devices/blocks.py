"""The interface of a worker's paged KV to whoever copies it (client/lane.py, integrations/vllm/in_step.py).

Each kind of device has a subclass of `BlockMemory` that moves the bytes: host.py for tensors in the processor's
memory, accelerator.py for those of a GPU. All run in the engine's worker, on the lane's thread, or on the engine's
within a step.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvdepot.memory.allocator import Extents
from kvdepot.memory.extents import Bytes, Ids
from kvdepot.protocol.layout import Layout, Segment

if TYPE_CHECKING:
    import torch


class DeviceEvent(Protocol):
    """An event on a device's stream, such as torch.cuda.Event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class ArenaBytes(Protocol):
    """The part of `arena_view.ArenaView` that copies use. One object is one mapping."""

    bytes: Bytes

    def is_freed(self) -> bool:
        """Whether its server has removed it and freed its memory, which nobody used any more."""


@dataclass(eq=False)
class Scratch:
    """Memory of this process in place of an arena."""

    bytes: Bytes

    def is_freed(self) -> bool:
        return False


@dataclass(slots=True)
class CopyPiece:
    """One chunk of one rank: its extents in the arena, and its blocks. A load does not write the first `skip`."""

    extents: Extents
    block_ids: Ids
    skip: int = 0


class BlockMemory(ABC):
    """The paged KV of one KV cache group, in this process. One thread at a time moves bytes with `move`; another may
    use `load_in_step` meanwhile, for other blocks."""

    layout: Layout
    device: torch.device | None
    """None: the processor's memory, where no work is queued."""
    task_bytes: int
    """Approximate bytes to give to one `move`: enough to make the cost of the call negligible, but so few that a load
    which has become due does not wait long."""

    @abstractmethod
    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        """Copy blocks into the arena, or back. Blocks until every byte has arrived. Raises DeviceError."""

    @abstractmethod
    def load_in_step(self, arena: ArenaBytes, pieces: Sequence[CopyPiece]) -> None:
        """Copy chunks into blocks before whatever the calling thread queues next on its device reads them.

        Blocks until the arena has been read, so that its use may end; an accelerator's current stream then waits for
        the blocks. Raises DeviceError, after which some of the blocks may have been written.
        """

    @abstractmethod
    def read(self, segment: Segment, block: int) -> Bytes:
        """A copy of one segment of one block: slow, and independent of `move`, which the self-test compares with it."""

    @abstractmethod
    def write(self, segment: Segment, block: int, data: Bytes) -> None:
        """Write one segment of one block, by itself. Blocks until it is there."""

    def follow(self, arena: ArenaBytes | None) -> threading.Event:
        """Prepare for copies to and from this arena in the background, and undo the preparation for the arena before.
        None: only undo it. Copies work meanwhile. Never blocks or raises: unprepared copies are slower.

        Returns an event that is set once the preparation has ended.
        """
        ended = threading.Event()
        ended.set()
        return ended

    @abstractmethod
    def close(self) -> None:
        """Release buffers, and whatever `follow` prepared. No copy may be in progress. May be called twice."""
