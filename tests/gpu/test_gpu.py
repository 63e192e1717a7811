"""Copies of a real GPU's memory, by the suite of all devices. Skipped where torch finds no GPU (`make test-gpu`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvdepot.devices import open_blocks, record_event
from kvdepot.devices.accelerator import AcceleratorBlocks
from kvdepot.devices.blocks import CopyPiece
from kvdepot.devices.self_test import test_blocks as run_self_test
from kvdepot.errors import LayoutError
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol.layout import Layout, build_layout
from tests.conftest import HANG_S
from tests.devices.conformance import BlocksConformance, Case, Memory
from tests.devices.tensors import Model, Worker
from tests.devices.test_accelerator import SmallNumbers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
GPU = "cuda:0"


class TestMemoryThatIsNotRegistered(BlocksConformance):
    device = GPU


class TestRegisteredArena(BlocksConformance):
    device = GPU

    def prepare(self, case: Case) -> None:
        assert case.blocks.follow(case.arena).wait(HANG_S)

    def test_the_arena_is_registered(self) -> None:
        with self.case(Model().add("mla", 4, 2, 1, 8, "bfloat16")) as case:
            assert isinstance(case.blocks, AcceleratorBlocks) and case.blocks._buffers is not None
            registration = case.blocks._buffers.registration
            assert registration is not None and registration.registered_bytes == len(case.arena.bytes)


class TestSmallStaging(SmallNumbers, BlocksConformance):
    device = GPU

    def open(self, layout: Layout, worker: Worker) -> AcceleratorBlocks:
        storages = {f"{each.untyped_storage().data_ptr():x}": each.untyped_storage() for each in worker.tensors}
        return AcceleratorBlocks(layout, storages, torch.device(GPU), 64)


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case(Worker(GPU), Model().add("keys and values apart", 64, 16, 8, 128, "bfloat16"), _open)
    made.arena = Memory(4096)
    yield made
    made.blocks.close()


def _open(layout: Layout, worker: Worker) -> AcceleratorBlocks:
    blocks = open_blocks(layout, worker.tensors)
    assert isinstance(blocks, AcceleratorBlocks)
    return blocks


def test_the_self_test_passes_and_measures(case: Case) -> None:
    speed = run_self_test([case.blocks])
    assert speed.store_bytes_s > 0 and speed.load_bytes_s > 0
    case.assert_tensors_are(case.truth, "the self-test")


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_load_within_a_step_runs_between_earlier_and_later_work_of_the_stream(
    case: Case, is_registered: bool
) -> None:
    """The current stream is busy for a while, then writes the blocks that are loaded, and later reads them."""
    if is_registered:
        assert case.blocks.follow(case.arena).wait(HANG_S)
    size = 4 * case.layout.block_bytes
    pieces = [CopyPiece(((0, -(-size // PAGE) * PAGE),), np.array([1, 5, 2, 9]))]
    case.blocks.move(case.arena, pieces, True)
    (tensor,) = case.worker.tensors
    wanted = tensor[:, [1, 5, 2, 9]].view(torch.uint8).clone()
    torch.cuda._sleep(200_000_000)
    tensor.zero_()
    case.blocks.load_in_step(case.arena, pieces)
    found = tensor[:, [1, 5, 2, 9]].view(torch.uint8)
    assert torch.equal(found, wanted)


def test_a_store_behind_its_event_has_what_was_queued_before(case: Case) -> None:
    (tensor,) = case.worker.tensors
    torch.cuda._sleep(200_000_000)
    tensor.fill_(3.0)
    event = record_event(tensor.device)
    assert event is not None
    event.synchronize()
    size = case.layout.block_bytes
    case.blocks.move(case.arena, [CopyPiece(((0, -(-size // PAGE) * PAGE),), np.array([7]))], True)
    stored = torch.from_numpy(case.arena.bytes[:size].copy()).view(torch.bfloat16)
    assert (stored == 3.0).all()


def test_an_arena_is_registered_while_another_thread_captures_a_graph(case: Case) -> None:
    x = torch.zeros(1024, device=GPU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ended = case.blocks.follow(case.arena)
        assert ended.wait(HANG_S)
        y = x + 1
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 1).all()


def test_layers_on_two_kinds_of_devices_are_refused(case: Case) -> None:
    layout = build_layout(case.views, case.model.axes)
    with pytest.raises(LayoutError, match="must be on one device, not on cpu, cuda:0"):
        open_blocks(layout, [*case.worker.tensors, torch.zeros(4, 4)])
