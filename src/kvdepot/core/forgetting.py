"""What is being removed from memory on request, some chunks at a time. No I/O, thread or clock here.

Begun and gone on with by core/depot.py on the deciding thread; between two steps everything else is served. The one
law: what a removal that `hides` means is nobody's from the moment it begins, however long the removal takes, and what
is stored after that moment stays.

Chunks carry the number of removals that had begun when they came (`Chunk.generation`), and a removal means those from
before its own (`scope.Scope`). So the index can tell what is hidden without a mark on each, and whoever is in the way
of a store, or is to make room for one, goes at once (`Index.remove_forgotten`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvdepot.core.index.chunk import Chunk, Namespace, is_evictable
from kvdepot.core.index.index import Index
from kvdepot.core.index.outcomes import Reason
from kvdepot.core.index.scope import Scope
from kvdepot.errors import Busy

__all__ = ["STEP_CHUNKS", "Removal", "Removals"]

STEP_CHUNKS = 256
"""So many chunks are looked at in one go: one or two milliseconds."""
_MOST = 16


@dataclass(slots=True, eq=False)
class Removal:
    """One that is under way. Where it hides, also what is held goes, once it is not; else that stays, and what it
    needs."""

    scope: Scope
    counts: bool  # nothing goes: `removed` is what would
    done: Callable[[int], list[Any]]  # told how many chunks were removed or hidden
    left: list[Chunk] = field(default_factory=list)  # to be looked at, from the end on
    counted_bytes: int = 0  # where it only counts

    @property
    def removed(self) -> int:
        """Chunks that were removed, hidden or counted so far."""
        return self.scope.removed


class Removals:
    """Those under way; the first goes first."""

    def __init__(self, index: Index, step_chunks: int = STEP_CHUNKS) -> None:
        self._index = index
        self._under_way: list[Removal] = []
        self.step_chunks = step_chunks

    def __repr__(self) -> str:
        return f"<Removals of {sum(len(removal.left) for removal in self._under_way)} chunks in {len(self)}>"

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(
        self,
        namespaces: Iterable[Namespace],
        salt: bytes | None,
        hides: bool,
        done: Callable[[int], list[Any]],
        counts: bool = False,
    ) -> Removal:
        """Remove what is there now of these namespaces and of this salt, or count it. Nothing goes before `step`.

        Raises Busy with nothing done. The list of what is there is made at once: some ten milliseconds a million.
        """
        if len(self._under_way) >= _MOST:
            raise Busy(f"{len(self._under_way)} requests to forget or clear are under way: wait until they are through")
        removal = Removal(self._index.begin_removal(namespaces, salt, hides), counts, done)
        for namespace in removal.scope.namespaces:
            removal.left += namespace.chunks.values()
        self._under_way.append(removal)
        return removal

    def step(self) -> list[Removal]:
        """Go on; those that are through now, whose `done` is the caller's to tell."""
        through = []
        steps = self.step_chunks
        while self._under_way:
            removal = self._under_way[0]
            while removal.left and steps:
                steps -= 1
                # Those that came last are looked at first: what is behind a chunk came after it.
                self._look_at(removal.left.pop(), removal)
            if removal.left:
                break
            through.append(self._under_way.pop(0))
            self._index.end_removal(removal.scope)
        return through

    def _look_at(self, chunk: Chunk, removal: Removal) -> None:
        index, scope = self._index, removal.scope
        if removal.counts:
            if scope.means(chunk) and index.is_there(chunk):
                scope.removed += 1
                removal.counted_bytes += chunk.bytes
            return
        if chunk.gone or index.remove_forgotten(chunk) or scope.hides:
            return
        if not scope.means(chunk) or not is_evictable(chunk):
            return  # stored anew meanwhile, or held
        before = chunk.parent
        scope.removed += 1
        index.remove(chunk, Reason.DROPPED)
        if before is not None and scope.means(before):
            removal.left.append(before)  # it may have been looked at already, and kept for this one's sake
