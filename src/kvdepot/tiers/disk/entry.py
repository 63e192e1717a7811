"""One object of a disk tier as its ledger sees it. Plain data."""

from __future__ import annotations

import sys

from kvdepot.eviction import Victim
from kvdepot.tiers.rules import owner_of

__all__ = ["Entry", "is_unread"]


class Entry(Victim, gc=False):
    """One object, or other bytes that are counted."""

    name: str = ""
    """Empty if it is not an object; no policy knows it then."""
    owner: str = ""
    """Whose bytes they are (tiers/rules.py); of an object, by its name."""
    charge: int = 0
    """Bytes it takes."""
    dated: float = 0.0
    """When it was last used according to the store: seconds since 1970."""
    born: float = 0.0
    """When its contents were computed: seconds since 1970."""
    ranked: int = 0
    """The accounts whose policy knows it, by `Accounts.number`; 0: none does."""
    readers: int = 0
    settled: bool = False
    """Its bytes are free once its last reader is done."""

    def __post_init__(self) -> None:
        if self.name:
            self.owner = sys.intern(owner_of(self.name))  # one string for the many objects of an owner


def is_unread(entry: Victim) -> bool:
    """Whether nobody reads it, so that it may be evicted."""
    assert isinstance(entry, Entry)
    return not entry.readers
