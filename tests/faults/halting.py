"""A worker's blocks whose process stops itself (SIGSTOP) within a copy; then a test kills it, or has it go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence

from kvdepot.client.worker import WorkerClient
from kvdepot.devices.blocks import ArenaBytes, BlockMemory, CopyPiece
from kvdepot.memory.extents import Bytes, views
from kvdepot.protocol.layout import Segment

STEPS = ("placed", "copying", "half", "copied")
"""Where the process stops: the server has placed the chunks; their copy has begun, and no byte has moved; half of them
are copied, and a part of the next; all are, and the server has not been told."""


class HaltingBlocks(BlockMemory):
    """Other blocks, which are copied chunk by chunk."""

    def __init__(self, blocks: BlockMemory) -> None:
        self.layout, self.device, self._blocks = blocks.layout, blocks.device, blocks
        self._step = ""
        self._left = 0

    def arm(self, step: str, chunks: int) -> None:
        """Stop once, at a step of the next copy, which has this many chunks."""
        self._step, self._left = step, {"half": chunks // 2, "copied": chunks - 1}.get(step, 0)

    def _is_at(self, step: str) -> bool:
        return step == self._step and not self._left

    def _halt(self) -> None:
        self._step = ""
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # another thread may take what is sent to a process

    @property
    def task_bytes(self) -> int:  # type: ignore[override]
        """The lane asks for it before it begins to copy a slice."""
        if self._is_at("placed"):
            self._halt()
        return 1

    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        (piece,) = pieces
        if self._is_at("copying"):
            self._halt()
        if self._is_at("half"):
            self._move_a_part(arena, piece, is_store)
            self._halt()
        self._blocks.move(arena, pieces, is_store)
        if self._is_at("copied"):
            self._halt()
        self._left -= 1

    def _move_a_part(self, arena: ArenaBytes, piece: CopyPiece, is_store: bool) -> None:
        """The first half of the first segment, of one block."""
        segment, block = self.layout.segments[0], int(piece.block_ids[0])
        in_arena, data = views(arena.bytes, piece.extents, 0, segment.size // 2)[0], self.read(segment, block)
        if is_store:
            in_arena[:] = data[: len(in_arena)]
        else:
            data[: len(in_arena)] = in_arena
            self.write(segment, block, data)

    def load_in_step(self, arena: ArenaBytes, pieces: Sequence[CopyPiece]) -> None:
        self._blocks.load_in_step(arena, pieces)

    def read(self, segment: Segment, block: int) -> Bytes:
        return self._blocks.read(segment, block)

    def write(self, segment: Segment, block: int, data: Bytes) -> None:
        self._blocks.write(segment, block, data)

    def close(self) -> None:
        self._blocks.close()


def halt(worker: WorkerClient, step: str, chunks: int, group: int) -> None:
    """Have this process stop once, in the next copy of a KV cache group. Nothing of it may be under way."""
    instance = worker.instance_id + group
    blocks = worker.lane.memory(instance)
    assert blocks is not None
    if not isinstance(blocks, HaltingBlocks):
        blocks = HaltingBlocks(blocks)
        worker.lane.add(instance, blocks)
    blocks.arm(step, chunks)
