"""The books of a bounded tier: whatever happens in whatever order, every byte is counted until it is gone."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvdepot.testing.tiers import name_of
from kvdepot.tiers.disk.ledger import Entry, Ledger
from kvdepot.tiers.rules import owner_of

CAPACITY = 100
NAMES = [name_of(number, salt) for number in range(3) for salt in (0, 1)]


class Life(RuleBasedStateMachine):
    """A ledger beside what lies in the store: objects, half-written ones, and what waits to be removed."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY, "lru")
        self.ledger.rank()
        self.lying: list[Entry] = []  # everything whose bytes are somewhere
        self.objects: dict[str, Entry] = {}
        self.leaving: list[Entry] = []  # taken out, not settled
        self.read: list[Entry] = []  # one entry a reader

    def bytes_lying(self) -> int:
        return sum(entry.charge for entry in self.lying)

    def goes(self, entry: Entry) -> None:
        """The file is gone, but a reader still has it open."""
        if not any(entry is other for other in self.read):
            self.lying = [other for other in self.lying if other is not entry]

    @rule(name=st.sampled_from(NAMES), charge=st.integers(1, 60))
    def write(self, name: str, charge: int) -> None:
        room = self.bytes_lying() + charge <= CAPACITY
        assert self.ledger.reserve(charge, owner_of(name)) == room
        if room:
            entry = Entry(name=name, charge=charge)
            self.ledger.enter(entry)
            self.lying.append(entry)
            if (old := self.objects.get(name)) is not None:
                self.goes(old)
            self.objects[name] = entry

    @rule(charge=st.integers(1, 60))
    def write_what_fails(self, charge: int) -> None:
        if self.ledger.reserve(charge, "ours"):
            self.ledger.free(charge, "ours")

    @rule(name=st.sampled_from(NAMES))
    def begin_to_read(self, name: str) -> None:
        entry = self.ledger.hold(name)
        assert entry is self.objects.get(name)
        if entry is not None:
            self.read.append(entry)

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def end_to_read(self, data: st.DataObject) -> None:
        entry = self.read.pop(data.draw(st.integers(0, len(self.read) - 1)))
        self.ledger.release(entry)
        if self.objects.get(entry.name) is not entry and not any(entry is other for other in self.leaving):
            self.goes(entry)

    @rule(name=st.sampled_from(NAMES))
    def take(self, name: str) -> None:
        entry = self.ledger.take(name)
        assert entry is self.objects.pop(name, None)
        if entry is not None:
            self.leaving.append(entry)

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        entry = self.objects.pop(data.draw(st.sampled_from(sorted(self.objects))))
        assert self.ledger.lose(entry)
        assert not self.ledger.lose(entry), "it is taken out once"
        self.goes(entry)

    @rule()
    def evict(self) -> None:
        unread = [entry for entry in self.objects.values() if not any(entry is other for other in self.read)]
        victim = self.ledger.victim("", 0)
        assert (victim is None) == (not unread), "what is read stays, everything else may go"
        if victim is not None:
            assert self.objects.pop(victim.name) is victim and any(victim is other for other in unread)
            self.leaving.append(victim)

    @rule(salt=st.sampled_from(["", NAMES[0][:32], NAMES[1][:32], "f"]))
    def find_spaces(self, salt: str) -> None:
        found = self.ledger.spaces(salt, "")
        assert all(entry.name[:65] == place for place, entries in found.items() for entry in entries)
        meant = [name for name in self.objects if name.startswith(salt)]
        assert sorted(entry.name for entries in found.values() for entry in entries) == sorted(meant)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), can_be_removed=st.booleans())
    def leave(self, data: st.DataObject, can_be_removed: bool) -> None:
        entry = self.leaving.pop(data.draw(st.integers(0, len(self.leaving) - 1)))
        if not can_be_removed and entry.name not in self.objects:
            self.ledger.keep(entry)
            self.objects[entry.name] = entry
        else:
            self.ledger.settle(entry)
            self.goes(entry)

    @invariant()
    def every_byte_is_counted_once(self) -> None:
        assert self.ledger.used_bytes == self.bytes_lying() <= CAPACITY
        assert len(self.ledger) == len(self.objects)
        assert all(name in self.ledger for name in self.objects)


Life.TestCase.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase
