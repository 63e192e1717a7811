"""Measures on a GPU which copy path is best for which copy size, and how much memory a context takes.

Called once per GPU when its first worker registers, and by `kvdepot calibrate`. It copies between buffers of its own,
and frees them.

Copies are scattered on the GPU and adjacent in the host's memory, like those of a chunk. The best path is not simply
the fastest: the copy engines do not disturb computation on the GPU, whereas the engine's kernels wait while kernels of
this process run (two processes share a GPU by time slices). So a path is chosen if it is not much slower than the
fastest, in this order: `dma`; `staged`, whose kernels copy within the GPU and end soon; `kernel`, whose thread blocks
run for as long as the bus is busy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvdepot.devices.cuda.copy_paths import Choice
from kvdepot.devices.cuda.plan import Plan
from kvdepot.errors import DeviceError

if TYPE_CHECKING:
    from kvdepot.devices.cuda.driver import Driver
    from kvdepot.devices.cuda.gpus import Gpu

__all__ = ["PEAK", "SIZES", "Figure", "choose", "cost_of", "describe", "find", "measure", "table"]

log = logging.getLogger(__name__)

T = TypeVar("T")

SIZES = tuple(kib << 10 for kib in (4, 8, 16, 32, 64, 256, 2048))
"""Bytes per copy."""
PEAK = "one copy"
"""The `way` of the figure that gives the speed of the bus."""
_PREFERRED = ("dma", "staged", "kernel")
_GOOD_ENOUGH = 0.9
_SCRATCH_BYTES = 64 << 20
_RUN_BYTES = 32 << 20
_RUN_S = 0.004
_FIRST_COPIES = 64
_RUNS = 3
_LIMIT_S = 0.8
"""Sizes not measured by then use the copy path of the largest measured one."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The speed of copies of `size` bytes on one copy path."""

    way: str
    is_store: bool
    size: int
    gbps: float
    """10**9 bytes per second."""


def measure(gpu: Gpu) -> list[Figure]:
    """Measure each size on each available copy path, in both directions. Blocks for a second at most.

    Raises DeviceError, and then keeps nothing allocated.
    """
    begun = time.perf_counter()
    figures: list[Figure] = []
    with gpu.driver.current(gpu.context), _scratch(gpu.driver) as (device, host):
        for is_store in (True, False):
            one = _plan(device, host, _SCRATCH_BYTES, 1)
            _seconds(gpu, one, is_store, "dma")
            figures.append(Figure(PEAK, is_store, _SCRATCH_BYTES, _speed(gpu, one, is_store, "dma")))
        for size in SIZES:
            for is_store in (True, False):
                for way in gpu.copy_paths.available:
                    # The first run warms up, and shows how many copies are enough for a measurement.
                    few = min(_FIRST_COPIES, _RUN_BYTES // size)
                    seconds = _seconds(gpu, _plan(device, host, size, few), is_store, way)
                    count = min(max(few, int(few * _RUN_S / seconds)), _RUN_BYTES // size)
                    speed = _speed(gpu, _plan(device, host, size, count), is_store, way)
                    figures.append(Figure(way, is_store, size, speed))
            if time.perf_counter() > begun + _LIMIT_S:
                break
    for line in describe(figures):
        log.info("%s: %s", gpu.uuid, line)
    return figures


@contextmanager
def _scratch(driver: Driver) -> Iterator[tuple[int, int]]:
    """Addresses of scratch memory on the GPU and of pinned memory."""
    device = int(driver.call("cuMemAlloc", _SCRATCH_BYTES))
    try:
        host = int(driver.call("cuMemHostAlloc", _SCRATCH_BYTES, 0))
        try:
            yield device, host
        finally:
            driver.call("cuMemFreeHost", host)
    finally:
        driver.call("cuMemFree", device)


def _plan(device: int, host: int, size: int, count: int) -> Plan:
    """Copies of `size` bytes, scattered over the GPU's scratch memory."""
    places = np.random.default_rng(size).permutation(_SCRATCH_BYTES // size)[:count].astype(np.uint64)
    step = np.uint64(size)
    return Plan(
        np.uint64(device) + places * step,
        np.uint64(host) + np.arange(count, dtype=np.uint64) * step,
        np.full(count, step),
    )


def _speed(gpu: Gpu, plan: Plan, is_store: bool, way: str) -> float:
    return plan.total / median(_seconds(gpu, plan, is_store, way) for _ in range(_RUNS)) / 1e9


def _seconds(gpu: Gpu, plan: Plan, is_store: bool, way: str) -> float:
    with gpu.copy_paths.slot() as slot:
        begun = time.perf_counter()
        gpu.copy_paths.run(plan, is_store, slot, way)
        return time.perf_counter() - begun


def choose(figures: Sequence[Figure]) -> Choice:
    """Choose a copy path for each size. Between two sizes the smaller one's is used: some are bad for small copies."""
    choice: Choice = {}
    for is_store in (True, False):
        steps: list[tuple[int, str]] = []
        for size, speeds in _by_size(figures, is_store).items():
            least = _GOOD_ENOUGH * max(speeds.values())
            way = next(way for way in _PREFERRED if speeds.get(way, 0.0) >= least)
            if not steps or steps[-1][1] != way:
                steps.append((size if steps else 0, way))
        choice[is_store] = steps
    return choice


def _by_size(figures: Sequence[Figure], is_store: bool) -> dict[int, dict[str, float]]:
    """GB/s by size, ascending, and copy path."""
    found: dict[int, dict[str, float]] = {}
    for figure in sorted(figures, key=lambda figure: figure.size):
        if figure.is_store == is_store and figure.way != PEAK:
            found.setdefault(figure.size, {})[figure.way] = figure.gbps
    return found


def _peak(figures: Sequence[Figure], is_store: bool) -> float:
    return next(figure.gbps for figure in figures if figure.way == PEAK and figure.is_store == is_store)


# -- output


def describe(figures: Sequence[Figure]) -> list[str]:
    """One line per direction: which copy path from which size on, and how fast it is."""
    choice = choose(figures)
    lines = []
    for is_store in (True, False):
        speeds = _by_size(figures, is_store)
        smallest = min(speeds)
        steps = [
            f"{way}{f' from {_bytes(size)} on' if size else ''} ({speeds[max(size, smallest)][way]:.1f} GB/s)"
            for size, way in choice[is_store]
        ]
        what = "stores" if is_store else "retrieves"
        lines.append(f"{what} use {', '.join(steps)}; one large copy {_peak(figures, is_store):.1f} GB/s")
    return lines


def table(figures: Sequence[Figure]) -> list[str]:
    """All figures, a line per size, with the chosen copy path."""
    choice = choose(figures)
    ways = [way for way in _PREFERRED if any(figure.way == way for figure in figures)]
    lines = []
    for is_store in (True, False):
        what = "stores (GPU to host)" if is_store else "retrieves (host to GPU)"
        lines.append(f"{what}, GB/s; one large copy of pinned memory {_peak(figures, is_store):.1f}")
        lines.append("  bytes a copy" + "".join(f"{way:>9}" for way in ways) + "  taken")
        for size, speeds in _by_size(figures, is_store).items():
            taken = next(way for least, way in reversed(choice[is_store]) if size >= least)
            lines.append(f"  {_bytes(size):>12}" + "".join(f"{speeds[way]:9.1f}" for way in ways) + f"  {taken}")
    return lines


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def find(driver: Driver, wanted: str) -> list[str]:
    """The UUIDs of the requested GPUs: one by UUID or number, or all if `wanted` is empty. Raises DeviceError."""
    there = list(driver.devices())
    if not wanted and there:
        return there
    if wanted.isdecimal() and int(wanted) < len(there):
        return [there[int(wanted)]]
    if wanted in there:
        return [wanted]
    listed = ", ".join(f"{number} = {uuid}" for number, uuid in enumerate(there))
    raise DeviceError(f"no GPU {wanted}; available: {listed}" if there else "no GPU is available to this process")


# -- accounting


def cost_of(uuid: str, make: Callable[[], T]) -> tuple[int | None, T]:
    """Call `make`; returns the bytes of GPU memory in use that it added, and its result.

    The bytes are None if nvidia-ml-py is not installed, or another process freed memory in the meantime. The driver
    itself does not report what a context takes, and reports a GPU's memory only within a context.
    """
    before = _used_bytes(uuid)
    made = make()
    after = _used_bytes(uuid) if before is not None else None
    if before is None or after is None or after < before:
        return None, made
    return after - before, made


def _used_bytes(uuid: str) -> int | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            memory: Any = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid))
            return int(memory.used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as exc:
        log.info("NVML does not report the memory in use on %s: %s", uuid, exc)
        return None
