"""The self-test of a worker's copies, before anything is stored or loaded: whether blocks come back bit for bit.

Random bytes go through each KV cache group's copies, both ways. So a device or a layout that this code has never met
cannot serve a wrong byte: such an engine runs without a cache. Bytes are compared with `BlockMemory.read` and `write`,
which share nothing with the copies. Law: it runs while no step computes, and leaves the blocks as they were.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvdepot.devices.blocks import BlockMemory, CopyPiece, Scratch
from kvdepot.errors import DeviceError
from kvdepot.memory.allocator import PAGE, Allocator, Extents
from kvdepot.memory.extents import Bytes, checksum
from kvdepot.protocol.layout import Segment

_MOST_BLOCKS = 8
_MOST_BYTES = 8 << 20
"""Limit of the bytes of one group's blocks in the test, which has at least two blocks."""
_MOST_ROWS = 4096
"""Rows to read and write one by one: each costs a call of the driver."""
_TIMED_BYTES = 32 << 20
_MOST_REPEATS = 64
_REGISTERING_S = 5.0
DEADLINE_S = 30.0


class CopySpeed(NamedTuple):
    """Measured bytes per second of large copies, of all groups together."""

    store_bytes_s: float
    load_bytes_s: float


def test_blocks(blocks: Sequence[BlockMemory], deadline_s: float = DEADLINE_S) -> CopySpeed:
    """Copy a few blocks of each KV cache group both ways, compare them, and measure the speed.

    Runs on a thread of its own, like the copies, and blocks for milliseconds; for `deadline_s` if the device hangs. The
    thread then writes no block any more, but copies that it has queued may. Raises DeviceError saying what differs.
    """
    outcome: list[CopySpeed | BaseException] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            outcome.append(_test(blocks, given_up))
        except BaseException as exc:  # noqa: BLE001 - raised by the caller's thread
            outcome.append(exc)

    thread = threading.Thread(target=run, name="kvdepot-self-test", daemon=True)
    thread.start()
    thread.join(deadline_s)
    given_up.set()
    found = outcome[0] if outcome else TimeoutError(f"no end after {deadline_s:g} s")
    if isinstance(found, CopySpeed):
        return found
    if isinstance(found, _Differs):
        raise found
    where = ", ".join(sorted({str(each.device or "cpu") for each in blocks}))
    raise DeviceError(
        f"the self-test of copies on {where} failed: {found}; check that torch can use the device from a thread other "
        "than the engine's, and report it if it can"
    ) from found


class _Differs(DeviceError):
    def __init__(self, group: int, blocks: BlockMemory, what: str) -> None:
        super().__init__(
            f"the self-test of copies failed: KV cache group {group} on {blocks.device or 'cpu'}: {what}; report it "
            "with the engine's layout and the versions of torch and the driver"
        )


def _test(blocks: Sequence[BlockMemory], given_up: threading.Event) -> CopySpeed:
    groups = [_Group(number, each, given_up) for number, each in enumerate(blocks)]
    scratch = Scratch(np.frombuffer(mmap.mmap(-1, max(group.arena_bytes for group in groups)), np.uint8))
    checksum(scratch.bytes, ((0, PAGE),), PAGE)  # imports its library now rather than in the first copy
    for group in groups:
        group.check(scratch, "")
    prepared = [group.blocks.follow(scratch) for group in groups if group.blocks.device is not None]
    try:
        if all(each.wait(_REGISTERING_S) for each in prepared):
            for group in groups:
                if group.blocks.device is not None:
                    group.check(scratch, " registered")
        times = [group.seconds(scratch) for group in groups]
    finally:
        for group in groups:
            group.blocks.follow(None)
    size = sum(group.size * group.repeats for group in groups)
    return CopySpeed(size / sum(store_s for store_s, _ in times), size / sum(load_s for _, load_s in times))


class _Group:
    """One KV cache group's blocks in the test: the first and the last, and some between, in any order."""

    def __init__(self, number: int, blocks: BlockMemory, given_up: threading.Event) -> None:
        self.blocks, self._number, self._given_up = blocks, number, given_up
        self._random = np.random.default_rng()
        layout = blocks.layout
        most = max(2, min(_MOST_BYTES // layout.block_bytes, _MOST_ROWS // len(layout.segments), _MOST_BLOCKS))
        chosen = {(layout.num_blocks - 1) * part // (most - 1) for part in range(most)}
        self.ids = self._random.permutation(np.array(sorted(chosen), np.intp))
        self.size = len(self.ids) * layout.block_bytes
        self.repeats = max(1, min(_MOST_REPEATS, _TIMED_BYTES // self.size))
        pages = Allocator.rounded(self.size) // PAGE
        first, second = -(-pages // 3), pages // 3
        last = pages - first - second  # in the arena: [page][second][page][last][page][first], the pages not ours
        places = [(second + last + 3, first), (1, second), (second + 2, last)]
        self.extents: Extents = tuple((at * PAGE, count * PAGE) for at, count in places if count)
        self.arena_bytes = (pages + 4) * PAGE

    def check(self, scratch: Scratch, kind: str) -> None:
        """Raise an error unless blocks come back, and nothing else changes. The blocks are then as they were.

        kind: of the arena's memory.
        """
        before = self._read()
        try:
            stored = self._new_rows()
            scratch.bytes[:] = self._random.integers(0, 256, len(scratch.bytes), np.uint8)
            arena, chunk = scratch.bytes.copy(), np.concatenate(stored)
            for offset, length in self.extents:
                part, chunk = chunk[:length], chunk[length:]
                arena[offset : offset + len(part)] = part
            self._move(scratch, True)
            if not (np.array_equal(scratch.bytes, arena) and self._holds(stored)):
                raise self._differs(f"a store into{kind} memory")
            for what, in_step in (("a load", False), ("a load within a step", True)):
                skip = int(len(self.ids) > 1)
                rows = self._new_rows()
                for at in range(0, len(rows), len(self.ids)):
                    rows[at + skip : at + len(self.ids)] = stored[at + skip : at + len(self.ids)]
                if in_step:
                    self.blocks.load_in_step(scratch, [CopyPiece(self.extents, self.ids, skip)])
                else:
                    self._move(scratch, False, skip)
                if not (np.array_equal(scratch.bytes, arena) and self._holds(rows)):
                    raise self._differs(f"{what} from{kind} memory")
        finally:
            self._write(before)

    def seconds(self, scratch: Scratch) -> tuple[float, float]:
        """The times of a store of the blocks and of a load of the same bytes, `repeats` times each."""
        begun = time.perf_counter()
        self._move(scratch, True, times=self.repeats)
        stored = time.perf_counter()
        self._move(scratch, False, times=self.repeats)
        return stored - begun, time.perf_counter() - stored

    def _move(self, scratch: Scratch, is_store: bool, skip: int = 0, times: int = 1) -> None:
        if self._given_up.is_set():
            raise TimeoutError("given up")
        self.blocks.move(scratch, [CopyPiece(self.extents, self.ids, skip)] * times, is_store)

    def _differs(self, what: str) -> _Differs:
        return _Differs(self._number, self.blocks, f"{what} does not copy the right bytes, or changes others")

    def _rows(self) -> Iterator[tuple[Segment, int]]:
        return itertools.product(self.blocks.layout.segments, self.ids.tolist())

    def _read(self) -> list[Bytes]:
        return [self.blocks.read(*each) for each in self._rows()]

    def _holds(self, rows: list[Bytes]) -> bool:
        return all(map(np.array_equal, self._read(), rows))

    def _write(self, rows: list[Bytes]) -> None:
        if self._given_up.is_set():
            raise TimeoutError("given up")
        for each, row in zip(self._rows(), rows, strict=True):
            self.blocks.write(*each, row)

    def _new_rows(self) -> list[Bytes]:
        whole, rows, at = self._random.integers(0, 256, self.size, np.uint8), [], 0
        for segment, _ in self._rows():
            rows.append(whole[at : at + segment.size])
            at += segment.size
        self._write(rows)
        return rows
