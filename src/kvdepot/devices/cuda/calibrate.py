"""Which way of copying is best for copies of which size, measured on the GPU itself; and what a context takes of it.

Called once a GPU when its first worker registers, and by `kvdepot calibrate`. The one law: it copies between memory of
its own, and gives all of it back.

Copies lie scattered on the GPU and side by side in the host's memory, as a chunk's do. Best is not simply fastest: the
copy engines take nothing from whoever computes on the GPU, but what programs of this process run, the engine's wait for
(two processes share a GPU by turns). So where it is not much slower than the best, `dma` is taken, then `staged`, whose
programs copy within the GPU and are soon done, then `kernel`, which keeps its programs for as long as the bus is busy.
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
"""Bytes a copy."""
PEAK = "one copy"
"""The way of the figure that says how fast the bus is."""
_PREFERRED = ("dma", "staged", "kernel")
_GOOD_ENOUGH = 0.9
_SCRATCH_BYTES = 64 << 20
_RUN_BYTES = 32 << 20
_RUN_S = 0.004
_FIRST_COPIES = 64
_RUNS = 3
_LIMIT_S = 0.8
"""Larger copies than those measured by then go the way of the largest of those."""


@dataclass(frozen=True, slots=True)
class Figure:
    """How fast copies of `size` bytes went one way."""

    way: str
    is_store: bool
    size: int
    gbps: float
    """10**9 bytes a second."""


def measure(gpu: Gpu) -> list[Figure]:
    """Copy each size each way that is there, both directions; a second at most. Raises DeviceError, nothing kept."""
    begun = time.perf_counter()
    figures: list[Figure] = []
    with gpu.driver.current(gpu.context), _scratch(gpu.driver) as (device, host):
        for is_store in (True, False):
            one = _plan(device, host, _SCRATCH_BYTES, 1)
            _seconds(gpu, one, is_store, "dma")
            figures.append(Figure(PEAK, is_store, _SCRATCH_BYTES, _speed(gpu, one, is_store, "dma")))
        for size in SIZES:
            for is_store in (True, False):
                for way in gpu.copy_paths.there:
                    # The first run finds caches cold, and tells how many copies are enough to be measured.
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
    """Addresses of memory on the GPU and of pinned memory."""
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
    """The copy path for each size. Between two sizes the smaller one's is taken: some are bad for small copies."""
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
    """GB/s by size, rising, and way."""
    found: dict[int, dict[str, float]] = {}
    for figure in sorted(figures, key=lambda figure: figure.size):
        if figure.is_store == is_store and figure.way != PEAK:
            found.setdefault(figure.size, {})[figure.way] = figure.gbps
    return found


def _peak(figures: Sequence[Figure], is_store: bool) -> float:
    return next(figure.gbps for figure in figures if figure.way == PEAK and figure.is_store == is_store)


# -- what people see


def describe(figures: Sequence[Figure]) -> list[str]:
    """One line a direction: which way from which size on, and how fast."""
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
        lines.append(f"{what} go by {', '.join(steps)}; one large copy {_peak(figures, is_store):.1f} GB/s")
    return lines


def table(figures: Sequence[Figure]) -> list[str]:
    """Every figure, a line a size, and beside it the way that is taken."""
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
    """UUIDs of the GPUs that are meant: by UUID, by number, or all when nothing is said. Raises DeviceError."""
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
    """What `make` makes, and how many bytes of the GPU are in use more after it than before.

    None where nvidia-ml-py is not installed, or somebody else freed memory meanwhile. The driver itself does not say
    what a context takes, and can be asked for a GPU's memory only within one.
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
