"""What a process holds, and the check that repeating something does not add to it.

Drivers and allocators load kernels, fill pools and open files in the first rounds, at times of their own. So nothing is
compared with the first rounds: rounds are run in series, and one whole series must add nothing. Something that stays
behind once in a series, or more often, adds to each of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SERIES = 5
"""So many series may be run until one adds nothing."""


def descriptors_and_maps() -> dict[str, int]:
    """The number of this process's descriptors and of its mappings of shared memory."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line or "memfd:" in line]
    return {"fds": len(os.listdir("/proc/self/fd")), "maps": len(maps)}  # noqa: PTH208 - cheaper than paths


def host_bytes() -> int:
    """Bytes of this process's private memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon:")).split()[1]) << 10


def grown(before: Mapping[str, Any], after: Mapping[str, Any], slack: Mapping[str, int]) -> list[str]:
    """Names of the numbers that have grown by more than their slack, and of other values that are not the same."""
    return [
        name
        for name, value in after.items()
        if (value > before[name] + slack.get(name, 0) if isinstance(value, int) else value != before[name])
    ]


def assert_settles(
    repeat: Callable[[], object],
    footprint: Callable[[], Mapping[str, Any]],
    rounds: int,
    slack: Mapping[str, int] | None = None,
) -> None:
    """Call `repeat` in series of this number of rounds until one series adds nothing to the footprint.

    slack: by how much a number may grow in a series, if not by nothing.
    """
    seen = [footprint()]
    for _ in range(SERIES):
        for _ in range(rounds):
            repeat()
        seen.append(footprint())
        if not grown(seen[-2], seen[-1], slack or {}):
            return
    lines = "\n".join(map(str, seen))
    names = ", ".join(grown(seen[-2], seen[-1], slack or {}))
    raise AssertionError(f"every series of {rounds} rounds adds to {names}, from the first line to the last:\n{lines}")
