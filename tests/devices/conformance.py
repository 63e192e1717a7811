"""The conformance suite of devices: what every `kvdepot.devices.BlockMemory` must do.

A subclass says on which device its tensors are, and opens them. Random bytes are compared one by one, including all
those around the copies, with an oracle that indexes the tensors' elements (tensors.py).
"""

from __future__ import annotations

import contextlib
import mmap
import random
import threading
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvdepot.devices import BlockMemory, open_blocks
from kvdepot.devices.blocks import CopyPiece, Scratch
from kvdepot.memory.allocator import PAGE, Allocator, Extents
from kvdepot.memory.arena import Arena
from kvdepot.protocol.layout import Layout, build_layout
from tests.conftest import HANG_S
from tests.devices.tensors import DTYPES, KINDS, Bytes, Model, Worker

ARENA_PAGES = 96
EXAMPLES = 40


@contextlib.contextmanager
def arena_of(pages: int = ARENA_PAGES) -> Iterator[Arena]:
    """An arena with this number of pages for chunks."""
    arena = Arena(f"kvdepot-test-{uuid.uuid4().hex[:12]}", 4 * PAGE + pages * PAGE, b"bootboot")
    try:
        yield arena
    finally:
        arena.close()


class Memory(Scratch):
    """An arena's bytes, without its file."""

    def __init__(self, pages: int = ARENA_PAGES) -> None:
        super().__init__(np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8))


try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    def any_draw(test: Callable[..., None]) -> Callable[..., None]:
        """Run a test with random numbers that Hypothesis chooses and shrinks; the argument is `draw`."""
        checks = [HealthCheck.differing_executors, HealthCheck.too_slow]
        bounds = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=checks)
        return bounds(given(draw=st.randoms(use_true_random=False))(test))

except ImportError:  # an environment for GPU tests may lack it: random numbers from fixed seeds
    any_draw = pytest.mark.parametrize("draw", range(EXAMPLES), indirect=True)


def any_model(draw: random.Random, nb: int) -> Model:
    """Layers of different shapes, types and orders in memory."""
    model = Model()
    for _ in range(draw.randint(1, 3)):
        rows, heads, dim = draw.randint(1, 3), draw.randint(1, 3), draw.choice([1, 2, 5, 8, 64, 512])
        model.add(draw.choice(KINDS), nb, rows, heads, dim, draw.choice(sorted(DTYPES)))
    return model


def block_order(draw: random.Random, nb: int, count: int) -> list[int]:
    """`count` of `nb` block ids: in any order, adjacent, or in two adjacent runs."""
    match draw.randint(0, 2):
        case 0:
            return draw.sample(range(nb), count)
        case 1:
            first = draw.randint(0, nb - count)
            return list(range(first, first + count))
    first, cut = draw.randint(0, nb - 1), draw.randint(0, count)
    ids = [(first + i) % nb for i in range(count)]
    return ids[cut:] + ids[:cut]


def fragmented(draw: random.Random, start: int = 0, end: int = ARENA_PAGES * PAGE) -> Allocator:
    """The free extents of a fragmented arena: one to three pages, never adjacent."""
    allocator = Allocator(start, end)
    pages = sorted(extents[0] for _ in range(allocator.capacity // PAGE) if (extents := allocator.allocate(PAGE)))
    while pages:
        run = 1 + draw.randrange(3)
        allocator.free(tuple(pages[:run]))
        del pages[: run + 1]  # one page stays taken
    return allocator


def chunk_bytes(layout: Layout, memory: dict[str, Bytes], ids: list[int]) -> Bytes:
    """A chunk's bytes in the arena according to protocol/layout.py. memory: the mappings' bytes."""
    parts = []
    for segment in layout.segments:
        base = memory[layout.mappings[segment.mapping].name]
        parts += [base[segment.offset + block * segment.stride :][: segment.size] for block in ids]
    return np.concatenate(parts)


def places(extents: Extents, size: int) -> list[int]:
    """The arena's bytes that a chunk of `size` fills, in order."""
    return [spot for start, length in extents for spot in range(start, start + length)][:size]


def differing(found: Bytes, expected: Bytes) -> str:
    """Where two memories differ, for the message of a failure."""
    wrong = np.flatnonzero(found != expected).tolist()
    return f"{len(wrong)} of {len(found)} bytes are wrong, at {wrong[:8]}"


class Case:
    """One worker's tensors, opened for copies, and the truth about their bytes."""

    def __init__(self, worker: Worker, model: Model, open_model: Callable[[Layout, Worker], BlockMemory]) -> None:
        self.worker, self.model, self.arena = worker, model, Memory()
        self._draw = np.random.default_rng(1)
        self.views = worker.make(model)
        self.layout = build_layout(self.views, model.axes)
        self.blocks = open_model(self.layout, worker)
        self.truth: list[Bytes] = []
        self.fill()

    def fill(self) -> None:
        """New bytes everywhere, also between the tensors' elements."""
        self.truth = [self._draw.integers(0, 256, size, np.uint8) for size in self.model.sizes]
        self.worker.write(self.truth)

    def fill_arena(self) -> Bytes:
        """New bytes in the arena; a copy of them."""
        self.arena.bytes[:] = self._draw.integers(0, 256, len(self.arena.bytes), np.uint8)
        return self.arena.bytes.copy()

    def chunk(self, ids: list[int]) -> Bytes:
        """The bytes of a chunk of these blocks, by the truth."""
        memory = {
            view.mapping: self.truth[layer.storage]
            for view, layer in zip(self.views, self.model.layers, strict=True)
        }  # fmt: skip
        return chunk_bytes(self.layout, memory, ids)

    def assert_tensors_are(self, expected: list[Bytes], what: str) -> None:
        for found, wanted in zip(self.worker.read(), expected, strict=True):
            assert np.array_equal(found, wanted), f"{what}: {differing(found, wanted)}"

    def there_and_back(
        self, source: list[list[int]], target: list[list[int]], extents: list[Extents], skips: list[int]
    ) -> None:
        """Store chunks, see them in the arena, and bring them back into other blocks, by both roads; nothing else may
        change."""
        arena = self.fill_arena()
        self.blocks.move(
            self.arena, [CopyPiece(e, np.array(ids, np.intp)) for e, ids in zip(extents, source, strict=True)], True
        )
        self.assert_tensors_are(self.truth, "a store only reads")
        for where, ids in zip(extents, source, strict=True):
            chunk = self.chunk(ids)
            arena[places(where, len(chunk))] = chunk
        assert np.array_equal(self.arena.bytes, arena), f"a store: {differing(self.arena.bytes, arena)}"
        stored = self.truth
        pieces = [
            CopyPiece(e, np.array(ids, np.intp), skip) for e, ids, skip in zip(extents, target, skips, strict=True)
        ]
        for what in ("a load", "a load within a step"):
            self.fill()
            expected = [storage.copy() for storage in self.truth]
            for old, new, skip in zip(source, target, skips, strict=True):
                self.model.move(stored, expected, dict(list(zip(old, new, strict=True))[skip:]))
            if what == "a load":
                self.blocks.move(self.arena, pieces, False)
            else:
                self.blocks.load_in_step(self.arena, pieces)
            self.assert_tensors_are(expected, what)
            assert np.array_equal(self.arena.bytes, arena), f"{what} only reads the arena"


class BlocksConformance:
    """The suite."""

    device = "cpu"

    def open(self, layout: Layout, worker: Worker) -> BlockMemory:
        return open_blocks(layout, worker.tensors)

    def prepare(self, case: Case) -> None:
        """What is done before each case."""

    @contextlib.contextmanager
    def case(self, model: Model) -> Iterator[Case]:
        made = Case(Worker(self.device), model, self.open)
        try:
            self.prepare(made)
            yield made
        finally:
            made.blocks.close()

    @pytest.fixture
    def draw(self, request: pytest.FixtureRequest) -> random.Random:
        return random.Random(request.param)

    @pytest.mark.parametrize("dtype", sorted(DTYPES))
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_of_layout_comes_back_byte_for_byte(self, kind: str, dtype: str) -> None:
        draw = random.Random(kind + dtype)
        for nb, rows, heads, dim in ((9, 3, 2, 5), (9, 2, 3, 256), (9, 16, 2, 64), (1, 2, 2, 8)):
            count = min(4, nb)
            with self.case(Model().add(kind, nb, rows, heads, dim, dtype)) as case:
                source, target = draw.sample(range(nb), count), draw.sample(range(nb), count)
                extents = fragmented(draw).allocate(count * case.layout.block_bytes)
                assert extents is not None
                case.there_and_back([source], [target], [extents], [0])

    @any_draw
    def test_any_model_any_blocks_any_extents_and_any_skips(self, draw: random.Random) -> None:
        chunks, count = draw.randint(1, 4), draw.randint(1, 5)
        nb = chunks * count + draw.randint(0, 3)
        with self.case(any_model(draw, nb)) as case:
            allocator = fragmented(draw) if draw.randint(0, 1) else Allocator(0, ARENA_PAGES * PAGE)
            extents = [allocator.allocate(count * case.layout.block_bytes) for _ in range(chunks)]
            there = [where for where in extents if where is not None]
            size = count * len(there)
            source, target = block_order(draw, nb, size), block_order(draw, nb, size)
            skips = [draw.choice([0, draw.randint(0, count)]) for _ in there]
            cut = [slice(i, i + count) for i in range(0, size, count)]
            case.there_and_back([source[c] for c in cut], [target[c] for c in cut], there, skips)

    def test_chunks_of_different_numbers_of_blocks_are_copied_together(self) -> None:
        with self.case(Model().add("keys and values apart", 12, 4, 2, 64, "bfloat16")) as case:
            allocator = fragmented(random.Random(5))
            source, target = [[3], [0, 5], [9, 1], [7, 2, 4]], [[1], [2, 3], [10, 11], [6, 5, 4]]
            extents = [allocator.allocate(len(ids) * case.layout.block_bytes) for ids in source]
            case.there_and_back(source, target, [each for each in extents if each], [0, 1, 0, 2])

    def test_a_chunk_of_the_whole_arena_comes_back(self) -> None:
        with self.case(Model().add("keys and values apart", 12, 8, 2, 512, "bfloat16")) as case:  # 16 KiB a run
            extents = Allocator(0, ARENA_PAGES * PAGE).allocate(11 * case.layout.block_bytes)
            assert extents is not None and len(extents) == 1
            order = random.Random(2).sample(range(12), 11)
            case.there_and_back([order], [list(reversed(order))], [extents], [3])

    def test_nothing_to_copy_copies_nothing(self) -> None:
        with self.case(Model().add("mla", 4, 2, 1, 8, "bfloat16")) as case:
            case.there_and_back([], [], [], [])
            case.there_and_back([[1, 2]], [[0, 3]], [((0, PAGE),)], [2])

    def test_memory_that_cannot_be_written_can_be_loaded_from(self) -> None:
        with self.case(Model().add("mla", 4, 2, 1, 8, "bfloat16")) as case:
            case.blocks.move(case.arena, [CopyPiece(((0, PAGE),), np.array([1, 2]))], True)
            case.arena.bytes.flags.writeable = False
            case.blocks.move(case.arena, [CopyPiece(((0, PAGE),), np.array([3, 0]))], False)
            for layer in case.worker.tensors:
                assert torch.equal(layer[[1, 2]].view(torch.uint8), layer[[3, 0]].view(torch.uint8))

    def test_rows_are_those_that_the_tensors_index(self) -> None:
        with self.case(Model().add("blocks first", 5, 2, 3, 8, "float16")) as case:
            (segment,), (tensor,) = case.layout.segments, case.worker.tensors
            wanted = tensor[3].contiguous().view(torch.uint8).flatten().cpu().numpy()
            assert np.array_equal(case.blocks.read(segment, 3), wanted)
            case.blocks.write(segment, 1, wanted)
            assert torch.equal(tensor[1].view(torch.uint8), tensor[3].view(torch.uint8))

    def test_a_load_within_a_step_may_run_beside_a_store(self) -> None:
        """Each has blocks and extents of its own."""
        with self.case(Model().add("keys and values apart", 24, 4, 2, 64, "float16")) as case:
            size = 8 * case.layout.block_bytes
            one, two = ((0, size),), ((size, size),)
            low, high = np.arange(8), np.arange(8, 16)
            case.blocks.move(case.arena, [CopyPiece(two, high)], True)
            before = case.arena.bytes[size : 2 * size].copy()
            thread = threading.Thread(target=case.blocks.move, args=(case.arena, [CopyPiece(one, low)] * 50, True))
            thread.start()
            for _ in range(50):
                case.blocks.load_in_step(case.arena, [CopyPiece(two, high + 8)])
            thread.join(HANG_S)
            assert not thread.is_alive()
            expected = [storage.copy() for storage in case.truth]
            case.model.move(case.truth, expected, {int(block): int(block) + 8 for block in high})
            case.assert_tensors_are(expected, "loads beside a store")
            assert np.array_equal(case.arena.bytes[:size], case.chunk(low.tolist()))
            assert np.array_equal(case.arena.bytes[size : 2 * size], before)

    def test_blocks_are_opened_again_and_closed_twice(self) -> None:
        with self.case(Model().add("mla", 4, 2, 1, 8, "bfloat16")) as case:
            other = self.open(case.layout, case.worker)
            assert other.follow(case.arena).wait(HANG_S)
            other.close()
            other.close()
            case.there_and_back([[1, 2]], [[3, 0]], [((0, PAGE),)], [0])
