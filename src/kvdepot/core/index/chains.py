"""Which chunks have a whole chain before them. Part of core/index/index.py; pure.

The one law: a chunk that is whole, and whose parent is chained, is chained. A chunk that was sealed before its parent
waits for it here, and is chained in the step that chains the parent.
"""

from __future__ import annotations

from kvdepot.core.index.chunk import TRANSITIONS, Chunk, Event, State

__all__ = ["Chains"]

_WHOLE, _CHAINED, _CHAIN = State.WHOLE, State.CHAINED, Event.CHAIN  # an enum's attributes are slow to get


class Chains:
    """The chains of one index."""

    __slots__ = ("_waiting", "broken")

    def __init__(self) -> None:
        self.broken = 0  # chunks that are not chained, with chunks behind them that are
        self._waiting: dict[int, dict[int, Chunk]] = {}  # whole chunks by id(), by that of the parent they wait for

    def __repr__(self) -> str:
        return f"<Chains with {self.broken} broken, {len(self._waiting)} awaited>"

    def join(self, chunk: Chunk) -> None:
        """A chunk is whole now: chain it, and what has waited for that, or let it wait until its parent is chained."""
        before = chunk.parent
        if chunk.position == 1 or (before is not None and before.state is _CHAINED):
            chunk.state = TRANSITIONS[chunk.state][_CHAIN]
            if chunk.broken:
                self._mend(chunk)
            if self._waiting:
                self._join_behind(chunk)
        elif before is not None and not before.gone:
            self.wait(chunk, before)

    def wait(self, chunk: Chunk, before: Chunk) -> None:
        """A whole chunk is to be chained once its parent is."""
        self._waiting.setdefault(id(before), {})[id(chunk)] = chunk

    def _join_behind(self, chunk: Chunk) -> None:
        chained = [chunk]
        while chained:
            for each in self._waiting.pop(id(chained.pop()), {}).values():
                if each.state is _WHOLE:  # else it has been marked corrupt or hidden meanwhile
                    each.state = TRANSITIONS[each.state][_CHAIN]
                    self._mend(each)
                    chained.append(each)

    def break_at(self, chunk: Chunk) -> None:
        """A chunk is not chained any more. What is behind it stays so, and is no prefix until it is chained again."""
        if chunk.children:
            chunk.broken = True
            self.broken += 1

    def leave(self, chunk: Chunk, before: Chunk | None) -> None:
        """A chunk is gone, and was behind `before`: it waits for that no more, and nothing for it."""
        if self.broken:
            for each in (chunk, before):
                if each is not None and each.gone and not each.children:
                    self._mend(each)  # else those behind it have lost it for good
        if self._waiting:
            self._waiting.pop(id(chunk), None)
            waiting = self._waiting.get(id(before), {})
            if waiting.pop(id(chunk), None) is not None and not waiting:
                del self._waiting[id(before)]

    def _mend(self, chunk: Chunk) -> None:
        if chunk.broken:
            chunk.broken = False
            self.broken -= 1
