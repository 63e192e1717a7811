"""The self-test of copies: what it finds, and that it leaves the blocks as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from kvdepot.devices import BlockMemory
from kvdepot.devices.accelerator import AcceleratorBlocks
from kvdepot.devices.blocks import ArenaBytes, CopyPiece
from kvdepot.devices.host import HostBlocks
from kvdepot.devices.self_test import test_blocks as run_self_test
from kvdepot.errors import DeviceError
from kvdepot.protocol.layout import Segment, build_layout
from tests.conftest import HANG_S
from tests.devices.tensors import KINDS, Bytes, Model, Worker


class Engine:
    """Several groups of blocks, and all bytes of their storages."""

    def __init__(self, kind: type[BlockMemory], *models: Model) -> None:
        self.groups: list[BlockMemory] = []
        self.workers: list[Worker] = []
        for model in models:
            worker = Worker()
            layout = build_layout(worker.make(model), model.axes)
            random = np.random.default_rng(5)
            worker.write([random.integers(0, 256, size, np.uint8) for size in model.sizes])
            storages = {f"{each.untyped_storage().data_ptr():x}": each.untyped_storage() for each in worker.tensors}
            if issubclass(kind, HostBlocks):
                wholes = {name: torch.empty(0, dtype=torch.uint8).set_(each) for name, each in storages.items()}
                self.groups.append(kind(layout, {name: each.numpy() for name, each in wholes.items()}))
            else:
                assert issubclass(kind, AcceleratorBlocks)
                self.groups.append(kind(layout, storages, torch.device("cpu"), 4096))
            self.workers.append(worker)

    def read(self) -> list[list[Bytes]]:
        return [worker.read() for worker in self.workers]

    def close(self) -> None:
        for group in self.groups:
            group.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(kind: type[BlockMemory], *models: Model) -> Engine:
        made.append(Engine(kind, *models))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


Make = Callable[..., Engine]
KINDS_OF_BLOCKS = [HostBlocks, AcceleratorBlocks]


@pytest.mark.parametrize("kind", KINDS_OF_BLOCKS)
def test_good_copies_pass_and_all_blocks_are_as_they_were(make: Make, kind: type[BlockMemory]) -> None:
    models = [Model().add(each, 1 + number, 3, 2, 40, "bfloat16") for number, each in enumerate(KINDS)]
    engine = make(kind, *models, Model().add("mla", 1000, 16, 1, 576, "float8_e4m3fn"))
    before = engine.read()
    speed = run_self_test(engine.groups)
    assert speed.store_bytes_s > 0 and speed.load_bytes_s > 0
    for found, wanted in zip(engine.read(), before, strict=True):
        assert all(map(np.array_equal, found, wanted))


def test_large_blocks_and_many_segments_are_tested_by_a_few(make: Make) -> None:
    model = Model().add("rows padded", 7, 600, 1, 8, "uint8").add("blocks first", 7, 16, 8, 8192, "float64")
    engine = make(HostBlocks, model)
    before = engine.read()
    run_self_test(engine.groups)
    assert all(map(np.array_equal, engine.read()[0], before[0]))


class Faulty(HostBlocks):
    """Copies that go wrong as the test says."""

    fault = ""

    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        super().move(arena, pieces, is_store)
        piece = pieces[0]
        end = piece.extents[-1][0] + (self.layout.block_bytes * len(piece.block_ids) - 1) % 4096
        match self.fault:
            case "a store flips a bit" if is_store:
                arena.bytes[end] ^= 4
            case "a store writes behind the chunk" if is_store:
                arena.bytes[end + 1] ^= 4
            case "a store writes a block" if is_store:
                self._flip(int(piece.block_ids[-1]))
            case "a load flips a bit" if not is_store:
                self._flip(int(piece.block_ids[-1]))
            case "a load writes a skipped block" if not is_store:
                self._flip(int(piece.block_ids[0]))
            case "a load does nothing" if not is_store:
                for block in piece.block_ids.tolist():
                    self._flip(block)
            case "a load writes the arena" if not is_store:
                arena.bytes[0] ^= 1

    def _flip(self, block: int) -> None:
        segment = self.layout.segments[-1]
        self.write(segment, block, self.read(segment, block) ^ np.uint8(1))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a store flips a bit", "a store into memory does not copy the right bytes"),
        ("a store writes behind the chunk", "a store into memory"),
        ("a store writes a block", "a store into memory"),
        ("a load flips a bit", "a load from memory"),
        ("a load writes a skipped block", "a load from memory"),
        ("a load does nothing", "a load from memory"),
        ("a load writes the arena", "a load from memory"),
    ],
)
def test_a_wrong_byte_is_found_and_named_and_the_blocks_are_restored(make: Make, fault: str, said: str) -> None:
    good = make(HostBlocks, Model().add("mla", 12, 4, 1, 64, "float16"))
    bad = make(Faulty, Model().add("keys and values apart", 12, 4, 2, 65, "float16"))
    bad.groups[0].fault = fault  # type: ignore[attr-defined]
    before = bad.read()
    with pytest.raises(DeviceError, match=f"KV cache group 1 on cpu: {said}.*; report it with"):
        run_self_test([*good.groups, *bad.groups])
    assert all(map(np.array_equal, bad.read()[0], before[0]))


class Refusing(HostBlocks):
    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise DeviceError("no context in this thread")


def test_a_device_that_cannot_be_used_from_a_thread_is_found(make: Make) -> None:
    engine = make(Refusing, Model().add("mla", 4, 4, 1, 64, "float16"))
    with pytest.raises(DeviceError, match=r"no context in this thread; .*use the device from a thread other than"):
        run_self_test(engine.groups)


class Hanging(HostBlocks):
    go_on = threading.Event()

    def read(self, segment: Segment, block: int) -> Bytes:
        assert self.go_on.wait(HANG_S)
        return super().read(segment, block)


def test_a_device_that_hangs_is_given_up_and_its_blocks_left_alone(make: Make) -> None:
    engine = make(Hanging, Model().add("mla", 4, 4, 1, 64, "float16"))
    with pytest.raises(DeviceError, match=r"failed: no end after 0\.05 s; check that torch"):
        run_self_test(engine.groups, 0.05)
    (worker,) = engine.workers
    worker.write([np.full(len(storage), 7, np.uint8) for storage in worker.read()])  # the engine's
    Hanging.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "kvdepot-self-test":
            thread.join(HANG_S)
    assert all((storage == 7).all() for storage in worker.read())
