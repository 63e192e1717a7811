"""The memory that this process may still take: the machine's, its control groups' and the arena folder's. It only
reads files.

A file in a tmpfs takes memory as its pages are written, so one that exceeds a limit is found by the kernel's killer
later, in silence: sizes are compared here, before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvdepot.memory.shm import SHM

ENGINE_SHM = 242 << 20
"""Bytes that must be free in /dev/shm for an engine to start: vLLM looks for 240 MiB for each queue between its
processes, and the clients' liveness files take some pages."""
_LEAST_ARENA = 1 << 20
_UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number above this for no limit."""


class Limit(NamedTuple):
    """One bound of the memory that this process may take. most: bytes in all. free: bytes that are left."""

    what: str
    most: int
    free: int
    advice: str
    is_hard: bool = True
    """Whether the kernel kills a process, or fails its allocation, rather than exceed it."""
    is_shm: bool = False
    """Whether it is the room in /dev/shm, of which engines need a part."""


def free_bytes(folder: Path) -> int:
    """Bytes that are free in a file system; more than any machine has for a tmpfs without a limit. Raises OSError."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize if room.f_blocks else sys.maxsize


def allocated(folder: Path, name: str) -> int:
    """Bytes of memory that a file takes; 0 if there is no such file."""
    try:
        return (folder / name).stat().st_blocks * 512
    except OSError:
        return 0


def default_arena(bounds: Iterable[Limit], taken: int) -> int:
    """The default size of an arena, in bytes: a quarter of the free memory of the tightest bound, and so little of
    /dev/shm that `ENGINE_SHM` is left. taken: bytes that the arena already has, which count as free."""
    shares = [sys.maxsize]
    for bound in bounds:
        room = bound.free + taken
        shares.append(room // 4)
        if bound.is_shm and room > ENGINE_SHM:  # with less, no engine of several processes starts anyway
            shares.append(max(_LEAST_ARENA, room - ENGINE_SHM))
    return min(shares)


def limits(folder: Path, root: Path = Path("/")) -> list[Limit]:
    """All bounds of the memory of files in this folder, the tightest first. root: where the machine's /proc and /sys
    are."""
    rows = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    sizes = {row[0]: int(row[1]) << 10 for row in rows if len(row) > 1 and row[1].isdigit()}
    found = list(_groups(root))
    if "MemAvailable:" in sizes:  # what the kernel estimates to be available without swapping
        total, free = sizes["MemTotal:"], sizes["MemAvailable:"]
        found.insert(0, Limit("this machine", total, free, "stop other programs", is_hard=False))
    with contextlib.suppress(OSError):
        room = os.statvfs(folder)
        if room.f_blocks:
            most, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
            advice = f"mount -o remount,size=... {folder}; docker: --shm-size for {SHM}, or a volume of type tmpfs"
            advice = f"enlarge {folder} ({advice}; Kubernetes: an emptyDir with medium Memory)"
            is_shm = SHM.exists() and folder.stat().st_dev == SHM.stat().st_dev
            found.append(Limit(str(folder), most, free, advice, is_shm=is_shm))
    return sorted(found, key=lambda limit: limit.free)


def _groups(root: Path) -> Iterator[Limit]:
    """The limits of this process's memory control group and of all above it that are visible here."""
    paths: dict[str, str] = {}
    names: tuple[str, ...]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))  # the list of controllers is empty for version 2
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mounted, _, about = line.partition(" - ")
        kind, *_, options = about.split()
        if kind == "cgroup2":
            path, names, usage = paths.get("", "/"), ("memory.max", "memory.high"), "memory.current"
        elif kind == "cgroup" and "memory" in options.split(","):
            path, names, usage = paths.get("memory", "/"), ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        top, mount = mounted.split()[3:5]
        # In a container, the mount may begin at its own group while paths begin at the machine's.
        inside = path[len(top) :] if path == top or path.startswith(f"{top.rstrip('/')}/") else ""
        place = root / mount.lstrip("/")
        for group in (place / inside.strip("/"), *(place / inside.strip("/")).parents):
            yield from _limits_of(group, names, usage, f"control group /{group.relative_to(place)}".removesuffix("."))
            if group == place:
                break


def _limits_of(group: Path, names: tuple[str, ...], usage: str, what: str) -> Iterator[Limit]:
    for name in names:
        text = _read(group / name).strip()
        if text.isdigit() and int(text) < _UNLIMITED:
            most, used = int(text), int(_read(group / usage).strip() or 0)
            stat = dict(line.split()[:2] for line in _read(group / "memory.stat").splitlines() if " " in line)
            # Cached files that the kernel gives up before it kills a process of the group.
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            free = max(0, most - max(0, used - cached))
            advice = f"raise {name}, the memory limit of this container or unit"
            yield Limit(what, most, free, advice, is_hard=name != "memory.high")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
