"""Chunks that are removed without need for their space: too old, or above a cap. Used by core/depot.py, in steps."""

from __future__ import annotations

import math

from kvdepot.core.index import states
from kvdepot.core.index.events import Reason
from kvdepot.core.index.index import Index


def expire(index: Index, wall: int, most: int = 1 << 62) -> int:
    """Hide up to `most` chunks that are older at `wall` (seconds since 1970) than a limit; returns how many."""
    index.wall = wall
    expired = 0
    for chunk in index.accounts.ages.due(wall):
        if chunk.state is not states.PENDING_REMOVAL:
            expired += 1
            index.hide(chunk, at_once=False)
            if expired >= most:
                break
    return expired


def set_back(index: Index, seconds: float) -> None:
    """Make all chunks as much older as the wall clock was set back: they are as old as the other clock says."""
    step = math.ceil(seconds)
    for chunk in [chunk for each in index.namespaces.all() for chunk in each.chunks.values()]:
        chunk.born, chunk.used_s = max(0, chunk.born - step), max(0, chunk.used_s - step)
        index.accounts.ages.record(chunk)


def trim(index: Index, most: int) -> bool:
    """Evict up to `most` chunks, which nothing holds, of accounts above their caps, those that are wanted last; returns
    whether it must go on."""
    for account in index.accounts.all():
        while account.used > account.cap and (victim := account.victim(-1.0)) is not None:
            index.remove(victim, Reason.EVICTED)
            most -= 1
            if most <= 0:
                return True
    return False
