"""CPU tensors: the client moves their storage into POSIX shared memory; the server maps it and copies with numpy.

The client calls `share`, with torch tensors, which it may have made under `zeros_in_shared_memory`, and later
`enter_pages`; the server uses `HostTensors`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdepot.errors import ArenaError, LayoutError
from kvdepot.memory import shm
from kvdepot.memory.copier import Bytes, CopyPiece, Ids, Mapped, Memory, views
from kvdepot.memory.shm import SHM
from kvdepot.protocol.layout import Layout, Segment, TensorView

if TYPE_CHECKING:
    import torch

_MIN_UNIT = 512
"""Smallest unit to gather by index if segments are not dense; below it, one copy per block is faster."""

_CALLS = 4
"""A stack of at least this many segments per block of a chunk is copied block by block."""
_TORCH_ALIGNS = 64
"""torch aligns CPU memory to multiples of this; NumPy and Python rarely do."""
_ENTER_BYTES = 16 << 20
"""Bytes whose pages are entered at once: some milliseconds, in which the process can map nothing."""
_LOOKS, _LOOK_S = 10, 0.02
"""Looks whether a dead client's files are closed, and the seconds between two."""
_TRIES = 5
"""Attempts to reach torch's helper process. torch waits one second for each, which a busy machine may exceed."""


def zeros_in_shared_memory() -> AbstractContextManager[Any]:
    """A context in which `torch.zeros` creates CPU tensors in shared memory, so that `share` has nothing to move.

    `torch.zeros` blocks about as long as otherwise. If the shared memory is full, it creates other tensors.
    """
    from torch.overrides import TorchFunctionMode

    class SharedZeros(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            import torch

            options = kwargs or {}
            device = torch.device(options.get("device") or torch.get_default_device())
            if func is not torch.zeros or device.type != "cpu":
                return func(*args, **options)
            try:
                return _shared_zeros(func(*args, **{**options, "device": "meta"}))
            except ArenaError:
                return func(*args, **options)

    return SharedZeros()


def _shared_zeros(meta: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape and type of a tensor without memory."""
    import torch

    make = torch.UntypedStorage._new_using_filename_cpu  # allocates all pages, or fails
    storage = _ask_torch(lambda: make(meta.nbytes), f"a tensor of {meta.nbytes} bytes")
    return torch.empty(0, dtype=meta.dtype).set_(storage, 0, meta.shape)


def enter_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Begin to enter the pages of tensors that are in shared memory into this process's page table; does not block.

    A new mapping has none, and each page that is used first would cost a fault. Others' memory is left alone.
    """
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    shared = [each for each in storages.values() if each.device.type == "cpu" and each.is_shared()]
    starts = [each.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE for each in shared]
    ranges = [(start, each.data_ptr() + each.nbytes() - start) for each, start in zip(shared, starts, strict=True)]
    _Entering(ranges, keep=shared)


class _Entering:
    """Enters mapped pages into this process's page table in the background, as an engine starts sooner without waiting.

    A page that is used first is entered by that use, which is slower. Ends by itself.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], keep: object) -> None:
        """ranges: addresses and sizes in bytes. keep: what must not be freed before the end, lest they be unmapped."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ranges, keep), name="kvdepot-pages", daemon=True)
        self._thread.start()

    def _run(self, ranges: Sequence[tuple[int, int]], keep: object) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))  # engines bind the thread that started this to one CPU
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for start, size in ranges:
            for address in range(start, start + size, _ENTER_BYTES):
                if self._stopped.is_set():
                    return
                shm.enter_pages(address, min(_ENTER_BYTES, start + size - address))

    def stop(self) -> None:
        """Blocks for some milliseconds at most."""
        self._stopped.set()
        self._thread.join()


def _ask_torch(call: Callable[[], Any], called: str) -> Any:
    """Call torch for shared memory, again if its helper process did not answer. Raises ArenaError if that is full,
    LayoutError for other errors."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return call()
        except RuntimeError as exc:
            if any(os.strerror(number) in str(exc) for number in (errno.ENOSPC, errno.ENOMEM)):
                raise ArenaError(f"{called} does not fit into {SHM}: {exc}") from exc
            if not tries_left or "timed out" not in str(exc):
                raise LayoutError(f"{called} cannot be in shared memory: {exc}") from exc
    raise AssertionError


def share(tensor: torch.Tensor, name: str) -> TensorView:
    """Move a tensor's storage into shared memory (once) and describe where its elements are.

    All torch tensors on the same storage move with it and stay valid. Its old memory is freed, so addresses held by
    others (NumPy, DLPack) become invalid. Blocks while the bytes are copied, about 3 s per GiB. torch removes the file
    when the process ends, even by `kill -9`; the server does if torch's helper process was killed, too. Raises
    ArenaError if the shared memory is full, LayoutError for a tensor that cannot be moved.
    """
    storage = tensor.untyped_storage()
    _check_own(tensor, name or "tensor")
    _, file, size = _ask_torch(storage._share_filename_cpu_, name or "tensor")
    mapping = file.decode().lstrip("/")
    # torch keeps a reference count before the bytes; its length follows from the file's.
    header = (SHM / mapping).stat().st_size - size
    if header < 0:
        raise LayoutError(f"{name or 'tensor'}: torch made {mapping} shorter than its storage of {size} bytes")
    item = tensor.element_size()
    return TensorView(
        name=name,
        mapping=mapping,
        mapping_bytes=header + size,
        offset=header + tensor.storage_offset() * item,
        shape=tuple(tensor.shape),
        strides=tuple(stride * item for stride in tensor.stride()),
        item_bytes=item,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def view_memory_file(name: str, address: int, rows: tuple[int, int, int]) -> TensorView:
    """Describe bytes of this process that lie in a memory file (memfd_create), which the server maps where it is.

    rows: how many, the bytes of one, and the bytes from one to the next. Raises LayoutError for any other memory.
    """
    count, size, stride = rows
    first, start, link = _mapping_at(address)
    mapping = shm.memory_file(link) if link.startswith("/memfd:") else None
    if mapping is None:
        raise LayoutError(f"{name or 'memory'} is not in a memory file (memfd_create) that this process has open")
    length = Path("/proc/self/fd", mapping.split(":")[2]).stat().st_size
    return TensorView(name, mapping, length, start + address - first, (count, size), (stride, 1), 1, "uint8")


def _check_own(tensor: torch.Tensor, called: str) -> None:
    """Raise LayoutError if the storage must move but others are known to hold its address.

    torch does not know who imported it by DLPack, or keeps its `data_ptr()`.
    """
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if storage.is_shared():
        if not _file_at(address).startswith(f"{SHM}/torch_"):  # otherwise it is in a file of torch's, and stays there
            raise LayoutError(
                f"{called}: its memory is a mapped file, or shared with other processes by share_memory_(); moving it "
                "to other shared memory would disconnect it: allocate it with torch"
            )
    elif not storage.resizable():  # torch did not allocate this memory, or numpy() was called on it at some time
        if address % _TORCH_ALIGNS or _file_at(address):
            raise LayoutError(
                f"{called}: its memory is not torch's own (from_numpy, frombuffer, DLPack, a mapped file), and moving "
                "it into shared memory would detach it from its owner: allocate it with torch"
            )
        if _has_array(tensor):
            raise LayoutError(
                f"{called}: a NumPy array or detached tensor of it exists, and moving it into shared memory "
                "would free the array's memory: delete it, and create it again once the tensor is registered"
            )


def _file_at(address: int) -> str:
    """The path of the file that is mapped at an address; empty if there is none, or it is deleted."""
    path = _mapping_at(address)[2]
    return "" if path.startswith("[") or path.endswith(" (deleted)") else path


def _mapping_at(address: int) -> tuple[int, int, str]:
    """The mapping at an address: its first address, the offset in its file there, and the file as the kernel names it;
    an empty name if there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, _, offset, _, _, *path = line.split(" ", maxsplit=5)
        first, _, end = span.partition("-")
        if int(first, 16) <= address < int(end, 16):
            return int(first, 16), int(offset, 16), "".join(path).strip()
    return 0, 0, ""


def _has_array(tensor: torch.Tensor) -> bool:
    """Whether a NumPy array of a tensor's storage may exist; it would hold a tensor that is not a view of ours."""
    import torch

    origin = tensor if tensor._base is None else tensor._base
    address = tensor.untyped_storage().data_ptr()
    return any(
        type(other) is torch.Tensor
        and other is not tensor
        and other is not origin
        and torch._C._has_storage(other)
        and not other._is_view()
        and other.untyped_storage().data_ptr() == address
        for other in gc.get_objects()
    )


@dataclass
class _Rows:
    """One segment of all blocks, for indexing by block id."""

    size: int
    strided: Bytes  # uint8[num_blocks, size]
    dense: bool  # blocks are adjacent
    units: Bytes | None = None  # uint8[n, unit]: the same memory in units, for np.take
    unit_ids: Ids | None = None  # units of a block, relative to block * unit_stride
    unit_stride: int = 1


@dataclass
class HostTensors(Mapped):
    """A worker's paged KV tensors in shared memory, mapped in this process."""

    layout: Layout
    task_bytes: int = 8 << 20
    stacks: list[_Stack] = field(default_factory=list)
    _files: shm.SharedFiles | None = None
    _entering: _Entering | None = None

    @classmethod
    def open(cls, layout: Layout) -> HostTensors:
        """Map every file of a layout. Raises LayoutError if one is missing, too small or not ours.

        The pages are entered in the background, so that copies need not do it.
        """
        files = shm.SharedFiles([(mapping.name, mapping.size) for mapping in layout.mappings])
        sized = zip(files.starts, layout.mappings, strict=False)
        views = [files.bytes[start : start + mapping.size] for start, mapping in sized]
        entering = _Entering([(view.ctypes.data, len(view)) for view in views], keep=None)
        rows = [_rows(views[s.mapping], s, layout.num_blocks) for s in layout.segments]
        return cls(layout, stacks=_stacks(rows), _files=files, _entering=entering)

    @classmethod
    def of_process(cls, layout: Layout, tensors: Iterable[torch.Tensor]) -> HostTensors:
        """Tensors that this process has shared, in the mappings that it uses itself, whose pages are entered."""
        ends = {}
        for storage in {each.data_ptr(): each for each in (tensor.untyped_storage() for tensor in tensors)}.values():
            _, file, size = storage._share_filename_cpu_()
            ends[file.decode().lstrip("/")] = storage.data_ptr() + size
        views = [
            np.ctypeslib.as_array((ctypes.c_uint8 * each.size).from_address(ends[each.name] - each.size))
            for each in layout.mappings
        ]
        return cls(layout, stacks=_stacks([_rows(views[s.mapping], s, layout.num_blocks) for s in layout.segments]))

    def whole(self) -> bool:
        """Whether no file was truncated by its client: touching the missing pages would kill this process."""
        fds = self._files.fds if self._files is not None else []
        sizes = zip(fds, self.layout.mappings, strict=False)
        return all(os.fstat(fd).st_size >= mapping.size for fd, mapping in sizes)

    def move(self, memory: Memory, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        for piece in pieces:
            start = 0
            for stack, size in _sized(self.stacks, piece):
                where = views(memory.bytes, piece.extents, start, size)
                whole = where[0]
                if len(where) > 1:
                    whole = np.empty(size, np.uint8) if is_store else np.concatenate(where)
                stack.copy(piece.block_ids, whole, 0 if is_store else piece.skip, is_store)
                if is_store and len(where) > 1:
                    done = 0
                    for part in where:
                        part[:] = whole[done : done + len(part)]
                        done += len(part)
                start += size

    def close(self) -> None:
        if self._entering is not None:
            self._entering.stop()
        self.stacks.clear()
        if self._files is not None:
            self._files.close()

    def close_after_death(self) -> None:
        """Also remove the files, which torch does unless its helper process was killed together with the client."""
        self.close()
        left = [mapping.name for mapping in self.layout.mappings if shm.is_tensors(mapping.name)]
        for _ in range(_LOOKS):  # the kernel may be about to close the dead process's files
            left = [name for name in left if not shm.remove_left_tensors(name)]
            if not left:
                return
            time.sleep(_LOOK_S)


def _rows(memory: Bytes, segment: Segment, num_blocks: int) -> _Rows:
    size, stride = segment.size, segment.stride
    span = memory[segment.offset : segment.offset + (num_blocks - 1) * stride + size]
    strided = np.lib.stride_tricks.as_strided(span, (num_blocks, size), (stride, 1))
    if stride == size:
        return _Rows(size, strided, True, span.reshape(num_blocks, size))
    unit = math.gcd(stride, size)
    if unit < _MIN_UNIT:
        return _Rows(size, strided, False)
    per_block = np.arange(size // unit, dtype=np.intp)
    return _Rows(size, strided, False, span.reshape(-1, unit), per_block, stride // unit)


@dataclass
class _Stack:
    """Segments of equal size at equal distances, such as those of all layers: a block of them is one array, which is
    copied with one call. Small chunks have more segments than blocks, and so few bytes that calls count."""

    rows: list[_Rows]
    planes: Bytes
    """uint8[layers, segments of a layer, num_blocks, size], the memory of `rows`."""

    def copy(self, ids: Ids, area: Bytes, skip: int, is_store: bool) -> None:
        """Copy blocks to a chunk's bytes of these segments, or back; not the first `skip` blocks."""
        size, count = self.rows[0].size, len(ids)
        if len(self.rows) < _CALLS * count:
            parts = area.reshape(len(self.rows), count, size)[:, skip:]
            runs = _runs(ids[skip:])
            for row, part in zip(self.rows, parts, strict=True):
                (_gather_rows if is_store else _scatter_rows)(row, ids[skip:], runs, part)
            return
        parts = area.reshape(*self.planes.shape[:2], count, size)
        for at, block in enumerate(ids.tolist()[skip:], skip):
            if is_store:
                parts[:, :, at] = self.planes[:, :, block]
            else:
                self.planes[:, :, block] = parts[:, :, at]


def _stacks(rows: list[_Rows]) -> list[_Stack]:
    """The segments in order, in as few stacks as possible: with one segment a layer, or two (keys and values)."""
    stacks, at = [], 0
    starts = [row.strided.ctypes.data for row in rows]
    while at < len(rows):
        counts = {in_layer: _equally_apart(rows[at:], starts[at:], in_layer) for in_layer in (2, 1)}
        in_layer = max(counts, key=lambda each: (counts[each], -each))
        members, first = rows[at : at + counts[in_layer]], rows[at].strided
        layers = len(members) // in_layer
        steps = starts[at + in_layer * (layers > 1)] - starts[at], starts[at + in_layer - 1] - starts[at]
        shape, strides = (layers, in_layer, *first.shape), (*steps, *first.strides)
        stacks.append(_Stack(members, np.lib.stride_tricks.as_strided(first, shape, strides)))
        at += len(members)
    return stacks


def _equally_apart(rows: Sequence[_Rows], starts: Sequence[int], in_layer: int) -> int:
    """The number of segments, from the first on, that one stack can have with `in_layer` segments a layer."""
    first, count = rows[0].strided, 0
    for row, start in zip(rows, starts, strict=True):
        if row.strided.shape != first.shape or row.strided.strides != first.strides:
            break
        if count >= in_layer and start - starts[count - in_layer] != starts[in_layer] - starts[0]:
            break
        count += 1
    return count // in_layer * in_layer


def _sized(stacks: Sequence[_Stack], piece: CopyPiece) -> Iterator[tuple[_Stack, int]]:
    """The stacks and their bytes in a chunk; segments alone if it lies in several places, which takes a buffer."""
    if len(piece.extents) > 1:
        stacks = [_Stack([row], row.strided[None, None]) for stack in stacks for row in stack.rows]
    for stack in stacks:
        yield stack, len(stack.rows) * stack.rows[0].size * len(piece.block_ids)


def _runs(ids: Ids) -> list[tuple[int, int]] | None:
    """`[first, end)` runs of adjacent block ids; None if they are so short that indexing is faster."""
    if len(ids) < 2:
        return [(0, 1)] if len(ids) else []
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    if len(cuts) * 2 >= len(ids) > 2:
        return None
    edges = [0, *cuts.tolist(), len(ids)]
    return list(itertools.pairwise(edges))


def _gather_rows(row: _Rows, ids: Ids, runs: list[tuple[int, int]] | None, out: Bytes) -> None:
    """out[i] = block ids[i] of this segment. np.take and slice copies release the GIL."""
    if runs is not None and (row.dense or len(runs) == len(ids)):
        for first, end in runs:
            block = ids[first]
            out[first:end] = row.strided[block : block + end - first]
    elif row.units is None:
        for i, block in enumerate(ids):
            out[i] = row.strided[block]
    elif row.unit_ids is None:
        np.take(row.units, ids, axis=0, out=out, mode="clip")  # ids were checked; "raise" would buffer
    else:
        units = (ids[:, None] * row.unit_stride + row.unit_ids).reshape(-1)
        np.take(row.units, units, axis=0, out=out.reshape(len(units), -1), mode="clip")


def _scatter_rows(row: _Rows, ids: Ids, runs: list[tuple[int, int]] | None, source: Bytes) -> None:
    """Block ids[i] of this segment = source[i]. Index assignment also releases the GIL."""
    if runs is not None:
        for first, end in runs:
            block = ids[first]
            row.strided[block : block + end - first] = source[first:end]
    else:
        row.strided[ids] = source
