"""Blocks in the processor's memory."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from kvdepot.devices import describe
from kvdepot.devices.blocks import CopyPiece
from kvdepot.devices.host import ENTERED_BYTES, HostBlocks
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.extents import Bytes
from kvdepot.protocol.layout import Layout, Mapping, Segment, build_layout
from tests.conftest import HANG_S
from tests.devices.conformance import BlocksConformance, Memory


class TestHostBlocks(BlocksConformance): ...


class SharedFile(Memory):
    """An arena's bytes in a file in memory, of which other processes have allocated some pages."""

    def __init__(self, pages: int, allocated: range) -> None:
        self.fd = os.memfd_create("kvdepot-test")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, pages * PAGE)
        os.pwrite(self.fd, bytes(len(allocated) * PAGE), allocated.start * PAGE)
        self.mapped = mmap.mmap(self.fd, pages * PAGE)
        self.bytes = np.frombuffer(self.mapped, np.uint8)
        self.freed = False

    def is_freed(self) -> bool:
        return self.freed

    def allocated_pages(self) -> int:
        return os.fstat(self.fd).st_blocks * 512 // PAGE

    def resident_pages(self) -> int:
        """Pages that this process has entered."""
        found = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0]:
                found = line.startswith(f"{self.bytes.ctypes.data:x}-")
            elif found and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024 // PAGE
        raise AssertionError("the file is not mapped")


def paged(kv: Bytes) -> HostBlocks:
    """Blocks of a page each."""
    layout = Layout([Mapping("kv", len(kv))], [Segment(0, 0, PAGE, PAGE)], len(kv) // PAGE, bytes(32))
    return HostBlocks(layout, {"kv": kv})


def test_pages_are_entered_when_they_are_first_copied_and_holes_stay_holes() -> None:
    kv = np.arange(8 * PAGE, dtype=np.uint8)
    blocks = paged(kv)
    arena = SharedFile(256, range(64, 72))
    assert arena.resident_pages() == 0
    for _ in range(2):
        blocks.move(arena, [CopyPiece(((64 * PAGE, 8 * PAGE),), np.arange(8))], True)
        assert arena.allocated_pages() == 8
        assert arena.resident_pages() >= 8
    assert np.array_equal(arena.bytes[64 * PAGE : 72 * PAGE], kv)


def test_an_arena_that_is_followed_is_entered_before_a_copy_and_holes_stay_holes() -> None:
    blocks = paged(np.zeros(PAGE, np.uint8))
    pages = 3 * ENTERED_BYTES // PAGE
    arena = SharedFile(pages, range(pages // 3 - 100, pages // 3 + 100))  # some at the end of a part, some in the next
    assert blocks.follow(arena).wait(HANG_S)
    assert arena.resident_pages() >= 200
    assert arena.allocated_pages() == 200
    blocks.close()


def test_pages_that_are_entered_after_the_server_has_freed_them_are_freed_again() -> None:
    blocks = paged(np.zeros(PAGE, np.uint8))
    arena = SharedFile(2 * ENTERED_BYTES // PAGE, range(100))
    arena.freed = True
    assert blocks.follow(arena).wait(HANG_S)
    assert arena.allocated_pages() == 0
    blocks.close()


def test_blocks_that_are_closed_leave_the_pages_to_others_of_the_same_arena() -> None:
    first, second = paged(np.zeros(PAGE, np.uint8)), paged(np.zeros(PAGE, np.uint8))
    pages = 16 * ENTERED_BYTES // PAGE
    arena = SharedFile(pages, range(pages))
    first.follow(arena)
    ended = second.follow(arena)
    first.close()
    assert ended.wait(HANG_S)
    assert arena.resident_pages() == pages
    second.close()


def test_layers_of_equal_tensors_are_one_stack_and_others_are_not() -> None:
    """A block of a stack is copied with one call, so small chunks of many layers depend on it."""
    pool = torch.zeros(3, 3, 9, 4096, dtype=torch.uint8)  # the third part of each is not the layer's
    others = [torch.zeros(9, 512, dtype=torch.uint8), torch.zeros(9, 4096, dtype=torch.uint8)]
    views = [describe(tensor, f"layer {i}") for i, tensor in enumerate([*pool[:, :2], *others])]
    layout = build_layout(views, [1, 1, 1, 0, 0])
    storages = zip(views[2:], [pool, *others], strict=True)
    memories = {view.mapping: storage.numpy().reshape(-1) for view, storage in storages}
    stacks = HostBlocks(layout, memories)._whole.stacks
    assert [stack.planes.shape for stack in stacks] == [(3, 2, 9, 4096), (1, 1, 9, 512), (1, 1, 9, 4096)]


@pytest.mark.parametrize(("chunks", "rows"), [(64, 33), (3, 640)])
def test_a_large_copy_that_two_threads_share_moves_each_chunk_to_its_place(chunks: int, rows: int) -> None:
    size = 2 * rows * PAGE  # above the size from which on they share it
    random = np.random.default_rng(5)
    kv = random.integers(0, 256, chunks * size, np.uint8)
    half = len(kv) // 2
    segments = [Segment(0, 0, PAGE, PAGE), Segment(0, half, PAGE, PAGE)]
    layout = Layout([Mapping("kv", len(kv))], segments, chunks * rows, bytes(32))
    blocks, arena = HostBlocks(layout, {"kv": kv}), Memory(2 * chunks * rows)
    order = random.permutation(chunks)
    ids = [np.arange(rows * chunk, rows * (chunk + 1)) for chunk in order]
    pieces = [CopyPiece(((at * size, size),), each) for at, each in enumerate(ids)]
    blocks.move(arena, pieces, is_store=True)
    parts = kv.reshape(2, chunks, -1)[:, order]
    assert (arena.bytes.reshape(chunks, 2, -1) == parts.transpose(1, 0, 2)).all()
    before = kv.copy()
    kv[:] = 0
    blocks.move(arena, pieces, is_store=False)
    assert (kv == before).all()
    blocks.close()
    blocks.close()
