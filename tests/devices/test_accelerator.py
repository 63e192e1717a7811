"""Blocks of an accelerator, on torch's device "cpu", where the same lines run."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvdepot.devices import BlockMemory, accelerator, registration
from kvdepot.devices.accelerator import AcceleratorBlocks
from kvdepot.devices.blocks import CopyPiece
from kvdepot.errors import DeviceError
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol.layout import Layout, build_layout
from tests.conftest import HANG_S
from tests.devices.conformance import BlocksConformance, Case, Memory, any_draw, any_model
from tests.devices.tensors import Model, Worker

CPU = torch.device("cpu")


def opened(layout: Layout, worker: Worker, staging_bytes: int = accelerator.STAGING_BYTES) -> AcceleratorBlocks:
    storages = {f"{each.untyped_storage().data_ptr():x}": each.untyped_storage() for each in worker.tensors}
    return AcceleratorBlocks(layout, storages, CPU, staging_bytes)


class TestAcceleratorBlocks(BlocksConformance):
    """As it is."""

    def open(self, layout: Layout, worker: Worker) -> BlockMemory:
        return opened(layout, worker)


def locked_bytes(arena: Memory) -> int:
    """Bytes of an arena that the kernel keeps locked, as the driver of a GPU would."""
    start, found, size = arena.bytes.ctypes.data, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head:
            first, end = (int(each, 16) for each in head.split("-"))
            found = first < start + len(arena.bytes) and start < end
        elif found and head == "Locked:":
            size += int(line.split()[1]) * 1024
    return size


class SmallNumbers:
    """Limits so small that chunks of a few bytes cross them."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _small(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accelerator, "_DIRECT_BYTES", 2048)
            patch.setattr(accelerator, "_BOUNCE_BYTES", 96)
            patch.setattr(accelerator, "_MOST_IDS", 7)
            for module in (accelerator, registration):
                patch.setattr(module, "PIECE_BYTES", 8 * PAGE)
            yield


class TestSmallStaging(SmallNumbers, BlocksConformance):
    """Chunks, segments and rows that do not fit into the buffers, and memory that is not registered."""

    def open(self, layout: Layout, worker: Worker) -> BlockMemory:
        return opened(layout, worker, 64)


class TestRegisteredArena(SmallNumbers, BlocksConformance):
    """The arena's pieces are registered, and copied directly."""

    def open(self, layout: Layout, worker: Worker) -> BlockMemory:
        return opened(layout, worker, 1024)

    def prepare(self, case: Case) -> None:
        assert case.blocks.follow(case.arena).wait(HANG_S)

    def test_the_arena_is_registered(self) -> None:
        with self.case(Model().add("mla", 4, 2, 1, 8, "bfloat16")) as case:
            assert locked_bytes(case.arena) == len(case.arena.bytes)


@any_draw
def test_any_staging_size_brings_every_block_there_and_back(draw: random.Random) -> None:
    count = draw.randint(1, 9)
    suite = TestSmallStaging()
    suite.open = lambda layout, worker: opened(layout, worker, 16 * draw.randint(1, 600))  # type: ignore[method-assign]
    with suite.case(any_model(draw, count)) as case:
        order = draw.sample(range(count), count)
        size = count * case.layout.block_bytes
        if size <= len(case.arena.bytes):
            case.there_and_back([order], [order[::-1]], [((0, size),)], [draw.randint(0, count)])


def one_layer(blocks: int = 8) -> tuple[torch.Tensor, Layout, Worker]:
    worker = Worker()
    model = Model().add("mla", blocks, 4, 1, 512, "bfloat16")  # a page a block
    layout = build_layout(worker.make(model), model.axes)
    worker.write([np.random.default_rng(3).integers(0, 256, size, np.uint8) for size in model.sizes])
    return worker.tensors[0].view(torch.uint8).reshape(blocks, PAGE), layout, worker


def assert_copies(blocks: BlockMemory, tensor: torch.Tensor, arena: Memory) -> None:
    blocks.move(arena, [CopyPiece(((PAGE, 3 * PAGE),), np.array([2, 0, 5]))], True)
    assert np.array_equal(arena.bytes[PAGE : 4 * PAGE], tensor[[2, 0, 5]].numpy().reshape(-1))


class TestRegistration:
    @pytest.fixture(autouse=True)
    def _pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (accelerator, registration):
            monkeypatch.setattr(module, "PIECE_BYTES", 2 * PAGE)

    def test_all_groups_share_one_registration_until_the_last_is_closed(self) -> None:
        _, layout, worker = one_layer()
        arena, groups = Memory(8), [opened(layout, worker) for _ in range(3)]
        assert all(group.follow(arena).wait(HANG_S) for group in groups)
        assert locked_bytes(arena) == 8 * PAGE
        groups.pop().close()
        groups.pop().close()
        assert locked_bytes(arena) == 8 * PAGE
        groups.pop().close()
        assert locked_bytes(arena) == 0

    def test_an_arena_that_is_followed_again_is_registered_again(self) -> None:
        tensor, layout, worker = one_layer()
        blocks, arena, other = opened(layout, worker), Memory(8), Memory(8)
        for each in (arena, other, None, arena):
            assert blocks.follow(each).wait(HANG_S)
            assert_copies(blocks, tensor, arena)
            assert_copies(blocks, tensor, other)
        assert locked_bytes(arena) == 8 * PAGE
        blocks.close()
        assert locked_bytes(arena) == locked_bytes(other) == 0

    def test_an_arena_that_cannot_be_registered_is_copied_through_a_buffer(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        tensor, layout, worker = one_layer()
        blocks, arena = opened(layout, worker), Memory(8)
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(arena.bytes.ctypes.data + 6 * PAGE, 2 * PAGE, 0) == 0  # the kernel does not lock it
        assert blocks.follow(arena).wait(HANG_S)
        assert [record.getMessage() for record in caplog.records] == [
            "copies to and from cpu are slower: 0 of 0 MiB of the arena could be registered: Cannot allocate memory"
        ]
        assert locked_bytes(arena) == 6 * PAGE
        assert_copies(blocks, tensor, arena)
        blocks.close()
        assert locked_bytes(arena) == 0


_LITTLE_MEMORY = """
import resource
from pathlib import Path
import torch
from kvdepot.devices import describe
from kvdepot.devices.accelerator import AcceleratorBlocks
from kvdepot.errors import DeviceError
from kvdepot.protocol.layout import build_layout
tensor = torch.zeros(4, 4096, dtype=torch.uint8)
layout = build_layout([describe(tensor, "a layer")], [0])
storages = {layout.mappings[0].name: tensor.untyped_storage()}
for spare_mib in 4, 30, 100, 400:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (spare_mib << 20), -1))
    try:
        blocks = AcceleratorBlocks(layout, storages, torch.device("cpu"))
        print(blocks.task_bytes >> 20)
        blocks.close()
    except DeviceError as exc:
        print(exc)
"""


def test_staging_is_smaller_where_memory_lacks_and_refused_below_4_mib() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LITTLE_MEMORY], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    refused, *sizes = done.stdout.splitlines() or [done.stderr]
    assert sizes == ["16", "64", "128"]
    assert refused.startswith("cpu has no memory for two staging buffers of 4 MiB: let the engine take less of it")


def test_groups_of_a_device_share_their_buffers_and_the_last_frees_them() -> None:
    _, layout, worker = one_layer()
    groups = [opened(layout, worker, 4096) for _ in range(2)]
    buffers = weakref.ref(groups[0]._buffers)
    assert groups[1]._buffers is buffers()
    groups[0].close()
    assert buffers() is not None
    groups[1].close()
    assert buffers() is None


def test_blocks_opened_and_loaded_in_inference_mode_can_be_used_outside() -> None:
    """As engines run, and the lane's thread does not."""
    tensor, layout, worker = one_layer()
    arena = Memory(8)
    with torch.inference_mode():
        blocks = opened(layout, worker, 4 * PAGE)
    pieces = [CopyPiece(((0, 3 * PAGE),), np.array([2, 0, 5]))]
    blocks.move(arena, pieces, True)
    wanted = tensor[[2, 0, 5]].clone()
    for in_inference in (True, False):
        worker.write([np.zeros(8 * PAGE, np.uint8)])
        with torch.inference_mode(in_inference):
            blocks.load_in_step(arena, pieces)
        blocks.move(arena, pieces, False)
        assert torch.equal(tensor[[2, 0, 5]], wanted)
    blocks.close()


def test_blocks_that_are_closed_refuse_copies() -> None:
    _, layout, worker = one_layer()
    blocks = opened(layout, worker, 4096)
    blocks.close()
    for copy in (lambda: blocks.move(Memory(1), [], True), lambda: blocks.load_in_step(Memory(1), [])):
        with pytest.raises(DeviceError, match="these blocks are closed"):
            copy()


def test_an_error_of_torch_is_a_device_error_and_the_next_copy_works() -> None:
    tensor, layout, worker = one_layer()
    blocks, arena = opened(layout, worker), Memory(8)
    with pytest.raises(DeviceError, match="blocks on cpu could not be copied: index 8 is out of bounds"):
        blocks.move(arena, [CopyPiece(((0, PAGE),), np.array([8]))], True)  # torch checks what the caller should have
    assert_copies(blocks, tensor, arena)
    blocks.close()
