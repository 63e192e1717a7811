"""Every byte that comes back is the byte that was stored, and no other byte is touched.

The first part goes through a real server and the workers' adapter, the second through the copy threads alone,
over an arena so fragmented that chunks lie in several pieces.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.devices.cpu import HostTensors
from kvdepot.errors import LayoutError
from kvdepot.keys import ChunkChain
from kvdepot.memory.allocator import PAGE, Space
from kvdepot.memory.arena import Arena
from kvdepot.memory.arena_header import HEADER_BYTES
from kvdepot.memory.copier import Call, Copy, CopyPiece, Mover
from kvdepot.protocol.layout import Layout, Mapping, Segment
from tests.devices.conformance import block_orders

if TYPE_CHECKING:
    from conftest import Depot, StartDepot

CHUNK = 256  # tokens, as the server of these tests is started
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float16]
TIMEOUT_S = 20.0


# -- tensors as engines make them


def paged(kind: str, nb: int, rows: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """Layers of `nb` blocks and their block axis."""

    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    if kind == "blocks first":
        return [make(nb, rows, heads, dim)], 0
    if kind == "keys and values apart":
        return [make(2, nb, rows, heads, dim)], 1
    if kind == "keys and values together":
        return [make(nb, 2, rows, heads, dim)], 0
    if kind == "mla":
        return [make(nb, rows, dim)], 0
    if kind == "rows padded":
        return [make(nb, rows, dim + 3)[..., :dim]], 0
    if kind == "every second block":
        return [make(2 * nb, rows, dim)[1::2]], 0
    if kind == "behind others":
        return [make(nb + 1, rows, dim)[1:]], 0
    if kind == "heads before rows":
        return [make(nb, heads, rows, dim).permute(0, 2, 1, 3)], 0
    if kind == "heads outside":
        return [make(heads, nb, rows, dim).permute(1, 2, 0, 3)], 0
    if kind == "blocks last":
        return [make(rows, min(dim, 4), nb)], 2
    if kind == "layers side by side":
        return list(make(nb, heads, rows, dim).unbind(1)), 0
    assert kind == "layers behind each other", kind
    return list(make(heads, nb, rows, dim).unbind(0)), 0


KINDS = [
    "blocks first", "keys and values apart", "keys and values together", "mla", "rows padded", "every second block",
    "behind others", "heads before rows", "heads outside", "blocks last", "layers side by side",
    "layers behind each other",
]  # fmt: skip


@st.composite
def models(draw: st.DrawFn, nb: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The layers of one worker, of different shapes, types and orders in memory, and their block axes."""
    layers: dict[str, torch.Tensor] = {}
    axes: list[int] = []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)):
        rows, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        dim = draw(st.sampled_from([1, 2, 5, 512]))  # 512: wide enough to be copied by index
        tensors, axis = paged(kind, nb, rows, heads, dim, draw(st.sampled_from(DTYPES)))
        for tensor in tensors:
            layers[f"layer {len(layers)}"] = tensor
            axes.append(axis)
    return layers, axes


Memories = dict[int, "npt.NDArray[np.uint8]"]
"""Storages by their address."""


class Memory:
    """All bytes a worker's tensors lie in, also those between their elements; each storage once. By numpy alone."""

    def __init__(self, layers: dict[str, torch.Tensor], axes: list[int], seed: int) -> None:
        self.layers = list(layers.values())
        self.axes = axes
        self._random = np.random.default_rng(seed)

    def storages(self) -> Memories:
        found: Memories = {}
        for tensor in self.layers:
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            found[storage.data_ptr()] = flat.numpy()
        return found

    def fill(self) -> None:
        """New bytes everywhere, also those that are no number."""
        for storage in self.storages().values():
            storage[:] = self._random.integers(0, 256, len(storage), np.uint8)

    def copy(self) -> Memories:
        return {address: storage.copy() for address, storage in self.storages().items()}

    def move(self, source: Memories, target: Memories, blocks: dict[int, int]) -> None:
        """In copies of the memory: blocks of `source` go to the blocks of `target` they are mapped to."""
        for tensor, axis in zip(self.layers, self.axes, strict=True):
            address, item = tensor.untyped_storage().data_ptr(), tensor.element_size()
            strides = [stride * item for stride in tensor.stride()]
            old, new = (
                np.lib.stride_tricks.as_strided(
                    memory[address][tensor.storage_offset() * item :].view(f"V{item}"), tensor.shape, strides
                )
                for memory in (source, target)
            )
            for one, other in blocks.items():
                np.moveaxis(new, axis, 0)[other] = np.moveaxis(old, axis, 0)[one]

    def assert_is(self, expected: Memories) -> None:
        for address, storage in self.storages().items():
            wrong = np.flatnonzero(storage != expected[address]).tolist()
            assert not wrong, f"{len(wrong)} bytes of {len(storage)} are wrong, at {wrong[:8]}"


# -- through a server


names = (f"bytes-{number}-{uuid.uuid4().hex[:6]}" for number in itertools.count())


@contextlib.contextmanager
def worker_of(
    depot: Depot, layers: dict[str, torch.Tensor], axes: list[int], blocks_in_chunk: int, model: str = ""
) -> Iterator[LMCacheMPWorkerAdapter]:
    worker = LMCacheMPWorkerAdapter(depot.url, depot.context, model or next(names), 1, 0, CHUNK // blocks_in_chunk)
    try:
        worker.register_kv_caches(layers, block_axes=axes)
        yield worker
    finally:
        worker.shutdown()


def settle(worker: LMCacheMPWorkerAdapter, request: str) -> list[Any]:
    """Wait for the transfers of a request; their answers."""
    transfers = [*worker.store_futures.get(request, ()), *worker.retrieve_futures.get(request, ())]
    answers = []
    for transfer in transfers:
        assert transfer.future is not None
        answers.append(transfer.future.result(TIMEOUT_S))
    worker.get_finished({request})
    return answers


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_what_was_stored_comes_back_byte_for_byte_into_other_blocks(depot: Depot, data: st.DataObject) -> None:
    blocks_in_chunk = data.draw(st.sampled_from([1, 2, 4, 8]))
    chunks = data.draw(st.integers(1, 3))
    count = chunks * blocks_in_chunk
    nb = count + data.draw(st.integers(0, 4))
    layers, axes = data.draw(models(nb))
    source, target = data.draw(block_orders(nb, count)), data.draw(block_orders(nb, count))
    memory = Memory(layers, axes, data.draw(st.integers(0, 99)))
    named: dict[str, Any]
    if data.draw(st.booleans()):
        named = {"token_ids": list(range(chunks * CHUNK + data.draw(st.sampled_from([0, 7]))))}
    else:
        named = {"block_hashes": [bytes([i]) * 5 for i in range(count)]}
    with worker_of(depot, layers, axes, blocks_in_chunk) as worker:
        memory.fill()
        stored = memory.copy()
        worker.submit_store_request("r", LoadStoreOp(source, **named), None)
        assert settle(worker, "r") == [True]
        memory.assert_is(stored)
        memory.fill()
        expected = memory.copy()
        memory.move(stored, expected, dict(zip(source, target, strict=True)))
        worker.submit_retrieve_request("r", LoadStoreOp(target, **named), None)
        assert settle(worker, "r") == [[True] * chunks]
        memory.assert_is(expected)
        assert worker.get_block_ids_with_load_errors() == set()


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_skipped_blocks_of_the_first_chunk_are_not_written(depot: Depot, data: st.DataObject) -> None:
    blocks_in_chunk, chunks, nb = 4, 2, 10
    skip = data.draw(st.integers(0, 3))
    layers, axes = data.draw(models(nb))
    source, target = data.draw(block_orders(nb, 8)), data.draw(block_orders(nb, 8))
    memory = Memory(layers, axes, 5)
    chain = ChunkChain(CHUNK)
    chain.extend(range(CHUNK * chunks))
    with worker_of(depot, layers, axes, blocks_in_chunk) as worker:
        memory.fill()
        stored = memory.copy()
        for is_store, ids, skipped in ((True, source, 0), (False, target, skip)):
            packed = np.array(ids, "<u4").tobytes()
            part = worker.shards("r", chain.root, 0, bytes(chain.hashes), packed, skipped)
            worker.submit_shards(["r"], [part], None, is_store)
            assert settle(worker, "r") == [True if is_store else [True] * chunks]
            if is_store:
                memory.fill()
                expected = memory.copy()
        memory.move(stored, expected, dict(list(zip(source, target, strict=True))[skip:]))
        memory.assert_is(expected)


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_a_retrieve_of_which_only_the_head_is_there_writes_only_the_head(depot: Depot, data: st.DataObject) -> None:
    blocks_in_chunk, chunks, nb = 2, 4, 8
    there = data.draw(st.integers(0, chunks))
    layers, axes = data.draw(models(nb))
    source, target = data.draw(block_orders(nb, 8)), data.draw(block_orders(nb, 8))
    memory = Memory(layers, axes, 6)
    tokens = list(range(CHUNK * chunks))
    with worker_of(depot, layers, axes, blocks_in_chunk) as worker:
        memory.fill()
        stored = memory.copy()
        worker.submit_store_request("r", LoadStoreOp(source[: 2 * there], tokens, end=CHUNK * there or 1), None)
        settle(worker, "r")
        memory.fill()
        expected = memory.copy()
        memory.move(stored, expected, dict(zip(source[: 2 * there], target[: 2 * there], strict=True)))
        worker.submit_retrieve_request("r", LoadStoreOp(target, tokens), None)
        assert settle(worker, "r") == [[i < there for i in range(chunks)]]
        memory.assert_is(expected)
        assert worker.get_block_ids_with_load_errors() == set(target[2 * there :])


def test_another_engine_with_the_same_layout_gets_the_same_bytes(depot: Depot) -> None:
    model, tokens = next(names), list(range(2 * CHUNK))
    memories = []
    for seed, blocks in ((1, [3, 0, 5, 1]), (2, [2, 4, 6, 7])):
        tensors = {f"l{i}": torch.zeros(2, 8, 3, 2, 5, dtype=torch.bfloat16) for i in range(2)}
        memories.append((tensors, Memory(tensors, [1, 1], seed), blocks))
        memories[-1][1].fill()
    (one, stored, source), (other, memory, target) = memories
    with worker_of(depot, one, [1, 1], 2, model) as worker:
        worker.submit_store_request("r", LoadStoreOp(source, tokens), None)
        assert settle(worker, "r") == [True]
    with worker_of(depot, other, [1, 1], 2, model) as worker:
        worker.submit_retrieve_request("r", LoadStoreOp(target, tokens), None)
        assert settle(worker, "r") == [[True, True]]
    for a, b in zip(stored.layers, memory.layers, strict=True):
        assert torch.equal(a[:, source].view(torch.uint8), b[:, target].view(torch.uint8))
    untouched = Memory({name: torch.zeros_like(tensor) for name, tensor in other.items()}, [1, 1], 2)
    untouched.fill()
    rest = [block for block in range(8) if block not in target]
    for a, b in zip(untouched.layers, memory.layers, strict=True):
        assert torch.equal(a[:, rest].view(torch.uint8), b[:, rest].view(torch.uint8))


def test_an_engine_with_another_layout_gets_nothing_and_keeps_its_bytes(depot: Depot) -> None:
    model, tokens = next(names), list(range(CHUNK))
    one = {"l": torch.ones(8, 3, 2, 5, dtype=torch.bfloat16)}
    with worker_of(depot, one, [0], 2, model) as worker:
        worker.submit_store_request("r", LoadStoreOp([0, 1], tokens), None)
        assert settle(worker, "r") == [True]
    for other in (
        {"l": torch.zeros(8, 3, 2, 5, dtype=torch.float16)},
        {"l": torch.zeros(8, 2, 3, 5, dtype=torch.bfloat16)},
        {"l": torch.zeros(8, 2, 3, 5, dtype=torch.bfloat16).permute(0, 2, 1, 3)},
        {"k": torch.zeros(8, 3, 2, 5, dtype=torch.bfloat16)},
    ):
        with worker_of(depot, other, [0], 2, model) as worker:
            worker.submit_retrieve_request("r", LoadStoreOp([0, 1], tokens), None)
            assert settle(worker, "r") == [[False]]
            assert worker.get_block_ids_with_load_errors() == {0, 1}
        assert not any(tensor.any() for tensor in other.values())


def test_two_models_that_fragment_a_small_arena_never_get_each_others_bytes(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=1)
    draw = random.Random(11)
    with contextlib.ExitStack() as stack:
        workers, memories, lookups = [], [], []
        for rows in (3, 5):  # pages a chunk: two sizes that do not fit into each other's holes
            layers = {"a": torch.zeros(8, rows, PAGE // 4, dtype=torch.float8_e4m3fn)}
            layers["b"] = torch.zeros(2, 8, rows, PAGE // 16, dtype=torch.bfloat16)
            workers.append(stack.enter_context(worker_of(depot, layers, [0, 1], 2)))
            memories.append(Memory(layers, [0, 1], rows))
            lookups.append(
                LMCacheMPSchedulerAdapter(depot.url, depot.context, workers[-1].model_name, 1, 0, CHUNK // 2)
            )
            stack.callback(lookups[-1].shutdown)
        truth: dict[tuple[int, int], Memories] = {}
        hits = 0
        for step in range(120):
            which = draw.randrange(2)
            worker, memory, scheduler = workers[which], memories[which], lookups[which]
            tokens = [step] * (CHUNK * 4)
            memory.fill()
            truth[which, step] = memory.copy()
            worker.submit_store_request(f"s{step}", LoadStoreOp(list(range(8)), tokens), None)
            assert settle(worker, f"s{step}") == [True]
            for known in draw.sample(sorted(key for key in truth if key[0] == which), k=1) * (step % 2):
                tokens, request = [known[1]] * (CHUNK * 4), f"r{step}"
                scheduler.maybe_submit_lookup_request(request, token_ids=tokens)
                found = scheduler.wait_lookup_result(request, TIMEOUT_S)
                assert found is not None
                target = draw.sample(range(8), k=8)[: found // CHUNK * 2]
                memory.fill()
                expected = memory.copy()
                memory.move(truth[known], expected, dict(enumerate(target)))
                worker.submit_retrieve_request(request, LoadStoreOp(target, tokens, end=found or 1), None)
                assert settle(worker, request) == [[True] * (found // CHUNK)]
                memory.assert_is(expected)
                scheduler.end_session(request)
                hits += found // CHUNK
        assert hits > 10
        status = depot.status()
        assert status["evicted_chunks"] > 100 and status["reserved_shards"] == 0


# -- through the copy threads alone, in an arena in pieces


@dataclass
class Bench:
    """An arena, copy threads, and a file that stands for a worker's tensors."""

    arena: Arena
    mover: Mover
    outcomes: queue.Queue[tuple[Any, Any]]
    name: str

    def run(self, task: Copy | Call) -> Any:
        self.mover.submit(task)
        token, outcome = self.outcomes.get(timeout=TIMEOUT_S)
        assert token == task.token
        return outcome


ARENA_PAGES = 64
TENSOR_BYTES = 1 << 20


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    tensors = Path("/dev/shm") / f"{name}-kv"
    tensors.touch(mode=0o600)
    os.truncate(tensors, TENSOR_BYTES)
    arena = Arena(name, HEADER_BYTES + ARENA_PAGES * PAGE, b"bootboot")
    outcomes: queue.Queue[tuple[Any, Any]] = queue.Queue()
    mover = Mover(arena, 2, lambda token, outcome: outcomes.put((token, outcome)))
    try:
        yield Bench(arena, mover, outcomes, tensors.name)
    finally:
        mover.stop()
        arena.close()
        tensors.unlink()


@st.composite
def layouts(draw: st.DrawFn, name: str) -> Layout:
    """Segments of any size and gap behind each other; some interleaved with the next, as cut from one block."""
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


def pieces_of(space: Space, draw: Callable[[int], int]) -> None:
    """Leave a space with free extents of one to three pages, never side by side."""
    pages = [space.allocate(PAGE) for _ in range(space.capacity // PAGE)]
    assert all(pages)
    ordered = sorted(extents[0] for extents in pages if extents)
    while ordered:
        run = 1 + draw(3)
        space.free(tuple(ordered[:run]))
        del ordered[: run + 1]  # one page stays taken


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_chunk_in_several_extents_is_copied_whole_in_order_and_alone(bench: Bench, data: st.DataObject) -> None:
    layout = data.draw(layouts(bench.name))
    draw = random.Random(data.draw(st.integers(0, 99)))
    space = Space(HEADER_BYTES, bench.arena.size)
    pieces_of(space, draw.randrange)
    count = data.draw(st.integers(1, 4).filter(lambda n: n * layout.block_bytes <= space.free_bytes))
    skip = data.draw(st.integers(0, count - 1))
    source = np.array(data.draw(block_orders(9, count)), np.intp)
    target = np.array(data.draw(block_orders(9, count)), np.intp)
    extents = space.allocate(count * layout.block_bytes)
    assert extents is not None
    if count * layout.block_bytes > 3 * PAGE:
        assert len(extents) > 1

    generator = np.random.default_rng(draw.randrange(1 << 30))
    mapped = bench.run(Call("map", lambda: HostTensors.open(layout)))
    try:
        file = np.memmap(Path("/dev/shm") / bench.name, np.uint8, "r+")
        file[:] = generator.integers(0, 256, len(file), np.uint8)
        bench.arena.bytes[HEADER_BYTES:] = generator.integers(0, 256, ARENA_PAGES * PAGE, np.uint8)
        stored, arena = file.copy(), bench.arena.bytes.copy()

        assert bench.run(Copy("store", True, mapped, [CopyPiece(extents, source)])) == [0]
        assert np.array_equal(file, stored), "a store only reads"
        chunk = b"".join(
            stored[s.offset + int(block) * s.stride :][: s.size].tobytes() for s in layout.segments for block in source
        )
        places = [spot for start, length in extents for spot in range(start, start + length)][: len(chunk)]
        arena[places] = np.frombuffer(chunk, np.uint8)
        assert np.array_equal(bench.arena.bytes, arena), "the chunk fills its extents in order and nothing else"

        file[:] = generator.integers(0, 256, len(file), np.uint8)
        expected = file.copy()
        for segment in layout.segments:
            for old, new in list(zip(source.tolist(), target.tolist(), strict=True))[skip:]:
                at, to = segment.offset + old * segment.stride, segment.offset + new * segment.stride
                expected[to : to + segment.size] = stored[at : at + segment.size]
        assert bench.run(Copy("retrieve", False, mapped, [CopyPiece(extents, target, skip)])) == [0]
        assert np.array_equal(file, expected), "the blocks that were asked for and nothing else"
        assert np.array_equal(bench.arena.bytes, arena), "a retrieve only reads the arena"
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


def test_tensors_that_are_not_there_or_too_small_are_an_outcome(bench: Bench) -> None:
    for mapping in (Mapping(f"{bench.name}-gone", 64), Mapping(bench.name, TENSOR_BYTES * 2), Mapping("../shadow", 64)):
        layout = Layout([mapping], [Segment(0, 0, 64, 64)], 1, bytes(32))
        outcome = bench.run(Call("map", lambda layout=layout: HostTensors.open(layout)))
        assert isinstance(outcome, LayoutError) and mapping.name in str(outcome)


def test_blocks_of_a_tensor_are_what_numpy_says_they_are() -> None:
    """The oracle of this file, checked on one case by hand."""
    tensor = torch.zeros(2, 3, 2, dtype=torch.int16)
    memory = Memory({"l": tensor}, [1], 0)
    memory.fill()
    old = memory.copy()
    new = memory.copy()
    memory.move(old, new, {0: 2})
    (before,), (after,) = old.values(), new.values()
    size = math.prod(tensor.shape) * 2
    moved = [*range(8), *range(4), *range(12, 20), *range(12, 16)]
    assert after.tolist() == before[moved].tolist() and len(after) == size
