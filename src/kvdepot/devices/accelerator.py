"""Blocks in the memory of a GPU or another accelerator, copied by torch alone.

The small rows of a chunk are gathered into a staging buffer on the device, from which each run of the arena is one copy
at the speed of the bus; the other way round for loads. Used by a worker's lane (`move`) and within a step
(`load_in_step`), which have buffers and streams of their own. The same lines run on torch's "cpu", for the tests.

Rows are viewed as integers of the widest type that divides all of a layout's offsets, strides and sizes. A batch is the
same rows of several chunks; in the staging buffer they lie as in the arena:

    staging buffer               [chunk 0: rows of segment s, of s + 1, ...][chunk 1: the same] ...
    segment s of a chunk of n    bytes [n * before(s), n * before(s) + n * size(s)) of the chunk
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvdepot.devices import registration
from kvdepot.devices.blocks import ArenaBytes, BlockMemory, CopyPiece
from kvdepot.devices.registration import PIECE_BYTES, Registration
from kvdepot.errors import DeviceError
from kvdepot.memory.allocator import Extents
from kvdepot.memory.extents import Bytes
from kvdepot.protocol.layout import Layout, Segment

if TYPE_CHECKING:
    from types import ModuleType

STAGING_BYTES = 64 << 20
_LEAST_STAGING_BYTES = 4 << 20
_DIRECT_BYTES = 512 << 10
"""Rows of at least this size are copied one by one: that is as fast, without passing through the staging buffer."""
_BOUNCE_BYTES = 16 << 20
"""Size of the pinned buffer through which unregistered memory is copied."""
_MOST_IDS = 1 << 14
"""Rows of one gather."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _Stack(NamedTuple):
    """Equal segments at equal distances in one storage, such as keys and values: gathered with one call."""

    segments: int
    size: int
    before: int  # bytes of a block in earlier segments
    rows: torch.Tensor  # words[segments, num_blocks, size / word]


class _Cut(NamedTuple):
    """Segments `[first, end)` of a stack and blocks `[top, bottom)` of each chunk, from byte `at` of the batch on."""

    stack: _Stack
    first: int
    end: int
    top: int
    bottom: int
    at: int

    @property
    def size(self) -> int:
        """Bytes of one chunk."""
        return (self.end - self.first) * (self.bottom - self.top) * self.stack.size


class _Slot:
    """A stream, and the buffers that only its work uses."""

    def __init__(self, device: torch.device, module: ModuleType, size: int) -> None:
        self.size = size
        self.stage = torch.empty(size, dtype=torch.uint8, device=device)
        self.ids = torch.empty(_MOST_IDS, dtype=torch.int64, device=device)
        on_device = {} if device.type == "cpu" else {"device": device}
        self.stream = module.Stream(priority=-1, **on_device)
        self._event = module.Event()
        self._pinned = device.type != "cpu"
        self._bounce: torch.Tensor | None = None

    def synchronize(self) -> None:
        """Wait until all that was queued on the stream has been done."""
        self._event.record(self.stream)
        self._event.synchronize()

    def bounce(self) -> torch.Tensor:
        """A pinned buffer, made when it is first needed: soon the arena is registered, and needs none."""
        if self._bounce is None:
            size = min(self.size, _BOUNCE_BYTES)
            try:
                self._bounce = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError:  # the limit of locked memory: the driver has buffers of its own
                self._bounce = torch.empty(size, dtype=torch.uint8)
        return self._bounce


class _Buffers:
    """Two slots of the lane, used in turn, and one for loads within a step; shared by all groups of a device."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        try:
            with torch.inference_mode(False):
                self.lane = [_Slot(device, self.module, staging_bytes) for _ in range(2)]
                self.step = _Slot(device, self.module, -(-staging_bytes // 16) * 8)
        except AttributeError as exc:
            raise DeviceError(f"torch has no streams for {device}: blocks there cannot be cached") from exc
        self.lane_lock, self.step_lock = threading.Lock(), threading.Lock()
        self.module.synchronize(device)  # what was queued for others may still use this memory


_buffers: weakref.WeakValueDictionary[tuple[str, int], _Buffers] = weakref.WeakValueDictionary()
_buffers_lock = threading.Lock()


def _buffers_of(device: torch.device, staging_bytes: int) -> _Buffers:
    """The buffers of a device: those of another group, or new ones, smaller if the device lacks memory. Raises
    DeviceError."""
    with _buffers_lock:
        found = _buffers.get((str(device), staging_bytes))
        size = staging_bytes
        while found is None:
            try:
                found = _Buffers(device, size)
            except RuntimeError as exc:
                if size // 2 < _LEAST_STAGING_BYTES:
                    raise DeviceError(f"{device} has no memory for staging buffers of 2 x {size} bytes: {exc}") from exc
                size //= 2
        _buffers[str(device), staging_bytes] = found
        return found


class AcceleratorBlocks(BlockMemory):
    """Blocks in storages of torch on one device."""

    def __init__(
        self,
        layout: Layout,
        storages: Mapping[str, torch.UntypedStorage],
        device: torch.device,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """storages: by name of the layout's mappings; kept alive. staging_bytes: of each of the lane's two buffers
        (one more has half of it); a multiple of 16. Blocks while they are allocated.

        Raises DeviceError if the device has no memory for buffers of 4 MiB either.
        """
        self.layout, self.device = layout, device
        self._storages = [storages[mapping.name] for mapping in layout.mappings]
        self._buffers: _Buffers | None = _buffers_of(device, staging_bytes)
        self.task_bytes = sum(slot.size for slot in self._buffers.lane)
        self._registration: Registration | None = None
        with torch.inference_mode(False):
            self._word = self._widest_word()
            self._stacks = self._stacked()

    def _widest_word(self) -> int:
        """Bytes of a word; an address that is no multiple of it cannot be viewed as such words."""
        numbers = [number for each in self.layout.segments for number in (each.offset, each.stride, each.size)]
        return math.gcd(*numbers, *(storage.data_ptr() for storage in self._storages), max(_WORDS))

    def _stacked(self) -> list[_Stack]:
        """The layout's segments in order, in as few stacks as possible."""
        stacks, before, word = [], 0, self._word
        segments = self.layout.segments
        while segments:
            first, count = segments[0], _equally_apart(segments)
            step = segments[1].offset - first.offset if count > 1 else first.size
            rows = torch.empty(0, dtype=_WORDS[word], device=self.device).set_(
                self._storages[first.mapping], first.offset // word,
                (count, self.layout.num_blocks, first.size // word), (step // word, first.stride // word, 1),
            )  # fmt: skip
            stacks.append(_Stack(count, first.size, before, rows))
            before += count * first.size
            segments = segments[count:]
        return stacks

    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        buffers = self._opened()
        with buffers.lane_lock, registration.relaxed_capture(buffers.device), self._copying(buffers.lane):
            self._copy(arena, pieces, is_store, buffers.lane)
            for slot in buffers.lane:
                slot.synchronize()

    def load_in_step(self, arena: ArenaBytes, pieces: Sequence[CopyPiece]) -> None:
        """As `BlockMemory.load_in_step`. What is queued on the current stream may still use the blocks, so they are
        written after it; the calling thread waits for it only if the chunks do not fit into the buffer together."""
        buffers = self._opened()
        slot, current = buffers.step, buffers.module.current_stream(buffers.device)
        with buffers.step_lock, self._copying([slot]):
            ready, was_read = buffers.module.Event(), buffers.module.Event()
            ready.record(current)
            self._copy(arena, pieces, False, [slot], _Step(ready, was_read))
            current.wait_stream(slot.stream)
            was_read.synchronize()

    def read(self, segment: Segment, block: int) -> Bytes:
        data: Bytes = self._row(segment, block).to("cpu", copy=True).numpy()
        return data

    def write(self, segment: Segment, block: int, data: Bytes) -> None:
        self._row(segment, block).copy_(torch.from_numpy(data))

    def _row(self, segment: Segment, block: int) -> torch.Tensor:
        start = segment.offset + block * segment.stride
        storage = self._storages[segment.mapping]
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, start, (segment.size,), (1,))

    def follow(self, arena: ArenaBytes | None) -> threading.Event:
        """As `BlockMemory.follow`; the arena is pinned. Pinning beside an engine that captures graphs can fail the
        capture where relaxed_capture (registration.py) finds no runtime: call it after that, if you can."""
        held = None if arena is None else registration.hold(arena.bytes, self._opened().device)
        before, self._registration = self._registration, held
        if before is not None:
            registration.drop(before)
        return super().follow(arena) if held is None else held.ended

    def close(self) -> None:
        before, self._registration = self._registration, None
        if before is not None:
            registration.drop(before)
            if not before.holders:
                before.join()
        self._buffers = None
        self._stacks, self._storages = [], []

    def _opened(self) -> _Buffers:
        if self._buffers is None:
            raise DeviceError("these blocks are closed")
        return self._buffers

    @contextlib.contextmanager
    def _copying(self, slots: Sequence[_Slot]) -> Iterator[None]:
        """Within, errors of torch become DeviceError, once nothing that was queued can touch memory any more."""
        try:
            yield
        except BaseException as exc:
            with contextlib.suppress(RuntimeError):
                for slot in slots:
                    slot.synchronize()
            if isinstance(exc, RuntimeError):
                raise DeviceError(f"blocks on {self.device} could not be copied: {exc}") from exc
            raise

    def _copy(
        self,
        arena: ArenaBytes,
        pieces: Sequence[CopyPiece],
        is_store: bool,
        slots: Sequence[_Slot],
        step: _Step | None = None,
    ) -> None:
        """Queue the copies of chunks on slots in turn."""
        module, turn, most = self._opened().module, itertools.cycle(slots), slots[0].size
        # Within a step, rows are staged if they can be: copied directly, they would wait for what is queued.
        direct = most + 1 if step else min(_DIRECT_BYTES, most + 1)
        held = self._registration
        is_held = held is not None and held.covers(arena.bytes)
        with held.use() if held is not None and is_held else contextlib.nullcontext(()) as registered:
            host = _Host(arena.bytes, registered)
            for blocks, group in itertools.groupby(pieces, key=lambda piece: len(piece.block_ids)):
                chunks = [piece for piece in group if is_store or piece.skip < blocks]
                for batch in _batches([each for each in self._stacks if each.size < direct], blocks, most):
                    together = max(1, min(most // sum(cut.size for cut in batch), _MOST_IDS // blocks))
                    for first in range(0, len(chunks), together):
                        slot = next(turn)
                        with module.stream(slot.stream):
                            self._copy_batch(slot, host, batch, chunks[first : first + together], is_store, step)
                for stack in (each for each in self._stacks if each.size >= direct):
                    for piece in chunks:
                        slot = next(turn)
                        with module.stream(slot.stream):
                            _copy_rows(slot, host, stack, piece, is_store, step)

    def _copy_batch(
        self,
        slot: _Slot,
        host: _Host,
        batch: Sequence[_Cut],
        chunks: Sequence[CopyPiece],
        is_store: bool,
        step: _Step | None,
    ) -> None:
        count, blocks, word = len(chunks), len(chunks[0].block_ids), self._word
        size = sum(cut.size for cut in batch)
        start = blocks * (batch[0].stack.before + batch[0].first * batch[0].stack.size)
        start += batch[0].top * batch[0].stack.size
        places = [place for piece in chunks for place in _places(piece.extents, start, size)]
        stage = slot.stage[: count * size]
        # Memory that is not pinned has been read when this returns.
        columns = slice(batch[0].top, batch[0].bottom)
        wanted = np.stack([piece.block_ids[columns] for piece in chunks])
        ids = slot.ids[: wanted.size].view(wanted.shape)
        ids.copy_(torch.from_numpy(wanted), non_blocking=True)
        if not is_store:
            host.copy(slot, stage, places, is_store)
            if step is not None:
                step.was_read.record(slot.stream)
                slot.stream.wait_event(step.ready)
        words = stage.view(_WORDS[word])
        for cut in batch:
            rows, width, high = cut.stack.rows[cut.first : cut.end], cut.stack.size // word, wanted.shape[1]
            strides = (high * width, size // word, width, 1)
            part = words.as_strided((len(rows), count, high, width), strides, cut.at // word)
            if is_store:
                torch.ops.aten.index.Tensor_out(rows, [None, ids], out=part)
                continue
            first = 0
            for skip, group in itertools.groupby(max(piece.skip - columns.start, 0) for piece in chunks):
                some = slice(first, first + len(list(group)))
                first = some.stop
                if skip < high:
                    torch.ops.aten.index_put_(rows, [None, ids[some, skip:]], part[:, some, skip:])
        if is_store:
            host.copy(slot, stage, places, is_store)


class _Step(NamedTuple):
    """Events of a load within a step: blocks may be written after `ready`; `was_read` is behind the last byte that was
    read from the arena."""

    ready: Any
    was_read: Any


class _Host:
    """The arena's memory, of which only some pieces are registered."""

    def __init__(self, memory: Bytes, registered: Collection[int]) -> None:
        self._memory, self._registered = memory, registered
        # The same memory as a tensor, also where it is read-only: torch would warn.
        whole = (ctypes.c_uint8 * len(memory)).from_address(memory.ctypes.data)
        self._tensor = torch.frombuffer(whole, dtype=torch.uint8)

    def copy(self, slot: _Slot, data: torch.Tensor, places: Iterable[tuple[int, int]], is_store: bool) -> None:
        """Queue copies between bytes of the device and places of the arena, in order, on the slot's stream."""
        done = 0
        for offset, size in _joined(places):
            part = data[done : done + size]
            done += size
            if offset // PIECE_BYTES not in self._registered:
                self._bounce(slot, part, self._memory[offset : offset + size], is_store)
            elif is_store:
                self._tensor[offset : offset + size].copy_(part, non_blocking=True)
            else:
                part.copy_(self._tensor[offset : offset + size], non_blocking=True)

    def _bounce(self, slot: _Slot, data: torch.Tensor, area: Bytes, is_store: bool) -> None:
        """Copy through the slot's pinned buffer: left to the driver, copies of other memory hold up the engine's."""
        buffer = slot.bounce()
        for at in range(0, len(area), len(buffer)):
            part, there = data[at : at + len(buffer)], area[at : at + len(buffer)]
            through = buffer[: len(there)]
            if is_store:
                through.copy_(part, non_blocking=True)
                slot.synchronize()
                there[:] = through.numpy()
            else:
                slot.synchronize()  # a copy may still read it
                through.numpy()[:] = there
                part.copy_(through, non_blocking=True)


def _copy_rows(slot: _Slot, host: _Host, stack: _Stack, piece: CopyPiece, is_store: bool, step: _Step | None) -> None:
    """Queue copies of large rows, each by itself."""
    if step is not None:
        slot.stream.wait_event(step.ready)
    blocks, rows = len(piece.block_ids), stack.rows.view(torch.uint8)
    ids = piece.block_ids.tolist()
    for segment in range(stack.segments):
        for at in range(0 if is_store else piece.skip, blocks):
            start = blocks * (stack.before + segment * stack.size) + at * stack.size
            host.copy(slot, rows[segment, ids[at]], _places(piece.extents, start, stack.size), is_store)
    if step is not None:
        step.was_read.record(slot.stream)


def _equally_apart(segments: Sequence[Segment]) -> int:
    """The number of segments, from the first on, that are alike and at equal distances in one mapping."""
    first, count = segments[0], 1
    for last, each in itertools.pairwise(segments):
        step = segments[1].offset - first.offset
        alike = (each.mapping, each.stride, each.size) == (first.mapping, first.stride, first.size)
        if not alike or step <= 0 or each.offset - last.offset != step:
            break
        count += 1
    return count


def _batches(stacks: Sequence[_Stack], blocks: int, most: int) -> Iterator[list[_Cut]]:
    """Cut chunks of so many blocks into batches, each a range of a chunk of at most so many bytes."""
    batch: list[_Cut] = []
    used = end = 0
    for stack in stacks:
        whole, first = blocks * stack.size, 0
        rows = blocks if whole <= most and blocks <= _MOST_IDS else min(most // stack.size, _MOST_IDS)
        while first < stack.segments:
            fit = (most - used) // whole if rows == blocks else 0
            if batch and (not fit or end != stack.before + first * stack.size):
                yield batch
                batch, used = [], 0
                continue
            if not fit:  # one segment of all the blocks is too large
                for top in range(0, blocks, rows):
                    yield [_Cut(stack, first, first + 1, top, min(top + rows, blocks), 0)]
                first += 1
                continue
            last = min(first + fit, stack.segments)
            batch.append(_Cut(stack, first, last, 0, blocks, used))
            used += (last - first) * whole
            first, end = last, stack.before + last * stack.size
    if batch:
        yield batch


def _places(extents: Extents, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Offsets and sizes in the arena of a chunk's bytes `[start, start + size)`, in order."""
    for offset, length in extents:
        if start < length and size:
            taken = min(size, length - start)
            yield offset + start, taken
            size -= taken
            start = 0
        else:
            start = max(start - length, 0)


def _joined(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same bytes in as few places as possible, none across the end of a piece that is registered by itself."""
    begin = end = 0
    for offset, size in itertools.chain(places, [(-1, 0)]):
        if offset == end:
            end += size
            continue
        while begin < end:
            cut = min(end, (begin // PIECE_BYTES + 1) * PIECE_BYTES)
            yield begin, cut - begin
            begin = cut
        begin, end = offset, offset + size
