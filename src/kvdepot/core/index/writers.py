"""The writers (wire.Register) that the records of shards name, so that a restart forgets none of them.

Used by core/index/ on the deciding thread. Invariant: while a shard's record has a writer's number, the table has the
record of that writer, so there are never more records of writers than of shards. A writer's number is small, and is
free again once no shard has it, so that the record of a shard keeps its size.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvdepot.core.index.chunk import Namespace
from kvdepot.memory.records import Records, WriterRecord

MOST_WRITERS = 1024
"""The most writers with a record: each may take ten slots of the table. Shards of further writers are not recorded."""


@dataclass(slots=True)
class _Named:
    number: int
    slot: int
    shards: int = 0


class Writers:
    """The writers with a record, each with the number of shards whose records name it."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._known: dict[str, _Named] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add_shard(self, name: str) -> int | None:
        """Count one more recorded shard of a writer; returns its number: 0 without a name, None without room."""
        if not name:
            return 0
        known = self._known.get(name)
        if known is None:
            taken = {each.number for each in self._known.values()}
            number = next(each for each in itertools.count(1) if each not in taken)
            slot = self._records.write(WriterRecord(number, name)) if len(taken) < MOST_WRITERS else None
            if slot is None:
                return None
            known = self._known[name] = _Named(number, slot)
        known.shards += 1
        return known.number

    def drop_shard(self, name: str) -> None:
        """Undo one `add_shard`: the shard's record is erased, or was not written."""
        known = self._known.get(name)
        if known is not None:
            known.shards -= 1
            if not known.shards:
                self._records.erase(known.slot)
                del self._known[name]

    def check(self, namespaces: Iterable[Namespace]) -> None:
        """Raise AssertionError unless each writer counts as many shards as the index has records of."""
        shards = [shard for each in namespaces for chunk in each.chunks.values() for shard in chunk.shards.values()]
        recorded = Counter(shard.writer for shard in shards if shard.slot is not None and shard.writer)
        assert recorded == {name: each.shards for name, each in self._known.items()}, "a writer has other shards"

    def adopt(self, found: Mapping[int, tuple[int, str]], shards: Mapping[int, int]) -> None:
        """Take over the records that recovery.py has read. found: slot and name of each writer, by its number. shards:
        how many shards have the number; writers without shards are erased."""
        for number, (slot, name) in found.items():
            if shards.get(number) and name not in self._known:
                self._known[name] = _Named(number, slot, shards[number])
            else:
                self._records.erase(slot)
