"""What a bounded tier holds, and which object goes first: names and bytes only. Pure; its caller holds the lock.

The one law: every byte that lies in the store is counted, from before it is written until after it is gone. So there
are three ways to be counted: as room taken for what is being written (`reserve`), as an object (`enter`), and as an
object that was taken out (`take`, `victim`, `forget`) but lies there until `settle`, or until its last reader is done.
"""

from __future__ import annotations

from kvdepot.eviction import POLICIES, Victim

__all__ = ["Entry", "Ledger"]


class Entry(Victim, gc=False):
    """One object."""

    name: str = ""
    """Empty where it is no object, and the policy does not know it."""
    charge: int = 0
    """Bytes it takes."""
    dated: float = 0.0
    """When it was last used, as the store itself knows: seconds since 1970."""
    readers: int = 0
    settled: bool = False
    """Its bytes go when its last reader does."""


class Ledger:
    """Objects of a tier with room for `capacity_bytes`."""

    def __init__(self, capacity_bytes: int, policy: str) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.ranked = False
        """Whether what was there before us is in its order; until then only reading is allowed."""
        self._policy = POLICIES[policy]()
        self._entries: dict[str, Entry] = {}

    def __repr__(self) -> str:
        return f"<Ledger {len(self)} objects, {self.used_bytes} of {self.capacity_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    # -- what was there before

    def note(self, entry: Entry, is_object: bool = True) -> None:
        """This was there before us."""
        self.used_bytes += entry.charge
        if is_object:
            self._entries[entry.name] = entry

    def rank(self) -> None:
        """All that was there is noted: the longest unused goes first."""
        for entry in sorted(self._entries.values(), key=lambda entry: entry.dated):
            entry.key = entry.name.encode()
            self._policy.insert(entry)
            self._policy.add(entry)
        self.ranked = True

    # -- room

    def reserve(self, size: int) -> bool:
        """Take room; False where there is not enough."""
        if self.used_bytes + size > self.capacity_bytes:
            return False
        self.used_bytes += size
        return True

    def free(self, size: int) -> None:
        """Give room back."""
        assert 0 <= size <= self.used_bytes, f"{size} of {self.used_bytes} bytes freed"
        self.used_bytes -= size

    # -- objects

    def enter(self, entry: Entry) -> None:
        """Reserved room has become an object. It replaces what has its name, whose bytes are gone by now."""
        if (old := self.take(entry.name)) is not None:
            self.settle(old)
        self._entries[entry.name] = entry
        entry.key = entry.name.encode()
        self._policy.insert(entry)
        self._policy.add(entry)

    def keep(self, entry: Entry) -> None:
        """What was taken out stays after all."""
        entry.gone = False
        self._entries[entry.name] = entry
        self._policy.add(entry)

    def hold(self, name: str) -> Entry | None:
        """Somebody reads this object, which is a use; `release` follows. None where there is none."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.readers += 1
            if self.ranked:
                self._policy.use(entry)
        return entry

    def release(self, entry: Entry) -> None:
        """A reader is done."""
        entry.readers -= 1
        if entry.readers:
            return
        if entry.settled:
            self.free(entry.charge)
        elif self.ranked and not entry.gone:
            self._policy.add(entry)

    def take(self, name: str) -> Entry | None:
        """Take an object out; it is counted until it is settled."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            entry.gone = True
        return entry

    def victim(self) -> Entry | None:
        """Take out the object that goes first; None where there is none that nobody reads."""
        entry = self._policy.victim(_is_unread)
        if entry is None:
            return None
        assert isinstance(entry, Entry) and self._entries.pop(entry.name) is entry
        entry.gone = True
        return entry

    def forget(self, salt: str, space: str) -> list[Entry]:
        """Take out all objects with such a beginning (kvdepot.tiers.Tier.forget)."""
        names = [name for name in self._entries if name.startswith(salt) and name.startswith(space, 33)]
        return [entry for name in names if (entry := self.take(name)) is not None]

    def settle(self, entry: Entry, evicted: bool = False) -> None:
        """What was taken out lies there no more, but for those who read it."""
        if self.ranked and entry.name:
            self._policy.remove(entry, evicted)
        entry.settled = True
        if not entry.readers:
            self.free(entry.charge)


def _is_unread(entry: Victim) -> bool:
    assert isinstance(entry, Entry)
    return not entry.readers
