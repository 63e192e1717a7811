"""How much of a prompt can be resumed, given what each KV cache group needs. Pure; used by core/index and core/tiering.

A group's reach says how many chunks before a boundary the engine needs of it to resume there: all (full attention), the
last n (a sliding window, or a local chunk), or one (a state).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["deepest_boundary", "needed_parts"]

G = TypeVar("G")


def deepest_boundary(bounded: Sequence[tuple[G, int]], end: int, has: Callable[[G, int], bool]) -> int:
    """The largest boundary d <= `end` for which each bounded group has the parts of its last `reach` chunks before d.

    bounded: groups with their reaches. has(group, i): whether the part of chunk i, counted from 0, is there. 0 needs
    nothing, so there always is one.
    """
    agreed = 0  # groups in a row that have what the boundary needs
    number = 0
    while end and agreed < len(bounded):
        group, reach = bounded[number]
        at, agreed = end, agreed + 1
        while at > max(0, end - reach):
            at -= 1
            if not has(group, at):
                end, agreed = at, 1  # every boundary whose window holds this part lacks it
        number = (number + 1) % len(bounded)
    return end


def needed_parts(reach: int, end: int) -> range:
    """The chunks whose parts a group needs at the boundary `end`."""
    return range(max(0, end - reach) if reach else 0, end)
