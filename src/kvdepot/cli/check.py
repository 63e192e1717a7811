"""`kvdepot check`: whether an arena's records agree with each other and with its bytes.

Invariant: it changes no arena. It checks a snapshot of an arena in use, and does not report what the server changed in
the meantime. A server drops damaged records when it starts, and a damaged chunk when an engine asks for it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from kvdepot import locks
from kvdepot.cli import options
from kvdepot.cli.output import progress, show
from kvdepot.config import load
from kvdepot.core.index.index import Index
from kvdepot.core.index.recovery import Restored, restore
from kvdepot.errors import ArenaError
from kvdepot.eviction import Lru
from kvdepot.memory import shm
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.arena_header import HEADER_BYTES, ArenaHeader
from kvdepot.memory.extents import checksum
from kvdepot.memory.records import SLOT_BYTES, Records
from kvdepot.values import plural, size


@click.command()
@click.option("-u", "--url", metavar="URL", help="the arena of the server at this endpoint")
@click.option("--arena-name", metavar="NAME", help="the arena of this name")
@click.option("--arena-dir", metavar="DIR", help="the folder of the arena (default: KVDEPOT_ARENA_DIR, or /dev/shm)")
@options.as_json
def check(as_json: bool, **flags: str | None) -> int:
    """Verify the arena of a running or stopped server: its records and checksums. Exit code 1 if something is wrong.

    What is damaged in an arena is lost: a server drops bad records when it starts, and --verify always finds each bad
    chunk before an engine loads it.
    """
    config = load(flags=flags)
    with progress() as update:
        report = audit(Path(config.arena_dir), config.arena, lambda done, total: update("reading chunks", done, total))
    show(as_json, report, *report.lines())
    return 1 if report.problems else 0


@dataclass
class Audit:
    """The contents of an arena, and its problems."""

    path: str
    in_use: bool = False
    size_bytes: int = 0
    namespaces: int = 0
    chunks: int = 0
    shards: int = 0
    used_bytes: int = 0
    summed_shards: int = 0
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        state = "in use by a server" if self.in_use else "not in use"
        return [
            f"{self.path}: {size(self.size_bytes)}, {state}",
            f"{plural(self.chunks, 'chunk')} in {plural(self.namespaces, 'namespace')}: "
            f"{plural(self.shards, 'shard')}, {size(self.used_bytes)}",
            f"{self.summed_shards} shards have a checksum and were read",
            *self.problems,
            plural(len(self.problems), "problem"),
        ]


def audit(folder: Path, name: str, progress: Callable[[int, int], None] = lambda done, total: None) -> Audit:
    """Check the arena of that name in a folder. Blocks while it reads every chunk with a checksum.

    progress: called with the number of chunks checked, and of all.
    Raises ArenaError if the file is not an arena of this format, or not ours.
    """
    path = shm.path_of(folder, name)
    try:
        fd = shm.open_shared(folder, name)
    except ArenaError as exc:
        raise ArenaError(
            f"no arena to check: {exc}; a stopping server removes its arena unless it has --on-stop keep; --url, "
            "--arena-name and --arena-dir select another arena"
        ) from exc
    try:
        # Do not lock it only to read: clients would take us for the server that died.
        report = Audit(str(path), locks.is_locked(fd))
        header = ArenaHeader.read(fd, path)
        if header is not None:
            _check(fd, header, report, progress)
        return report
    finally:
        os.close(fd)


def _check(fd: int, header: ArenaHeader, report: Audit, progress: Callable[[int, int], None]) -> None:
    report.size_bytes = whole = min(header.size, os.fstat(fd).st_size)
    if header.size < header.chunks_start + PAGE or whole < header.chunks_start:
        raise ArenaError(f"{report.path} is truncated before its first chunk; remove it")
    index, restored, data = _restore(fd, header, whole)
    if report.in_use and (restored.dropped or restored.damaged):
        # The server may have changed records while we read, so only what a second reading finds too is wrong.
        _, again, _ = _restore(fd, header, whole)
        restored.dropped = [line for line in restored.dropped if line in again.dropped]
        restored.damaged = [slot for slot in restored.damaged if slot in again.damaged]
    report.problems += restored.dropped
    if restored.damaged:
        report.problems.append(f"{len(restored.damaged)} slots of the record table hold incomplete records")
    report.namespaces = sum(each.groups[0] is each for each in index.namespaces.all())
    report.chunks, report.shards = restored.chunks, restored.shards
    report.used_bytes = index.allocator.capacity - index.allocator.free_bytes
    area = np.frombuffer(mmap.mmap(fd, whole, access=mmap.ACCESS_READ), np.uint8)
    chunks = [chunk for namespace in index.namespaces.all() for chunk in namespace.chunks.values()]
    for number, chunk in enumerate(chunks):
        progress(number, len(chunks))
        for rank, shard in chunk.shards.items():
            report.summed_shards += bool(shard.checksum)
            if not shard.checksum or checksum(area, shard.extents, shard.size) == shard.checksum:
                continue
            assert shard.slot is not None, "a restored shard without a record"
            place = shard.slot * SLOT_BYTES
            if os.pread(fd, SLOT_BYTES, HEADER_BYTES + place) != data[place : place + SLOT_BYTES]:
                continue  # it was evicted while we read it
            name = f"shard {chunk.key.hex()[:16]} of rank {rank}"
            report.problems.append(f"{name}: its bytes do not match its checksum")
            index.mark_corrupt(chunk, rank)
    index.validate()


def _restore(fd: int, header: ArenaHeader, whole: int) -> tuple[Index, Restored, bytearray]:
    """The index that a server would restore, and the table's bytes."""
    data = header.read_table(fd)
    records = Records(memoryview(bytearray(data)))  # which erases bad ones in its own copy
    index = Index(Allocator(header.chunks_start, header.size), Lru, records)
    return index, restore(index, data, whole), data
