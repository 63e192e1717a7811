"""Which chunks have a complete chain before them. Used by core/index/index.py; pure.

Invariant: a whole chunk whose parent is chained is chained. A chunk that was sealed before its parent waits for it
here, and is chained in the step that chains the parent.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvdepot.core.index import states
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.states import Transition


class Chains:
    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: dict[int, dict[int, Chunk]] = {}  # id() of a parent -> chunks that wait for it, by id()

    def join(self, chunks: Iterable[Chunk]) -> None:
        """Chain the chunks that are whole, and those that wait for them, or let them wait for their parents."""
        for chunk in chunks:
            before = chunk.parent
            if not chunk.position or chunk.state is not states.WHOLE:
                continue  # a chunk at position 0 is loose or of a bounded group, and found by its key alone
            if chunk.position == 1 or (before is not None and before.state is states.CHAINED):
                chunk.state = states.TRANSITIONS[chunk.state][states.CHAIN]
                if chunk.broken:
                    self._mend(chunk)
                if self.waiting:
                    self._join_behind(chunk)
            elif before is not None and not before.gone:
                self.waiting.setdefault(id(before), {})[id(chunk)] = chunk

    def _join_behind(self, chunk: Chunk) -> None:
        chained = [chunk]
        while chained:
            for each in self.waiting.pop(id(chained.pop()), {}).values():
                if each.state is states.WHOLE:  # otherwise it was marked corrupt or hidden in the meantime
                    each.state = states.TRANSITIONS[each.state][states.CHAIN]
                    self._mend(each)
                    chained.append(each)

    def unchain(self, chunk: Chunk, transition: Transition) -> None:
        """Mark a chunk corrupt, or hide it. Until it is chained again, no lookup finds the chunks behind it."""
        was_chained = chunk.state is states.CHAINED
        chunk.state = states.TRANSITIONS[chunk.state][transition]
        if was_chained and chunk.children:
            chunk.broken = True
            chunk.namespace.broken += 1

    def leave(self, chunk: Chunk, before: Chunk | None) -> None:
        """Note that a chunk behind `before` is gone: it no longer waits for its parent, and no chunk waits for it."""
        for each in (chunk, before):
            if each is not None and each.broken and each.gone and not each.children:
                self._mend(each)  # with children it stays broken, because they can never be chained to it again
        if self.waiting:
            self.waiting.pop(id(chunk), None)
            waiting = self.waiting.get(id(before), {})
            if waiting.pop(id(chunk), None) is not None and not waiting:
                del self.waiting[id(before)]

    def _mend(self, chunk: Chunk) -> None:
        if chunk.broken:
            chunk.broken = False
            chunk.namespace.broken -= 1


def link(namespace: Namespace, key: bytes, parent: bytes, position: int, salt: bytes) -> tuple[Chunk | None, int]:
    """The chunk before a new chunk, if it is known, and the new chunk's position. parent, position: see `Run`.

    A parent with another salt is a client's mistake: the chain would be in two accounts.
    """
    if namespace.reach:
        before = None if namespace.trunk is None else namespace.trunk.chunks.get(key)
        return (before if before is None or before.salt == salt else None), 0
    if position == 1 and parent:
        return None, 1
    before = namespace.chunks.get(parent) if position > 1 else None
    is_known = before is not None and before.position == position - 1 and before.salt == salt
    return (before, position) if is_known else (None, 0)
