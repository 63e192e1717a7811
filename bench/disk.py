"""The disk tier beside a Python loop that writes and reads files of the same size, like dd.

Both write new files (open, write, close, rename) and read them back (open, read, close), alternately, with the same
number of threads and without syncing, so the figures are the overhead between a caller and the page cache, from which
both read. The tier's objects consist of two pieces, like those of a server. TMPDIR selects the file system.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common import Scale, say
from report import Figure, at_least, below

from kvdepot.tiers import Blob
from kvdepot.tiers.disk import Disk
from kvdepot.tiers.format import HEADER_BYTES

__all__ = ["run"]

_MIB = 1 << 20
_OBJECTS = 16


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Figures of one and four threads, and of a start with many objects."""
    size, runs, count = 8 * _MIB * scale.blocks // Scale.blocks, scale.copy_runs, scale.tier_chunks
    root = Path(tempfile.mkdtemp(prefix="kvdepot-bench-"))
    try:
        figures = []
        for threads in (1, 4):
            say(f"disk: {threads} thread(s)")
            figures += _transfers(root, size, runs, threads)
        say(f"disk: a start with {count} objects")
        figures.append(_start(root, count))
        return figures
    finally:
        shutil.rmtree(root)


class _Memory:
    """The buffers of one thread, a separate one for each object, as in an arena."""

    def __init__(self, size: int, objects: int) -> None:
        self._size = size
        area = mmap.mmap(-1, objects * (size + 2 * mmap.PAGESIZE))
        area.write(os.urandom(_MIB) * (len(area) // _MIB) + bytes(len(area) % _MIB))
        self._area = memoryview(area)
        self._head = memoryview(bytearray(HEADER_BYTES))

    def kv(self, number: int) -> memoryview:
        start = number * (self._size + 2 * mmap.PAGESIZE) + 64  # where chunks begin in an arena
        return self._area[start : start + self._size]

    def whole(self, number: int) -> memoryview:
        start = number * (self._size + 2 * mmap.PAGESIZE) + 64
        return self._area[start : start + self._size + HEADER_BYTES]

    def pieces(self, number: int) -> list[memoryview]:
        return [self._head, self.kv(number)]


def _transfers(root: Path, size: int, runs: int, threads: int) -> list[Figure]:
    each = _OBJECTS // threads
    memories = [_Memory(size, each) for _ in range(threads)]
    tier = Disk(root / "tier", 64 << 30)
    floor = root / "floor"
    floor.mkdir(exist_ok=True)
    total = _OBJECTS * (size + HEADER_BYTES)
    speeds: dict[str, list[float]] = {"write": [], "write floor": [], "read": [], "read floor": []}

    def name(thread: int, number: int) -> str:
        return f"{0:032x}/{0:032x}/{thread * each + number:02x}{'5a' * 31}.0"

    def write(thread: int) -> None:
        for number in range(each):
            if tier.write([Blob(name(thread, number), memories[thread].pieces(number))]) != [True]:
                raise RuntimeError("the tier refused an object")

    def read(thread: int) -> None:
        for number in range(each):
            if tier.read([Blob(name(thread, number), memories[thread].pieces(number))]) != [size + HEADER_BYTES]:
                raise RuntimeError("the tier has lost an object")

    def write_floor(thread: int) -> None:
        for number in range(each):
            path = f"{floor}/{thread}-{number}"
            fd = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, memories[thread].whole(number))
            os.close(fd)
            os.rename(f"{path}.tmp", path)  # noqa: PTH104 - the floor is system calls

    def read_floor(thread: int) -> None:
        for number in range(each):
            fd = os.open(f"{floor}/{thread}-{number}", os.O_RDONLY)
            os.readv(fd, [memories[thread].whole(number)])
            os.close(fd)

    names = [name(thread, number) for thread in range(threads) for number in range(each)]
    try:
        # Objects that stay, so that no directories are created during the measurement.
        tier.write([Blob(other[:-1] + "1", [memoryview(b"x")]) for other in names])
        for turn in range(runs + 1):
            rows = [("write", write), ("write floor", write_floor), ("read", read), ("read floor", read_floor)]
            if turn % 2:
                rows = [rows[1], rows[0], rows[3], rows[2]]
            for what, act in rows:
                seconds = _seconds(act, threads)
                if turn:  # the first warms up
                    speeds[what].append(total / seconds / 1e9)
            tier.remove(names)
            for path in floor.iterdir():
                path.unlink()
    finally:
        tier.close()
    text = f"8 MiB, {threads} thread{'s' * (threads > 1)}"
    return [
        at_least(f"disk {what} {text}", "GB/s", speeds[what], speeds[f"{what} floor"], 0.8)
        for what in ("write", "read")
    ]


def _seconds(act: Callable[[int], None], threads: int) -> float:
    workers = [threading.Thread(target=act, args=(thread,)) for thread in range(threads)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begun


def _start(root: Path, count: int) -> Figure:
    """The time until the tier has counted all objects, beside a walk that stats each file."""
    place = root / "many"
    tier = Disk(place, 64 << 30)
    area = memoryview(bytes(1))
    for number in range(count):
        tier.write([Blob(f"{0:032x}/{0:032x}/{number * 2654435761 % 2**32:08x}.0", [area])])
    tier.close()
    begun = time.perf_counter()
    for folder, _, names in os.walk(place):
        for name in names:
            os.stat(f"{folder}/{name}")  # noqa: PTH116 - the floor is system calls
    walked = time.perf_counter() - begun
    begun = time.perf_counter()
    tier = Disk(place, 64 << 30)
    opened = time.perf_counter() - begun
    while tier.usage().objects != count:
        time.sleep(0.001)
        if time.perf_counter() - begun > 60:
            raise TimeoutError(f"{tier!r} is not counted after a minute")
    counted = time.perf_counter() - begun
    say(f"disk: {count} objects, open after {opened:.3f} s, counted after {counted:.2f} s")
    tier.close()
    return below("disk start with 100k objects, counted", "s", [counted], [walked], 5.0)
