"""What is being removed from memory on request, some chunks at a time. No I/O, thread or clock here.

Begun and gone on with by core/depot.py on the deciding thread; between two steps everything else is served. The one
law: what a removal that `hides` means is nobody's from the moment it begins, however long the removal takes, and what
is stored after that moment stays.

Chunks carry the number of removals that had begun when they came (`Chunk.generation`), and a removal means those from
before its own. So core/index/index.py can tell what is hidden without a mark on each, and whoever is in the way of a
store, or is to make room for one, goes at once (`Index.forestall`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvdepot.errors import Busy

if TYPE_CHECKING:
    from kvdepot.core.index.index import Chunk, Index, Namespace

__all__ = ["STEP_CHUNKS", "Removal", "Removals"]

STEP_CHUNKS = 256
"""So many chunks are looked at in one go: one or two milliseconds."""
_MOST = 16


@dataclass(slots=True, eq=False)
class Removal:
    """One that is under way."""

    number: int
    namespaces: dict[Namespace, None]  # in the order they were named in, so that two runs remove in one order
    salt: bytes | None  # None: any
    hides: bool  # also what is held, which goes when it is not; else that stays, and what it needs
    counts: bool  # nothing goes: `removed` is what would
    done: Callable[[int], list[Any]]  # told how many chunks were removed or hidden
    left: list[Chunk] = field(default_factory=list)  # to be looked at, from the end on
    removed: int = 0
    counted_bytes: int = 0  # where it only counts

    def means(self, chunk: Chunk) -> bool:
        return chunk.generation < self.number and chunk.namespace in self.namespaces and self.salt in (None, chunk.salt)


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
        self._index.generation += 1
        removal = Removal(self._index.generation, dict.fromkeys(namespaces), salt, hides, counts, done)
        for namespace in removal.namespaces:
            removal.left += namespace.chunks.values()
        self._under_way.append(removal)
        if hides:
            self._index.hiding.append(removal)
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
            if removal.hides:
                self._index.hiding.remove(removal)
            for namespace in () if removal.counts else removal.namespaces:
                self._index.forget_namespace(namespace)
        return through

    def _look_at(self, chunk: Chunk, removal: Removal) -> None:
        index = self._index
        if removal.counts:
            if removal.means(chunk) and index.is_there(chunk):
                removal.removed += 1
                removal.counted_bytes += chunk.bytes
            return
        if chunk.gone or index.forestall(chunk) or removal.hides:
            return
        if not removal.means(chunk) or not index.is_evictable(chunk):
            return  # stored anew meanwhile, or held
        before: Chunk | None = chunk.parent
        removal.removed += 1
        index.remove(chunk)
        if before is not None and removal.means(before):
            removal.left.append(before)  # it may have been looked at already, and kept for this one's sake
