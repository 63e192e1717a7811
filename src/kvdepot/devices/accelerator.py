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


class _Planes(NamedTuple):
    """Equal segments at equal distances in one storage, such as keys and values: gathered with one call."""

    segments: int
    size: int
    before: int  # bytes of a block in earlier segments
    rows: torch.Tensor  # words[segments, num_blocks, size / word]


class _Cut(NamedTuple):
    """Segments `[first, end)` of a stack and blocks `[top, bottom)` of each chunk, from byte `at` of the batch on."""

    stack: _Planes
    first: int
    end: int
    top: int
    bottom: int
    at: int

    @property
    def size(self) -> int:
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
            except RuntimeError:  # beyond the limit of locked memory; the driver uses its own buffers
                self._bounce = torch.empty(size, dtype=torch.uint8)
        return self._bounce


class _Buffers:
    """Buffers of all groups of a device: two slots of the lane, used in turn, one for loads within a step, and the
    registered arena."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.users = 0  # guarded by _lock
        self.registration: Registration | None = None
        self.lane_lock, self.step_lock = threading.Lock(), threading.Lock()
        try:
            with torch.inference_mode(False):
                self.lane = [_Slot(device, self.module, staging_bytes) for _ in range(2)]
                self.step = _Slot(device, self.module, -(-staging_bytes // 16) * 8)
        except AttributeError as exc:
            raise DeviceError(f"torch has no streams for {device}: blocks there cannot be cached") from exc
        self.module.synchronize(device)  # work that was queued for other users may still use this memory

    def follow(self, arena: ArenaBytes | None) -> threading.Event | None:
        """Register an arena instead of the one before. Never blocks."""
        with _lock:
            before = self.registration
            if before is not None and arena is not None and before.covers(arena.bytes):
                return before.ended
            if before is not None:
                before.stop()
            self.registration = None
            if arena is not None and self.device.type in {"cuda", "cpu"}:
                self.registration = Registration(arena.bytes, self.device, before)
                return self.registration.ended
            return None


_lock = threading.Lock()
_buffers: weakref.WeakValueDictionary[tuple[torch.device, int], _Buffers] = weakref.WeakValueDictionary()
"""Buffers that are in use, by device and the size that was asked for. Guarded by _lock."""


def _buffers_of(device: torch.device, staging_bytes: int) -> _Buffers:
    """The buffers of a device: the ones that another group already uses, or new ones, smaller if the device lacks
    memory. Raises DeviceError."""
    with _lock:
        found, size = _buffers.get((device, staging_bytes)), staging_bytes
        while found is None:
            try:
                found = _Buffers(device, size)
            except RuntimeError as exc:
                if size // 2 < _LEAST_STAGING_BYTES:
                    raise DeviceError(
                        f"{device} has no memory for two staging buffers of {size >> 20} MiB: let the engine take less "
                        f"of it (vLLM: --gpu-memory-utilization): {exc}"
                    ) from exc
                size //= 2
        _buffers[device, staging_bytes] = found
        found.users += 1
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
        """storages: by name of the layout's mappings; kept alive. staging_bytes: bytes of each of the lane's two
        buffers, a multiple of 16; the buffer for loads within a step has half. Blocks while they are allocated.

        Raises DeviceError if the device has no memory for buffers of 4 MiB either.
        """
        self.layout, self.device = layout, device
        self._storages = [storages[mapping.name] for mapping in layout.mappings]
        self._buffers: _Buffers | None = _buffers_of(device, staging_bytes)
        self.task_bytes = sum(slot.size for slot in self._buffers.lane)
        with torch.inference_mode(False):
            self._word = self._widest_word()
            self._planes = self._as_planes()

    def _widest_word(self) -> int:
        """Bytes of a word. Only addresses that are multiples of this size can be viewed as words."""
        numbers = [number for each in self.layout.segments for number in (each.offset, each.stride, each.size)]
        return math.gcd(*numbers, *(storage.data_ptr() for storage in self._storages), max(_WORDS))

    def _as_planes(self) -> list[_Planes]:
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
            stacks.append(_Planes(count, first.size, before, rows))
            before += count * first.size
            segments = segments[count:]
        return stacks

    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        buffers = self._opened()
        with buffers.lane_lock, registration.relaxed_capture(buffers.device):
            self._copy(_Transfer(arena.bytes, is_store), pieces, buffers.lane)

    def load_in_step(self, arena: ArenaBytes, pieces: Sequence[CopyPiece]) -> None:
        """See `BlockMemory.load_in_step`. Work that is queued on the current stream may still use the blocks, so they
        are written after it. The calling thread waits for that work only if the chunks do not fit into the buffer."""
        buffers = self._opened()
        slot, current = buffers.step, buffers.module.current_stream(buffers.device)
        with buffers.step_lock:
            ready, was_read = buffers.module.Event(), buffers.module.Event()
            ready.record(current)
            self._copy(_Transfer(arena.bytes, False, ready, was_read), pieces, [slot])
            current.wait_stream(slot.stream)

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
        """See `BlockMemory.follow`. The arena is pinned for all groups of the device in this process."""
        return self._opened().follow(arena) or super().follow(arena)

    def close(self) -> None:
        buffers, self._buffers = self._buffers, None
        self._planes, self._storages = [], []
        if buffers is not None:
            with _lock:
                buffers.users -= 1
                is_last = not buffers.users
            held = buffers.registration
            if is_last and held is not None:
                buffers.follow(None)
                held.join()

    def _opened(self) -> _Buffers:
        if self._buffers is None:
            raise DeviceError("these blocks are closed")
        return self._buffers

    def _copy(self, transfer: _Transfer, pieces: Sequence[CopyPiece], slots: Sequence[_Slot]) -> None:
        """Copy chunks on slots in turn, and wait until the arena's bytes were written or read.

        After an error nothing that was queued can touch memory any more.
        """
        held = self._opened().registration
        try:
            is_held = held is not None and held.covers(transfer.memory)
            with held.use() if held is not None and is_held else contextlib.nullcontext(()) as transfer.registered:
                self._queue(transfer, pieces, slots)
                transfer.wait(slots)
        except BaseException as exc:
            with contextlib.suppress(RuntimeError):
                for slot in slots:
                    slot.synchronize()
            if isinstance(exc, (RuntimeError, IndexError)):
                raise DeviceError(f"blocks on {self.device} could not be copied: {exc}") from exc
            raise

    def _queue(self, transfer: _Transfer, pieces: Sequence[CopyPiece], slots: Sequence[_Slot]) -> None:
        module, turn, most = self._opened().module, itertools.cycle(slots), slots[0].size
        # Within a step, rows are staged if they can be: copied directly, they would wait for what is queued.
        direct = most + 1 if transfer.ready else min(_DIRECT_BYTES, most + 1)
        for blocks, group in itertools.groupby(pieces, key=lambda piece: len(piece.block_ids)):
            chunks = [piece for piece in group if blocks > (0 if transfer.is_store else piece.skip)]
            for batch in _batches([each for each in self._planes if each.size < direct], blocks, most):
                together = max(1, min(most // sum(cut.size for cut in batch), _MOST_IDS // blocks))
                for first in range(0, len(chunks), together):
                    slot = next(turn)
                    with module.stream(slot.stream):
                        self._queue_batch(transfer, slot, batch, chunks[first : first + together])
            for stack in (each for each in self._planes if each.size >= direct):
                for piece in chunks:
                    slot = next(turn)
                    with module.stream(slot.stream):
                        _queue_rows(transfer, slot, stack, piece)

    def _queue_batch(
        self, transfer: _Transfer, slot: _Slot, batch: Sequence[_Cut], chunks: Sequence[CopyPiece]
    ) -> None:
        first, word = batch[0], self._word
        size, top, high = sum(cut.size for cut in batch), first.top, first.bottom - first.top
        blocks = len(chunks[0].block_ids)
        start = blocks * (first.stack.before + first.first * first.stack.size) + top * first.stack.size
        places = [place for piece in chunks for place in _places(piece.extents, start, size)]
        stage = slot.stage[: len(chunks) * size]
        wanted = np.stack([piece.block_ids[top : first.bottom] for piece in chunks])
        ids = slot.ids[: wanted.size].view(wanted.shape)
        ids.copy_(torch.from_numpy(wanted), non_blocking=True)  # has read its source on return, as that is not pinned
        if not transfer.is_store:
            transfer.copy(slot, stage, places)
            transfer.wait_to_write(slot)
        words = stage.view(_WORDS[word])
        for cut in batch:
            rows, width = cut.stack.rows[cut.first : cut.end], cut.stack.size // word
            strides = (high * width, size // word, width, 1)
            part = words.as_strided((len(rows), len(chunks), high, width), strides, cut.at // word)
            if transfer.is_store:
                torch.ops.aten.index.Tensor_out(rows, [None, ids], out=part)
                continue
            at = 0
            for skip, group in itertools.groupby(max(piece.skip - top, 0) for piece in chunks):
                some = slice(at, at + len(list(group)))
                at = some.stop
                if skip < high:
                    torch.ops.aten.index_put_(rows, [None, ids[some, skip:]], part[:, some, skip:])
        if transfer.is_store:
            transfer.copy(slot, stage, places)


class _Transfer:
    """Copies in one direction between a device and the arena's memory, of which only some pieces are registered."""

    def __init__(self, memory: Bytes, is_store: bool, ready: Any = None, was_read: Any = None) -> None:
        """ready, was_read: events of a load within a step. Blocks may be written after `ready`; `was_read` is recorded
        behind the last byte that is read from the arena."""
        self.memory, self.is_store, self.ready, self._was_read = memory, is_store, ready, was_read
        self.registered: Collection[int] = ()
        # The same memory as a tensor, also where it is read-only: torch would warn.
        whole = (ctypes.c_uint8 * len(memory)).from_address(memory.ctypes.data)
        self._tensor = torch.frombuffer(whole, dtype=torch.uint8)

    def wait_to_write(self, slot: _Slot) -> None:
        """Everything on the slot's stream has been read from the arena; what is queued next writes blocks."""
        if self.ready is not None:
            self._was_read.record(slot.stream)
            slot.stream.wait_event(self.ready)

    def wait(self, slots: Sequence[_Slot]) -> None:
        """Wait until all bytes have arrived; within a step, until they have been read."""
        if self.ready is not None:
            self._was_read.synchronize()
        else:
            for slot in slots:
                slot.synchronize()

    def copy(self, slot: _Slot, data: torch.Tensor, places: Iterable[tuple[int, int]]) -> None:
        """Queue copies between bytes of the device and places of the arena, in order, on the slot's stream."""
        done = 0
        for offset, size in _joined(places):
            part = data[done : done + size]
            done += size
            if offset // PIECE_BYTES not in self.registered:
                self._bounce(slot, part, self.memory[offset : offset + size])
            elif self.is_store:
                self._tensor[offset : offset + size].copy_(part, non_blocking=True)
            else:
                part.copy_(self._tensor[offset : offset + size], non_blocking=True)

    def _bounce(self, slot: _Slot, data: torch.Tensor, area: Bytes) -> None:
        """Copy through the slot's pinned buffer: the driver's copies of unpinned memory would delay the engine's
        copies."""
        buffer = slot.bounce()
        for at in range(0, len(area), len(buffer)):
            part, there = data[at : at + len(buffer)], area[at : at + len(buffer)]
            through = buffer[: len(there)]
            if self.is_store:
                through.copy_(part, non_blocking=True)
                slot.synchronize()
                there[:] = through.numpy()
            else:
                slot.synchronize()  # an earlier copy may still read the buffer
                through.numpy()[:] = there
                part.copy_(through, non_blocking=True)


def _queue_rows(transfer: _Transfer, slot: _Slot, stack: _Planes, piece: CopyPiece) -> None:
    if transfer.ready is not None:
        slot.stream.wait_event(transfer.ready)
    rows, ids = stack.rows.view(torch.uint8), piece.block_ids.tolist()
    for segment in range(stack.segments):
        for at in range(0 if transfer.is_store else piece.skip, len(ids)):
            start = len(ids) * (stack.before + segment * stack.size) + at * stack.size
            transfer.copy(slot, rows[segment, ids[at]], _places(piece.extents, start, stack.size))
    transfer.wait_to_write(slot)


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


def _batches(stacks: Sequence[_Planes], blocks: int, most: int) -> Iterator[list[_Cut]]:
    """Cut chunks of `blocks` blocks into batches, each a range of a chunk of at most `most` bytes."""
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
    """The same bytes in as few places as possible, none of which crosses the end of a registered piece."""
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
