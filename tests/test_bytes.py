"""Every byte that comes back through a server is the byte that was stored, and no other byte is touched."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.client.transfer import Transfer
from kvdepot.keys import ChunkChain
from kvdepot.memory.allocator import PAGE
from tests.devices.conformance import block_order

if TYPE_CHECKING:
    from tests.conftest import Depot, StartDepot

CHUNK = 256  # tokens, as the server of these tests is started
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float16]
TIMEOUT_S = 20.0
DRAWS = st.randoms(use_true_random=False)


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
        assert transfer.futures is not None
        answers.append(transfer.futures[0].result(TIMEOUT_S) if transfer.futures else [])
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
    source, target = block_order(data.draw(DRAWS), nb, count), block_order(data.draw(DRAWS), nb, count)
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
    source, target = block_order(data.draw(DRAWS), nb, 8), block_order(data.draw(DRAWS), nb, 8)
    memory = Memory(layers, axes, 5)
    chain = ChunkChain(CHUNK)
    chain.extend(range(CHUNK * chunks))
    with worker_of(depot, layers, axes, blocks_in_chunk) as worker:
        memory.fill()
        stored = memory.copy()
        for is_store, ids, skipped in ((True, source, 0), (False, target, skip)):
            packed = np.array(ids, "<u4").tobytes()
            transfer = Transfer("r", chain.root, 0, bytes(chain.hashes), packed, skipped)
            (worker.submit_store if is_store else worker.submit_retrieve)(["r"], [transfer], None)
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
    source, target = block_order(data.draw(DRAWS), nb, 8), block_order(data.draw(DRAWS), nb, 8)
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
