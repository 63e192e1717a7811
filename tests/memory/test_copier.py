"""The copy threads, on an arena so fragmented that chunks have several extents: they copy every byte, and no other."""

from __future__ import annotations

import os
import queue
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.devices.cpu import HostTensors
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.arena import Arena
from kvdepot.memory.arena_header import HEADER_BYTES
from kvdepot.memory.copier import Call, Copier, Copy, CopyPiece
from kvdepot.protocol.layout import Layout, Mapping, Segment
from tests.conftest import eventually
from tests.devices.conformance import fragmented

TIMEOUT_S = 20.0
ARENA_PAGES = 64
TENSOR_BYTES = 1 << 20
DRAWS = st.randoms(use_true_random=False)


@dataclass
class Bench:
    """An arena, copy threads, and a file that stands for a worker's tensors."""

    arena: Arena
    copier: Copier
    outcomes: queue.Queue[tuple[Any, Any]]
    name: str

    def run(self, task: Copy | Call) -> Any:
        self.copier.submit(task)
        token, outcome = self.outcomes.get(timeout=TIMEOUT_S)
        assert token == task.token
        return outcome

    def room(self) -> Allocator:
        return Allocator(HEADER_BYTES, self.arena.size)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    tensors = Path("/dev/shm") / f"{name}-kv"
    tensors.touch(mode=0o600)
    os.truncate(tensors, TENSOR_BYTES)
    arena = Arena(name, HEADER_BYTES + ARENA_PAGES * PAGE, b"bootboot")
    outcomes: queue.Queue[tuple[Any, Any]] = queue.Queue()
    copier = Copier(arena, 2, lambda token, outcome: outcomes.put((token, outcome)))
    try:
        yield Bench(arena, copier, outcomes, tensors.name)
    finally:
        copier.stop()
        arena.close()
        tensors.unlink()


@st.composite
def layouts(draw: st.DrawFn, name: str) -> Layout:
    """Segments of any size, with any gaps; some are interleaved with the next, like parts of one block."""
    num_blocks = 9
    segments, offset = [], draw(st.sampled_from([0, 64, 1000]))
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([1, 64, 512, 1536, 3000, 4096, 5120]))
        parts = draw(st.integers(1, 3))
        gap = draw(st.sampled_from([0, 0, 1, 512]))
        stride = size * parts + gap
        segments += [Segment(0, offset + part * size, stride, size) for part in range(parts)]
        offset += num_blocks * stride
    layout = Layout([Mapping(name, TENSOR_BYTES)], draw(st.permutations(segments)), num_blocks, bytes(32))
    layout.check()
    return layout


def test_a_devices_lane_copies_on_while_the_cpu_computes_checksums(bench: Bench) -> None:
    copier = Copier(bench.arena, 1, lambda token, outcome: bench.outcomes.put((token, outcome)))
    go_on = Event()
    copier.submit(Call("occupies the CPU's lane", partial(go_on.wait, TIMEOUT_S)))
    mapped = HostTensors.open(Layout([Mapping(bench.name, TENSOR_BYTES)], [Segment(0, 0, PAGE, PAGE)], 9, bytes(32)))
    mapped.lane = lambda is_store: "device"  # type: ignore[method-assign]  # with threads of its own, as a GPU has
    (extent,) = bench.room().allocate_run(PAGE, 1)
    for number in range(4):
        copier.submit(Copy(number, True, mapped, [CopyPiece(extent, np.array([number]), summed=number < 3)]))
    assert bench.outcomes.get(timeout=TIMEOUT_S) == (3, [0]), "the only one without a checksum"
    go_on.set()
    until_stop = partial(eventually, lambda: not copier.lanes["device"]._tasks.empty())  # one of its threads is idle
    copier.submit(Copy(4, True, mapped, [CopyPiece(extent, np.array([4]), summed=True)], whole=until_stop))
    assert copier.stop(TIMEOUT_S), "queued tasks are finished, checksums included"
    assert all(outcome[0] for token, outcome in (bench.outcomes.get_nowait() for _ in range(5)) if token in range(5))
    mapped.close()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chunks_side_by_side_are_copied_as_one_by_one(bench: Bench, data: st.DataObject) -> None:
    layout, draw, allocator = data.draw(layouts(bench.name)), random.Random(data.draw(st.integers(0, 99))), bench.room()
    if draw.randrange(2):
        allocator = fragmented(bench.arena, draw)
    count = data.draw(st.integers(1, 3))
    room = allocator.free_bytes // Allocator.rounded(count * layout.block_bytes)
    extents = allocator.allocate_run(count * layout.block_bytes, min(9 // count, room))[::-1]
    if draw.randrange(3) == 0:
        draw.shuffle(extents)
    blocks = [np.array(draw.sample(range(9), len(extents) * count), np.intp) for _ in range(2)]
    orders = [each.reshape(len(extents), count) for each in blocks]
    skip = draw.randrange(count)
    mapped = bench.run(Call("map", lambda: HostTensors.open(layout)))
    try:
        file = np.memmap(Path("/dev/shm") / bench.name, np.uint8, "r+")
        file[:] = np.random.default_rng(draw.randrange(1 << 30)).integers(0, 256, len(file), np.uint8)
        before, ended = file.copy(), []
        for together in (True, False):
            file[:], bench.arena.bytes[HEADER_BYTES:] = before, 0
            for is_store, order in zip((True, False), orders, strict=True):
                skips = [0 if is_store or i else skip for i in range(len(extents))]
                pieces = [CopyPiece(*piece) for piece in zip(extents, order, skips, strict=True)]
                for task in [pieces] if together else [[piece] for piece in pieces]:
                    assert bench.run(Copy("copy", is_store, mapped, task)) == [0] * len(task)
            ended.append((file.copy(), bench.arena.bytes.copy()))
        assert np.array_equal(ended[0][0], ended[1][0]) and np.array_equal(ended[0][1], ended[1][1])
    finally:
        assert bench.run(Call("unmap", mapped.close)) is None


def small(bench: Bench) -> HostTensors:
    mapped = bench.run(
        Call(
            "map", lambda: HostTensors.open(Layout([Mapping(bench.name, 4096)], [Segment(0, 0, 64, 64)], 8, bytes(32)))
        )
    )
    assert isinstance(mapped, HostTensors)
    return mapped


@pytest.mark.parametrize(("fence", "outcome"), [(6, [0]), (7, None), (8, None), (2**64 - 1, None)])
def test_a_store_has_failed_when_its_fence_was_raised_by_its_last_byte(bench: Bench, fence: int, outcome: Any) -> None:
    mapped = small(bench)
    piece = CopyPiece(((HEADER_BYTES, PAGE),), np.array([1, 2], np.intp))
    assert bench.run(Copy("store", True, mapped, [piece], lambda: fence, 7)) == outcome
    bench.run(Call("unmap", mapped.close))


def test_the_fence_is_read_after_the_last_byte(bench: Bench) -> None:
    mapped = small(bench)
    seen = []
    bench.arena.bytes[HEADER_BYTES:] = 0
    file = np.memmap(Path("/dev/shm") / bench.name, np.uint8, "r+")
    file[:] = 255
    pieces = [CopyPiece(((HEADER_BYTES + i * PAGE, PAGE),), np.array([i], np.intp)) for i in range(3)]

    def fence() -> int:
        seen.append(int(bench.arena.bytes[HEADER_BYTES:].sum()))
        return 0

    assert bench.run(Copy("store", True, mapped, pieces, fence, 1)) == [0, 0, 0]
    assert seen == [3 * 64 * 255]
    bench.run(Call("unmap", mapped.close))


def test_whatever_a_task_raises_its_thread_answers_and_goes_on(bench: Bench) -> None:
    class Panic(BaseException):
        """Of a library's Rust code."""

    def fail() -> None:
        raise Panic

    for _ in range(2 * len(bench.copier.lanes[""].threads)):
        assert bench.run(Call("fail", fail)) is None
    assert bench.run(Call("work", lambda: 7)) == 7
