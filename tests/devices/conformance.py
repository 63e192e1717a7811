"""The conformance suite of devices: what every `kvdepot.memory.copier.Mapped` must do.

A subclass provides the class-wide fixtures `worker` (owns tensors, see tensors.py) and `devices` (the server's end),
and `footprint`, which must not grow. Random bytes are compared one by one, including all those around the copies.
"""

from __future__ import annotations

import contextlib
import queue
import random
import uuid
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvdepot.devices import Devices
from kvdepot.memory.allocator import PAGE, Allocator, Extents
from kvdepot.memory.arena import Arena
from kvdepot.memory.comparison import compare
from kvdepot.memory.copier import Copier, Copy, CopyPiece, Mapped, checksums, copy
from kvdepot.protocol.layout import Layout, build_layout
from tests.devices.footprints import assert_settles, descriptors_and_maps
from tests.devices.tensors import DTYPES, KINDS, Bytes, Model, Worker

ARENA_PAGES = 96
TIMEOUT_S = 120.0
ROUNDS = 100
EXAMPLES = 15


@contextlib.contextmanager
def arena_of(pages: int = ARENA_PAGES) -> Iterator[Arena]:
    """An arena with this number of pages for chunks."""
    arena = Arena(f"kvdepot-test-{uuid.uuid4().hex[:12]}", 4 * PAGE + pages * PAGE, b"bootboot")
    try:
        yield arena
    finally:
        arena.close()


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


def fragmented(arena: Arena, draw: random.Random) -> Allocator:
    """The free extents of a fragmented arena: one to three pages, never adjacent."""
    allocator = Allocator(arena.header.chunks_start, arena.size)
    pages = sorted(extents[0] for _ in range(allocator.capacity // PAGE) if (extents := allocator.allocate(PAGE)))
    while pages:
        run = 1 + draw.randrange(3)
        allocator.free(tuple(pages[:run]))
        del pages[: run + 1]  # one page stays taken
    return allocator


def chunk_bytes(layout: Layout, memory: dict[str, Bytes], ids: list[int]) -> bytes:
    """A chunk's bytes in the arena according to protocol/layout.py. memory: the mappings' bytes."""
    parts = []
    for segment in layout.segments:
        base = memory[layout.mappings[segment.mapping].name]
        parts += [base[segment.offset + block * segment.stride :][: segment.size].tobytes() for block in ids]
    return b"".join(parts)


def places(extents: Extents, size: int) -> list[int]:
    """The arena's bytes that a chunk of `size` fills, in order."""
    return [spot for start, length in extents for spot in range(start, start + length)][:size]


def differing(found: Bytes, expected: Bytes) -> str:
    """Where two memories differ, for the message of a failure."""
    wrong = np.flatnonzero(found != expected).tolist()
    return f"{len(wrong)} of {len(found)} bytes are wrong, at {wrong[:8]}"


class Case:
    """One worker's tensors, mapped by the server, and the truth about their bytes."""

    def __init__(self, worker: Worker, devices: Devices, arena: Arena, model: Model, seed: int) -> None:
        self.worker, self.arena, self.model = worker, arena, model
        self.draw = np.random.default_rng(seed)
        self.views = worker.make(model)
        self.layout = build_layout(self.views, model.axes)
        self.mapped: Mapped = devices.map(self.layout)
        self.truth: list[Bytes] = []
        self.fill()

    def fill(self) -> None:
        """New bytes everywhere, also between the tensors' elements."""
        self.truth = [self.draw.integers(0, 256, size, np.uint8) for size in self.model.sizes]
        self.worker.write(self.truth)

    def fill_arena(self) -> Bytes:
        """New bytes behind the arena's records; all of it."""
        start = self.arena.header.chunks_start
        self.arena.bytes[start:] = self.draw.integers(0, 256, self.arena.size - start, np.uint8)
        return self.arena.bytes.copy()

    def move(self, pieces: list[CopyPiece], is_store: bool) -> None:
        """As a copy thread does it."""
        assert copy(self.arena, Copy(None, is_store, self.mapped, pieces))

    def chunk(self, ids: list[int]) -> Bytes:
        """The bytes of a chunk of these blocks, by the truth."""
        memory: dict[str, Bytes] = {}
        for view, layer in zip(self.views, self.model.layers, strict=True):
            known = memory.setdefault(view.mapping, np.zeros(view.mapping_bytes, np.uint8))
            start = view.offset - layer.offset  # of the storage in its mapping
            known[start : start + self.model.sizes[layer.storage]] = self.truth[layer.storage]
        return np.frombuffer(chunk_bytes(self.layout, memory, ids), np.uint8)

    def assert_tensors_are(self, expected: list[Bytes], what: str) -> None:
        for found, wanted in zip(self.worker.read(), expected, strict=True):
            assert np.array_equal(found, wanted), f"{what}: {differing(found, wanted)}"

    def there_and_back(
        self, source: list[list[int]], target: list[list[int]], extents: list[Extents], skip: int
    ) -> None:
        """Store chunks, see them in the arena, and bring them back into other blocks; nothing else may change."""
        arena = self.fill_arena()
        self.move([CopyPiece(e, np.array(ids, np.intp)) for e, ids in zip(extents, source, strict=True)], True)
        self.assert_tensors_are(self.truth, "a store only reads")
        for where, ids in zip(extents, source, strict=True):
            chunk = self.chunk(ids)
            arena[places(where, len(chunk))] = chunk
        assert np.array_equal(self.arena.bytes, arena), f"a store: {differing(self.arena.bytes, arena)}"
        stored = self.truth
        self.fill()
        expected = [storage.copy() for storage in self.truth]
        skips = [skip, *[0] * len(target)][: len(target)]  # there may be none: an arena without room for one
        for old, new, first in zip(source, target, skips, strict=True):
            self.model.move(stored, expected, dict(list(zip(old, new, strict=True))[first:]))
        pieces = zip(extents, target, skips, strict=True)
        self.move([CopyPiece(e, np.array(ids, np.intp), first) for e, ids, first in pieces], False)
        self.assert_tensors_are(expected, "a retrieve writes what it was asked for")
        assert np.array_equal(self.arena.bytes, arena), "a retrieve only reads the arena"
        self.truth = expected

    def close(self) -> None:
        self.mapped.close()


class DeviceConformance:
    """The suite."""

    slack: ClassVar[dict[str, int]] = {}
    """By how much a number of the footprint may grow in a series of registrations."""

    def footprint(self) -> dict[str, Any]:
        """What must be the same after registering and unregistering, in this process."""
        return descriptors_and_maps()

    @pytest.fixture
    def draw(self, request: pytest.FixtureRequest) -> random.Random:
        return random.Random(request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def arena(cls) -> Iterator[Arena]:
        with arena_of() as arena:
            yield arena

    @pytest.fixture(scope="class")
    @classmethod
    def devices(cls, arena: Arena) -> Iterator[Devices]:
        made = Devices(arena, 64 << 20)
        yield made
        made.close()

    @pytest.fixture(scope="class")
    @classmethod
    def worker(cls) -> Iterator[Worker]:
        raise NotImplementedError

    @contextlib.contextmanager
    def case(self, worker: Worker, devices: Devices, arena: Arena, model: Model, seed: int = 1) -> Iterator[Case]:
        made = Case(worker, devices, arena, model, seed)
        try:
            yield made
        finally:
            made.close()

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_of_layout_comes_back_byte_for_byte(
        self, worker: Worker, devices: Devices, arena: Arena, kind: str
    ) -> None:
        draw = random.Random(kind)
        for rows, heads, dim, dtype in ((3, 2, 5, "bfloat16"), (2, 3, 256, "float8_e4m3fn"), (16, 2, 64, "float16")):
            model = Model().add(kind, 9, rows, heads, dim, dtype)
            with self.case(worker, devices, arena, model) as case:
                source, target = draw.sample(range(9), 4), draw.sample(range(9), 4)
                extents = fragmented(arena, draw).allocate(4 * case.layout.block_bytes)
                assert extents is not None
                case.there_and_back([source], [target], [extents], 0)

    @any_draw
    def test_any_model_any_blocks_and_any_extents(
        self, worker: Worker, devices: Devices, arena: Arena, draw: random.Random
    ) -> None:
        chunks, count = draw.randint(1, 3), draw.randint(1, 4)
        nb = chunks * count + draw.randint(0, 3)
        model = any_model(draw, nb)
        seed = draw.randint(0, 99)
        with self.case(worker, devices, arena, model, seed) as case:
            allocator = fragmented(arena, random.Random(seed))
            extents = [allocator.allocate(count * case.layout.block_bytes) for _ in range(chunks)]
            there = [where for where in extents if where is not None]
            size = count * len(there)
            source, target = block_order(draw, nb, size), block_order(draw, nb, size)
            skip = draw.randint(0, count - 1)
            cut = [slice(i, i + count) for i in range(0, size, count)]
            case.there_and_back([source[c] for c in cut], [target[c] for c in cut], there, skip)

    def test_a_chunk_of_the_whole_arena_goes_across_all_of_its_pieces(
        self, worker: Worker, devices: Devices, arena: Arena
    ) -> None:
        model = Model().add("keys and values apart", 12, 8, 2, 512, "bfloat16")  # 16 KiB a run
        with self.case(worker, devices, arena, model) as case:
            allocator = Allocator(arena.header.chunks_start, arena.size)
            extents = allocator.allocate(11 * case.layout.block_bytes)
            assert extents is not None and len(extents) == 1
            order = random.Random(2).sample(range(12), 11)
            case.there_and_back([order], [list(reversed(order))], [extents], 3)

    def test_blocks_are_compared_with_a_chunk_that_stays(self, worker: Worker, devices: Devices, arena: Arena) -> None:
        model = Model().add("keys and values apart", 12, 8, 2, 64, "bfloat16").add("mla", 12, 4, 1, 24, "float32")
        with self.case(worker, devices, arena, model) as case:
            extents = fragmented(arena, random.Random(4)).allocate(5 * case.layout.block_bytes)
            assert extents is not None
            piece = CopyPiece(extents, np.array([7, 2, 3, 11, 0], np.intp))
            case.move([piece], True)
            before = arena.bytes.copy()
            assert compare(arena, Copy(None, True, case.mapped, [piece])) == [[0.0]]
            case.fill()
            found = compare(arena, Copy(None, True, case.mapped, [piece]))
            assert found is not None and max(found[0]) > 0.0
            assert np.array_equal(arena.bytes, before), "comparing only reads"

    def test_nothing_to_copy_copies_nothing(self, worker: Worker, devices: Devices, arena: Arena) -> None:
        with self.case(worker, devices, arena, Model().add("mla", 4, 2, 1, 8, "bfloat16")) as case:
            case.there_and_back([], [], [], 0)
            before = case.fill_arena()
            case.move([], True)
            start = arena.header.chunks_start
            case.move([CopyPiece(((start, PAGE),), np.array([1, 2], np.intp), 2)], False)
            case.assert_tensors_are(case.truth, "all blocks were skipped")
            assert np.array_equal(arena.bytes, before)

    def test_stores_and_retrieves_at_once_do_not_meet(self, worker: Worker, devices: Devices, arena: Arena) -> None:
        """Each chunk has blocks and an extent of its own, and goes out and back several times."""
        chunks, count, rounds = 8, 3, 4
        model = Model().add("heads before rows", chunks * count, 4, 2, 64, "float16")
        model.add("keys and values apart", chunks * count, 4, 2, 24, "float32")
        outcomes: queue.Queue[tuple[Any, Any]] = queue.Queue()
        copier = Copier(arena, 2, lambda token, outcome: outcomes.put((token, outcome)))
        with self.case(worker, devices, arena, model) as case, contextlib.ExitStack() as end:
            end.callback(copier.stop)
            allocator = fragmented(arena, random.Random(3))
            extents = [allocator.allocate(count * case.layout.block_bytes) for _ in range(chunks)]
            before = case.fill_arena()
            pieces = [
                CopyPiece(where, np.arange(i * count, (i + 1) * count)) for i, where in enumerate(extents) if where
            ]
            assert len(pieces) == chunks
            for i, piece in enumerate(pieces):
                copier.submit(Copy((i, 0), True, case.mapped, [piece]))
            ended = 0
            while ended < chunks:
                (i, done), outcome = outcomes.get(timeout=TIMEOUT_S)
                assert outcome == [0], f"copy {done} of chunk {i} failed"
                if done + 1 < 2 * rounds:  # out, back, out, ...: some go one way while others go the other
                    copier.submit(Copy((i, done + 1), bool(done % 2), case.mapped, [pieces[i]]))
                else:
                    ended += 1
            case.assert_tensors_are(case.truth, "what went out and came back")
            for i, piece in enumerate(pieces):
                chunk = case.chunk(list(range(i * count, (i + 1) * count)))
                before[places(piece.extents, len(chunk))] = chunk
            assert np.array_equal(arena.bytes, before), differing(arena.bytes, before)

    def test_sums_are_those_of_the_bytes_that_arrived(self, worker: Worker, devices: Devices, arena: Arena) -> None:
        pytest.importorskip("xxhash", reason="checksums need xxhash")
        with self.case(worker, devices, arena, Model().add("mla", 4, 2, 1, 512, "bfloat16")) as case:
            extents = ((arena.header.chunks_start, 2 * PAGE),)
            sums = []
            for is_store, ids in ((True, [1, 3]), (False, [0, 2]), (True, [0, 2])):
                task = Copy(None, is_store, case.mapped, [CopyPiece(extents, np.array(ids), summed=True)])
                assert copy(arena, task)
                sums.append(checksums(arena, task))
            assert sums[0] == sums[1] == sums[2] != [0]

    def test_registering_and_unregistering_leaves_nothing(self, worker: Worker, devices: Devices, arena: Arena) -> None:
        model = Model().add("keys and values apart", 4, 2, 2, 8, "bfloat16").add("mla", 4, 2, 1, 8, "bfloat16")
        layout = build_layout(worker.make(model), model.axes)
        assert_settles(lambda: devices.map(layout).close(), self.footprint, ROUNDS, self.slack)

    def test_registering_again_maps_the_same_memory_before_the_first_is_given_up(
        self, worker: Worker, devices: Devices, arena: Arena
    ) -> None:
        model = Model().add("blocks first", 6, 2, 2, 8, "bfloat16")
        with self.case(worker, devices, arena, model) as case:
            first, case.mapped = case.mapped, devices.map(case.layout)
            first.close()
            extents = ((arena.header.chunks_start, PAGE),)
            case.there_and_back([[1, 2]], [[4, 0]], [extents], 0)

    def test_giving_tensors_up_twice_is_giving_them_up(self, worker: Worker, devices: Devices, arena: Arena) -> None:
        with self.case(worker, devices, arena, Model().add("mla", 4, 2, 1, 8, "bfloat16")) as case:
            other = devices.map(case.layout)
            other.close()
            other.close()
            case.there_and_back([[1, 2]], [[3, 0]], [((arena.header.chunks_start, PAGE),)], 0)
