"""The copy paths, which run a plan of copies between a GPU and pinned memory, and the choice among them.

    dma      the copy engines, a call for each of a few streams; slow for small copies to the GPU
    staged   a kernel gathers into (or scatters from) a buffer on the GPU; the copy engines move it in large pieces

Kernels of this process and the engine's wait for each other (two processes share a GPU by time slices), which an idle
GPU does not show. So `staged` serves only where `dma` is far slower. Measured beside an H100 that is busy with products
of matrices, in pieces of 16 KiB: stores by dma 23 GB/s (the products kept 98 % of their speed), by staged 9 (86 %);
retrieves by dma 3 (75 %), by staged 9 (87 %).

Used by copy threads, several at a time, with the GPU's context current. Each copy has a slot to itself: streams, a
staging buffer and a table of copies for the kernel. Invariant: when `run` returns or raises, no copy is in progress
(unless waiting for a stream fails: then the context is lost, and its copies with it).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from kvdepot.devices.cuda.driver import ANY_ORDER, PREFER_OVERLAP, STREAM_ORDER, Addresses, Driver, DriverError
from kvdepot.devices.cuda.kernel import TILE_BYTES, CopyKernel
from kvdepot.devices.cuda.plan import CopyPlan, Direction, merge
from kvdepot.errors import DeviceError

log = logging.getLogger(__name__)

Choice: TypeAlias = dict[Direction, list[tuple[int, str]]]
"""Ascending `(bytes, copy path)` by direction; the path serves copies of that size and more."""

SLOTS = 4
"""Two threads per direction copy at a time (memory/copier.py)."""
_STREAMS = 4
"""One stream leaves the bus idle for a microsecond after each copy: on an H100, 64 KiB each moved at 29 GB/s by one
stream, 42 by four, 46 by eight, of 53."""
_PROGRAMS = 64
"""Thread blocks: the sooner the kernel ends, the sooner the engine has the GPU again."""
_BOUNCE_BYTES = 4 << 20
"""Pinned memory of a slot that copies from and to unregistered memory go through; allocated with the first of them."""
_TABLE_ROWS = 1 << 15
_ROW_BYTES = 24
_UNALIGNED = np.uint64(15)


def _choose(dma_from_bytes: int, has_batches: bool) -> Choice:
    """The choice on a GPU with the copy kernel. Small copies to the host are slow only without batches."""
    mixed = [(0, "staged"), (dma_from_bytes, "dma")] if dma_from_bytes else [(0, "dma")]
    return {"store": [(0, "dma")] if has_batches else mixed, "retrieve": mixed}


class Slot:
    """The resources of one copy at a time."""

    def __init__(self, driver: Driver, staging_bytes: int) -> None:
        self._driver = driver
        self.streams: list[int] = []
        self.staging = self.table = self.host_table = self.bounce = 0
        self.is_bounce_refused = False
        self.staging_bytes = staging_bytes
        self.rows = 0  # rows of the table that copies in progress use
        try:
            flags = int(driver.cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
            for _ in range(_STREAMS):
                self.streams.append(int(driver.call("cuStreamCreate", flags)))
            if staging_bytes:
                self._take_memory()
        except DeviceError:
            self.close()
            raise

    def _take_memory(self) -> None:
        """Allocate buffers for the kernel and staging; none if the GPU is full, as an engine may fill it any time."""
        try:
            self.staging = int(self._driver.call("cuMemAlloc", self.staging_bytes))
            self.table = int(self._driver.call("cuMemAlloc", _TABLE_ROWS * _ROW_BYTES))
            self.host_table = int(self._driver.call("cuMemHostAlloc", _TABLE_ROWS * _ROW_BYTES, 0))
        except DriverError as exc:
            if exc.result != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            log.warning("no GPU memory for copy buffers; small copies will be slow: %s", exc)
            self._free_memory()

    def take_bounce(self) -> bool:
        """Allocate pinned memory to copy through, if there is none yet; False if the driver refuses."""
        if not self.bounce and not self.is_bounce_refused:
            try:
                self.bounce = int(self._driver.call("cuMemHostAlloc", _BOUNCE_BYTES, 0))
            except DriverError as exc:
                self.is_bounce_refused = True
                log.warning(
                    "no pinned memory to copy through; copies of memory that is not registered go one by one: %s", exc
                )
        return bool(self.bounce)

    @property
    def device_bytes(self) -> int:
        return self.staging_bytes + _TABLE_ROWS * _ROW_BYTES if self.table else 0

    def close(self) -> None:
        self._free_memory()
        while self.streams:
            self._driver.call("cuStreamDestroy", self.streams.pop())

    def _free_memory(self) -> None:
        for name in ("staging", "table", "host_table", "bounce"):
            if getattr(self, name):
                function = "cuMemFree" if name in ("staging", "table") else "cuMemFreeHost"
                self._driver.call(function, getattr(self, name))
                setattr(self, name, 0)


class CopyPaths:
    """All copies of one GPU. The kernel, and with it `staged`, may be unavailable; `without` says why."""

    def __init__(self, driver: Driver, device: int, staging_bytes: int, dma_from_bytes: int) -> None:
        """staging_bytes: GPU memory for the buffers and tables of all slots together. dma_from_bytes: the size from
        which on copies are left to the copy engines."""
        self.choice: Choice = {"store": [(0, "dma")], "retrieve": [(0, "dma")]}
        self.without = ""
        self._driver = driver
        self._kernel: CopyKernel | None = None
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._lock = threading.Lock()
        self._staging_bytes = (staging_bytes // SLOTS - _TABLE_ROWS * _ROW_BYTES) // TILE_BYTES * TILE_BYTES
        same = driver.cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        self._same_addresses = bool(driver.call("cuDeviceGetAttribute", same, device))
        if self._staging_bytes <= 0:
            self.without = "gpu_staging_mib is too small"
        elif not self._same_addresses:
            self.without = "this GPU maps registered memory at other addresses than the CPU"
        else:
            try:
                self._kernel = CopyKernel(driver, device)
                self.choice = _choose(dma_from_bytes, driver.has_batches)
            except DeviceError as exc:
                self.without = str(exc)

    @property
    def device_bytes(self) -> int:
        return sum(slot.device_bytes for slot in self._slots)

    @property
    def lacks_memory(self) -> bool:
        """Whether a slot has no buffers because the GPU was full."""
        return self._kernel is not None and not all(slot.table for slot in self._slots)

    @contextlib.contextmanager
    def slot(self) -> Iterator[Slot]:
        """Borrow a slot; creates one if none is free. Raises DeviceError."""
        with self._lock:
            slot = self._free.pop() if self._free else None
        if slot is None:
            slot = Slot(self._driver, self._staging_bytes if self._kernel is not None else 0)
            self._slots.append(slot)
        try:
            yield slot
        finally:
            with self._lock:
                self._free.append(slot)

    def run(self, plan: CopyPlan, slot: Slot) -> None:
        """Copy between pinned memory and the GPU, on the copy path for the copies' mean size. Blocks until it is done.
        Raises DeviceError; some bytes may have been copied then."""
        if not len(plan):
            return
        if not self._same_addresses:  # (WSL) a batch would use the CPU's addresses on the GPU, and break the context
            self._one_by_one(plan, slot)
            return
        mean = plan.total // len(plan)
        path = next(path for size, path in reversed(self.choice[plan.direction]) if mean >= size)
        try:
            if path == "staged" and slot.host_table and not np.any((plan.device | plan.host | plan.sizes) & _UNALIGNED):
                self._staged(plan, slot)
            else:
                self._by_engines(plan, slot)
        finally:
            self._wait(slot)

    def run_unpinned(self, plan: CopyPlan, slot: Slot) -> None:
        """Like `run`, for host memory that is not registered: through a pinned buffer, which costs another copy."""
        if not len(plan):
            return
        if not self._same_addresses or not slot.take_bounce():
            self._one_by_one(plan, slot)
            return
        host, device, sizes = _tiles(plan.host, plan.device, plan.sizes, _BOUNCE_BYTES)
        for part, places in _rounds(sizes, _BOUNCE_BYTES):
            buffer = np.uint64(slot.bounce) + places
            bounced = CopyPlan(plan.direction, device[part], buffer, sizes[part])
            if plan.is_store:
                self.run(bounced, slot)
            joined = merge(buffer, host[part], sizes[part])
            for pinned, unpinned, size in zip(*(column.tolist() for column in joined), strict=True):
                ctypes.memmove(*((unpinned, pinned) if plan.is_store else (pinned, unpinned)), size)  # without the GIL
            if not plan.is_store:
                self.run(bounced, slot)

    def _by_engines(self, plan: CopyPlan, slot: Slot) -> None:
        columns = (plan.host, plan.device) if plan.is_store else (plan.device, plan.host)
        order = STREAM_ORDER if plan.is_store else ANY_ORDER
        streams = slot.streams[: -(-len(plan) // 8)]  # eight copies are worth a stream
        for first, stream in enumerate(streams):
            dst, src, sizes = (column[first :: len(streams)] for column in (*columns, plan.sizes))
            self._driver.copy_batch((dst, src, sizes), stream, order, PREFER_OVERLAP)

    def _one_by_one(self, plan: CopyPlan, slot: Slot) -> None:
        """A call of the driver for each copy, which is slow if they are small; any host memory."""
        try:
            for device, host, size in zip(plan.device.tolist(), plan.host.tolist(), plan.sizes.tolist(), strict=True):
                if plan.is_store:
                    self._driver.call("cuMemcpyDtoHAsync", host, device, size, slot.streams[0])
                else:
                    self._driver.call("cuMemcpyHtoDAsync", device, host, size, slot.streams[0])
        finally:
            self._wait(slot)

    def _staged(self, plan: CopyPlan, slot: Slot) -> None:
        """Copy in rounds that fill the buffer, sorted by host address so that the copy engines' pieces are long."""
        order = np.argsort(plan.host, kind="stable")
        host, device, sizes = _tiles(plan.host[order], plan.device[order], plan.sizes[order])
        for part, places in _rounds(sizes, slot.staging_bytes):
            buffer = np.uint64(slot.staging) + places
            there, here, lengths = merge(buffer, host[part], sizes[part], plan.edge, plan.cut)
            if plan.is_store:
                self._launch(buffer, device[part], sizes[part], slot)
                self._driver.copy_batch((here, there, lengths), slot.streams[0], STREAM_ORDER)
            else:
                self._driver.copy_batch((there, here, lengths), slot.streams[0], ANY_ORDER)
                self._launch(device[part], buffer, sizes[part], slot)

    def _launch(self, dst: Addresses, src: Addresses, sizes: Addresses, slot: Slot) -> None:
        assert self._kernel is not None and 0 < len(sizes) <= _TABLE_ROWS, len(sizes)
        if slot.rows + len(sizes) > _TABLE_ROWS:
            self._wait(slot)
        begin, slot.rows = slot.rows * _ROW_BYTES, slot.rows + len(sizes)
        memory: Any = (ctypes.c_uint64 * (3 * len(sizes))).from_address(slot.host_table + begin)
        table = np.frombuffer(memory, np.uint64).reshape(-1, 3)
        table[:, 0], table[:, 1], table[:, 2] = dst, src, sizes
        there, size = slot.table + begin, len(sizes) * _ROW_BYTES
        self._driver.call("cuMemcpyHtoDAsync", there, slot.host_table + begin, size, slot.streams[0])
        self._kernel.launch(there, len(sizes), slot.streams[0], _PROGRAMS)

    def _wait(self, slot: Slot) -> None:
        slot.rows = 0
        with contextlib.ExitStack() as all_of_them:  # also after one has failed
            for stream in slot.streams:
                all_of_them.callback(self._driver.call, "cuStreamSynchronize", stream)

    def close(self) -> None:
        """Release everything; no copy may be in progress. May be called twice."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        self._free.clear()
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None


def _rounds(sizes: Addresses, room: int) -> Iterator[tuple[slice, Addresses]]:
    """Divide copies into rounds of at most `room` bytes and a table of rows, with the place of each in a buffer."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        done = ends[first] - sizes[first]
        end = min(int(np.searchsorted(ends, done + np.uint64(room), "right")), first + _TABLE_ROWS)
        part = slice(first, end)
        yield part, ends[part] - sizes[part] - done
        first = end


def _tiles(
    first: Addresses, second: Addresses, sizes: Addresses, most: int = TILE_BYTES
) -> tuple[Addresses, Addresses, Addresses]:
    """Cut copies into pieces of `most` bytes at most; by default into rows of the kernel's table."""
    if int(sizes.max()) <= most:
        return first, second, sizes
    counts = -(-sizes.astype(np.int64) // most)
    source = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = number.astype(np.uint64) * np.uint64(most)
    left = sizes[source] - offset
    return first[source] + offset, second[source] + offset, np.minimum(left, np.uint64(most))
