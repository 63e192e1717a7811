"""Removes chunks although nobody needs their space: chunks that are too old, or above a cap. Used by core/depot.py."""

from __future__ import annotations

import math

from kvdepot.core.index import states
from kvdepot.core.index.events import Reason
from kvdepot.core.index.index import Index


def expire(index: Index, wall: int, most: int = 1 << 62) -> int:
    """Hide up to `most` chunks that at `wall` (seconds since 1970) are older than their limit; returns how many."""
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
    """Move the times of all chunks back as far as the wall clock was set back, so that their ages stay right."""
    step = math.ceil(seconds)
    for chunk in [chunk for each in index.namespaces.all() for chunk in each.chunks.values()]:
        chunk.born, chunk.used_s = max(0, chunk.born - step), max(0, chunk.used_s - step)
        index.accounts.ages.record(chunk)


def trim(index: Index, most: int) -> bool:
    """Evict up to `most` chunks of accounts that are above their caps; wanted chunks go last. Returns whether to call
    it again."""
    for account in index.accounts.all():
        while account.used > account.cap and (victim := account.victim(-1.0)) is not None:
            index.remove(victim, Reason.EVICTED)
            most -= 1
            if most <= 0:
                return True
    return False
