"""Measures on a GPU which copy path is best for which copy size, and how much memory a context takes.

Called once per GPU when its first worker registers, and by `kvdepot calibrate`. It copies between buffers of its own.
Copies are scattered on the GPU and adjacent in the host's memory, like those of a chunk.

The best path is not simply the fastest: kernels of this process and the engine's wait for each other (two processes
share a GPU by time slices), and an idle GPU does not show what that costs. So `dma` is chosen unless `staged` is twice
as fast, as it is for retrieves of small copies, and always from `gpu_dma_from_kib` on. Measured beside an H100 that is
busy with products of matrices, in pieces of 16 KiB: stores by dma 23 GB/s (the products kept 98 % of their speed), by
staged 9 (86 %); retrieves by dma 3 (75 %), by staged 9 (87 %). Figures beside an occupant decide for every size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from kvdepot.devices.cuda import DMA_FROM_BYTES
from kvdepot.devices.cuda.copy_paths import Choice, CopyPaths
from kvdepot.devices.cuda.driver import Driver
from kvdepot.devices.cuda.plan import DIRECTIONS, CopyPlan, Direction
from kvdepot.errors import DeviceError

if TYPE_CHECKING:
    from kvdepot.devices.cuda.occupant import Occupant

log = logging.getLogger(__name__)

T = TypeVar("T")
Clock: TypeAlias = Callable[[], float]

SIZES = tuple(kib << 10 for kib in (4, 8, 16, 28, 64, 256, 2048))
PEAK = "one copy"
"""The `path` of the figure that gives the speed of the bus."""
_SCRATCH_BYTES = 64 << 20
_RUN_BYTES = 32 << 20
_RUN_S = 0.004
_FIRST_COPIES = 64
_RUNS = 3
_LIMIT_S = 0.8
"""Sizes not measured by then use the copy path of the largest measured one."""
_BESIDE_S = 0.15
"""Each figure is measured this long beside an occupant: about a hundred time slices of 1.6 ms."""
_HANG_S = 20.0


@dataclass(frozen=True, slots=True)
class Figure:
    """The speed of copies of `size` bytes on one copy path."""

    path: str
    direction: Direction
    size: int
    gbps: float
    """10**9 bytes per second."""
    share: float | None = None
    """The part of its own speed that an occupant of the GPU kept meanwhile; None on an idle GPU."""


class GpuInUse(Protocol):
    """The part of a GPU in use (gpus.Gpu) that is measured."""

    @property
    def driver(self) -> Driver: ...

    @property
    def context(self) -> int: ...

    @property
    def copy_paths(self) -> CopyPaths: ...


def measure(gpu: GpuInUse, occupant: Occupant | None = None, clock: Clock = time.perf_counter) -> list[Figure]:
    """Measure each size on each available copy path, in both directions. Blocks for a second at most, or for some 10 s
    beside an occupant, a process that keeps this GPU busy. Raises DeviceError, and then keeps nothing allocated."""
    begun = clock()
    figures: list[Figure] = []
    with gpu.driver.current(gpu.context), _scratch(gpu.driver) as (device, host):
        for direction in DIRECTIONS:
            one = _plan(direction, device, host, _SCRATCH_BYTES, 1)
            _seconds(gpu, one, "dma", clock)
            figures.append(Figure(PEAK, direction, _SCRATCH_BYTES, _speed(gpu, one, "dma", clock)))
        for size in SIZES:
            for direction in DIRECTIONS:
                if occupant is not None:
                    plan = _plan(direction, device, host, size, _RUN_BYTES // size)
                    figures += _beside(gpu, plan, occupant, clock)
                    continue
                for path in gpu.copy_paths.available:
                    # The first run warms up, and shows how many copies are enough for a measurement.
                    few = min(_FIRST_COPIES, _RUN_BYTES // size)
                    seconds = _seconds(gpu, _plan(direction, device, host, size, few), path, clock)
                    count = min(max(few, int(few * _RUN_S / seconds)), _RUN_BYTES // size)
                    speed = _speed(gpu, _plan(direction, device, host, size, count), path, clock)
                    figures.append(Figure(path, direction, size, speed))
            if occupant is None and clock() > begun + _LIMIT_S:
                break
    return figures


def _beside(gpu: GpuInUse, plan: CopyPlan, occupant: Occupant, clock: Clock) -> list[Figure]:
    """Measure each copy path while another process uses the GPU, and that process without copies before them."""
    _, alone = _during(occupant, clock, partial(time.sleep, 0.001))
    figures = []
    with gpu.copy_paths.slot() as slot:
        for path in gpu.copy_paths.available:
            runs, rate = _during(occupant, clock, partial(gpu.copy_paths.run, plan, slot, path))
            size = plan.total // len(plan)
            figures.append(Figure(path, plan.direction, size, runs * plan.total / 1e9, min(1.0, rate / alone)))
    return figures


def _during(occupant: Occupant, clock: Clock, run: Callable[[], None]) -> tuple[float, float]:
    """Repeat `run` for a while; returns its runs per second and the occupant's batches per second."""
    hang = time.monotonic() + _HANG_S
    begun, before, runs = clock(), occupant.count(), 0
    seconds, batches = 0.0, 0
    while seconds < _BESIDE_S or not batches:
        run()
        runs += 1
        seconds, batches = clock() - begun, occupant.count() - before
        if time.monotonic() > hang:
            raise DeviceError(f"the process that keeps the GPU busy ended no kernels within {_HANG_S:.0f} s")
    return runs / seconds, batches / seconds


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


def _plan(direction: Direction, device: int, host: int, size: int, count: int) -> CopyPlan:
    """Copies of `size` bytes, scattered over the GPU's scratch memory."""
    places = np.random.default_rng(size).permutation(_SCRATCH_BYTES // size)[:count].astype(np.uint64)
    step = np.uint64(size)
    return CopyPlan(
        direction,
        np.uint64(device) + places * step,
        np.uint64(host) + np.arange(count, dtype=np.uint64) * step,
        np.full(count, step),
    )


def _speed(gpu: GpuInUse, plan: CopyPlan, path: str, clock: Clock) -> float:
    return plan.total / median(_seconds(gpu, plan, path, clock) for _ in range(_RUNS)) / 1e9


def _seconds(gpu: GpuInUse, plan: CopyPlan, path: str, clock: Clock) -> float:
    with gpu.copy_paths.slot() as slot:
        begun = clock()
        gpu.copy_paths.run(plan, slot, path)
        return clock() - begun


# -- the choice

_Row: TypeAlias = dict[str, Figure]
"""The figures of one size and direction, by copy path."""


def choose(figures: Sequence[Figure], dma_from_bytes: int = DMA_FROM_BYTES) -> Choice:
    """Choose a copy path for each size. Between two sizes the smaller one's is used: some are bad for small copies.

    From `dma_from_bytes` on, figures of an idle GPU choose dma. Figures beside an occupant choose freely, by the speed
    times the share that the occupant kept.
    """
    choice: Choice = {}
    for direction in DIRECTIONS:
        rows = _by_size(figures, direction)
        is_idle = all(figure.share is None for row in rows.values() for figure in row.values())
        steps: list[tuple[int, str]] = []
        for size in sorted({*rows, dma_from_bytes} if is_idle else rows):
            scores = {path: f.gbps * (1.0 if f.share is None else f.share) for path, f in _at(rows, size).items()}
            by_kernel = scores.get("staged", 0.0) > 2 * scores["dma"] and not (is_idle and size >= dma_from_bytes)
            path = "staged" if by_kernel else "dma"
            if not steps or steps[-1][1] != path:
                steps.append((size if steps else 0, path))
        choice[direction] = steps
    return choice


def dma_from(choice: Choice) -> int:
    """Bytes from which on dma is chosen in both directions; above all measured sizes if it never is. Larger sizes for
    which something else was chosen do not count."""
    starts = (next((size for size, path in steps if path == "dma"), 2 * SIZES[-1]) for steps in choice.values())
    return max(starts)


def _by_size(figures: Sequence[Figure], direction: Direction) -> dict[int, _Row]:
    found: dict[int, _Row] = {}
    for figure in sorted(figures, key=lambda figure: figure.size):
        if figure.direction == direction and figure.path != PEAK:
            found.setdefault(figure.size, {})[figure.path] = figure
    return found


def _at(rows: dict[int, _Row], size: int) -> _Row:
    """The figures that hold for a size: those of the largest measured size up to it."""
    return rows[max((known for known in rows if known <= size), default=min(rows))]


def _peak(figures: Sequence[Figure], direction: Direction) -> float:
    return next(figure.gbps for figure in figures if figure.path == PEAK and figure.direction == direction)


# -- output


def describe(figures: Sequence[Figure], choice: Choice) -> list[str]:
    """One line per direction: which copy path from which size on, and how fast it is."""
    lines = []
    for direction in DIRECTIONS:
        rows = _by_size(figures, direction)
        steps = [
            f"{path}{f' from {_bytes(size)} on' if size else ''} ({_at(rows, size)[path].gbps:.1f} GB/s)"
            for size, path in choice[direction]
        ]
        lines.append(f"{direction}s use {', '.join(steps)}; one large copy {_peak(figures, direction):.1f} GB/s")
    return lines


def table(figures: Sequence[Figure], choice: Choice | None = None) -> list[str]:
    """All figures, a line per size, with the copy path that was chosen; by default, that of `choose`."""
    choice = choice or choose(figures)
    paths = [path for path in ("dma", "staged") if any(figure.path == path for figure in figures)]
    lines = []
    for direction in DIRECTIONS:
        rows = _by_size(figures, direction)
        is_idle = all(figure.share is None for row in rows.values() for figure in row.values())
        what = "stores (GPU to host)" if direction == "store" else "retrieves (host to GPU)"
        unit = "GB/s" if is_idle else "GB/s and the share of its speed that the other process kept"
        lines.append(f"{what}, {unit}; one large copy of pinned memory {_peak(figures, direction):.1f}")
        lines.append(
            "  bytes a copy"
            + "".join(f"{path:>{9 if is_idle else 14}}" for path in paths)
            + ("  taken" if is_idle else "  best")
        )
        for size, row in rows.items():
            taken = next(path for least, path in reversed(choice[direction]) if size >= least)
            figures_of = (row[path] for path in paths)
            cells = (f"{f.gbps:9.1f}" if f.share is None else f"{f.gbps:9.1f} {f.share:4.2f}" for f in figures_of)
            lines.append(f"  {_bytes(size):>12}{''.join(cells)}  {taken}")
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
    """Call `make`; returns the bytes of GPU memory in use that it added, and its result. The bytes are None if
    nvidia-ml-py is not installed, or another process freed memory in the meantime."""
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
