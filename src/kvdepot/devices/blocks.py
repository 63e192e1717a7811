"""The interface of a worker's paged KV to whoever copies it (client/lane.py, integrations/vllm/in_step.py).

Each kind of device has a subclass of `BlockMemory` that moves the bytes: host.py for tensors in the processor's memory,
accelerator.py for those of a GPU. All run in the engine's worker, on the lane's thread, or on the engine's within a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvdepot.memory.allocator import Extents
from kvdepot.memory.extents import Bytes, Ids
from kvdepot.protocol.layout import Layout

if TYPE_CHECKING:
    import torch


class ArenaBytes(Protocol):
    """The part of `arena_view.ArenaView` that copies use. One object is one mapping."""

    bytes: Bytes


@dataclass(slots=True)
class CopyPiece:
    """One chunk of one rank: its extents in the arena, and its blocks. A load does not write the first `skip` blocks."""

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
    """Approximate bytes to give to one `move`: large enough to make its cost negligible, small enough that a load
    which has become due need not wait long."""

    @abstractmethod
    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        """Copy blocks into the arena, or back. Blocks until every byte has arrived. Raises DeviceError."""

    @abstractmethod
    def load_in_step(self, arena: ArenaBytes, pieces: Sequence[CopyPiece]) -> None:
        """Copy chunks into blocks before whatever the calling thread queues next on its device reads them. Blocks on
        the processor's memory; on an accelerator, the current stream waits. Raises DeviceError."""

    def follow(self, arena: ArenaBytes) -> None:
        """Prepare for copies to and from this arena, such as by registering it with the device's driver, in the
        background; copies work before it has ended. Never blocks. Raises nothing: what cannot be had is slower."""

    @abstractmethod
    def close(self) -> None:
        """Release buffers, and whatever `follow` registered. No copy may be in progress. May be called twice."""
