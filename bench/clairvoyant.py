"""The chunks that a depot could have for a queue of prompts if it knew the whole queue in advance. Pure.

Called by pressure.py with the prompts that a real engine has run. What the engine did is given: the order in which its
prompts were complete, and what its own cache had of each. Only what the depot keeps is free, so a depot that knows less
finds no more under the same engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["Names", "Queued", "reaches"]


@dataclass(frozen=True)
class Queued:
    """A prompt. chunks: those of the prompt and, behind them, of its answer, as `Names` calls them. asked: how many of
    them a lookup may find. own: how many of these the engine's own cache has.
    """

    chunks: Sequence[int]
    asked: int
    own: int


class Names:
    """Numbers for chunks: two are the same exactly if they and all before them in their prompts are the same."""

    def __init__(self, chunk_tokens: int) -> None:
        self._size = chunk_tokens
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The names of the whole chunks of a prompt."""
        found, before = [], -1
        for end in range(self._size, len(tokens) + 1, self._size):
            part = tuple(tokens[end - self._size : end])
            before = self._numbers.setdefault((before, part), len(self._numbers))
            found.append(before)
        return found


def reaches(queue: Sequence[Queued], capacity: int) -> list[int]:
    """The number of chunks at the front of each prompt that are not computed, at best, in a depot of `capacity` chunks.

    After each prompt, the depot keeps those chunks of its own and of the prompt that a later prompt needs soonest, and
    of one prompt those in front. This is Belady's MIN with bypass, for prompts instead of single references. A prompt
    needs the chunks that a lookup may find and that the engine's own cache does not have. A chunk that the next prompt
    with it does not need is not kept: that prompt brings it again.

    Why no depot finds more: a chunk that is found stayed from the last prompt that had it until the prompt that needs
    it was complete, because it is pinned meanwhile. So a depot chooses among such intervals, at most `capacity` of
    which cover the end of any prompt. Where there are more, one must go. The interval that ends last is the best one to
    lose, because it covers all later ends that another one covers. A chunk in front of another one is needed no later,
    so at equal ends the deeper one goes, and no chunk stays in vain behind one that went. Stores in progress, pins of
    prompts that still wait, and preempted requests cost a real depot more, and nothing here.
    """
    coming: dict[int, list[tuple[int, bool]]] = {}  # the prompts with a chunk, and whether each needs it; the next last
    depths: dict[int, int] = {}
    for at in reversed(range(len(queue))):
        each = queue[at]
        for depth, chunk in enumerate(each.chunks):
            coming.setdefault(chunk, []).append((at, each.own <= depth < each.asked))
            depths[chunk] = depth
    found: list[int] = []
    kept: set[int] = set()
    for each in queue:
        reach = each.own
        while reach < each.asked and each.chunks[reach] in kept:
            reach += 1
        found.append(reach)
        for chunk in each.chunks:
            coming[chunk].pop()
        needed = [chunk for chunk in kept.union(each.chunks) if coming[chunk] and coming[chunk][-1][1]]
        kept = set(sorted(needed, key=lambda chunk: (coming[chunk][-1][0], depths[chunk]))[:capacity])
    return found
