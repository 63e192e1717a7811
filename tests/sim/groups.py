"""Hybrid models: their KV cache groups, and what resuming a prompt needs of each, known without the depot.

A model's layers fall into groups. Of full attention, resuming at a boundary needs all chunks before it, of a window the
last few, of a state the last one: that is a group's reach (`Model.reach`; 0: all). The oracle shares no code with what
it checks, and tries every boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from kvdepot.protocol import wire
from tests.sim.content import CHUNK_TOKENS, Model


class Reaches(Protocol):
    """Anything with a reach in chunks."""

    reach: int


Group = TypeVar("Group", bound=Reaches)


@dataclass(frozen=True)
class Hybrid:
    """A model: its KV cache groups, of full attention alone one unbounded one."""

    name: str
    world_size: int
    groups: tuple[Model, ...]

    @property
    def lead(self) -> Model:
        """The first group, whose paging unit is the model's where there can be only one."""
        return self.groups[0]

    @property
    def chunk_tokens(self) -> int:
        return self.lead.chunk_tokens

    @property
    def has_state(self) -> bool:
        return any(group.reach == 1 for group in self.groups)

    @property
    def has_tails(self) -> bool:
        """Whether a request's end is in the last block of each group."""
        return self.has_state and all(group.blocks_in_chunk == 1 and group.reach <= 1 for group in self.groups)


def needed(reach: int, boundary: int) -> range:
    """The chunks of a group that resuming at a boundary needs; a boundary is the number of chunks before it."""
    return range(boundary - min(reach or boundary, boundary), boundary)


def deepest(groups: Iterable[Group], chunks: int, is_there: Callable[[Group, int], bool]) -> int:
    """The deepest boundary of which every group has what resuming there needs; 0 without groups."""
    groups = list(groups)
    known: dict[tuple[int, int], bool] = {}

    def has(number: int, chunk: int) -> bool:
        if (number, chunk) not in known:
            known[number, chunk] = is_there(groups[number], chunk)
        return known[number, chunk]

    for boundary in range(chunks, 0, -1):
        if groups and all(
            has(number, chunk) for number, group in enumerate(groups) for chunk in needed(group.reach, boundary)
        ):
            return boundary
    return 0


def longest(
    groups: Iterable[Group], keys: list[bytes], tails: Sequence[wire.Tail], is_there: Callable[[Group, bytes], bool]
) -> list[bytes]:
    """The keys of the longest prefix that can be resumed: at the deepest boundary, or in the first tail behind it."""
    groups = list(groups)
    end = deepest(groups, len(keys), lambda group, i: is_there(group, keys[i]))
    for tail in tails:
        longer = [*keys[: tail.chunks], tail.key]
        if tail.chunks >= end and deepest(groups, len(longer), partial(_at, is_there, longer)) == len(longer):
            return longer
    return keys[:end]


def _at(is_there: Callable[[Group, bytes], bool], keys: list[bytes], group: Group, i: int) -> bool:
    return is_there(group, keys[i])


Shape = tuple[int, int, int, bool, int]
"""Of a group: reach, tokens per block, layers, K and V apart, bytes a token."""


def _hybrid(name: str, world_size: int, *shapes: Shape, chunk_tokens: int = CHUNK_TOKENS) -> Hybrid:
    groups = [
        Model(name, block_tokens, world_size, layers, kv_apart, content, number, reach, chunk_tokens)
        for number, (reach, block_tokens, layers, kv_apart, content) in enumerate(shapes)
    ]
    return Hybrid(name, world_size, tuple(groups))


MODELS = (
    _hybrid("tiny", 1, (0, 6, 2, False, 96)),
    _hybrid("pair", 2, (0, 6, 2, True, 70)),
    _hybrid("wide", 2, (0, 4, 3, True, 80)),
    _hybrid("whole", 2, (0, 12, 1, False, 256)),
    _hybrid("tiny", 1, (0, 6, 2, True, 96)),  # the first one's name and another layout
)
"""Models of full attention alone."""

HYBRIDS = (
    _hybrid("window", 1, (0, 6, 2, False, 64), (2, 4, 1, True, 96)),
    # The first one's name and layouts, and a longer window.
    _hybrid("window", 1, (0, 6, 2, False, 64), (3, 4, 1, True, 96)),
    _hybrid("state", 2, (0, 6, 1, True, 80), (1, 12, 1, False, 48)),
    _hybrid("windows", 2, (3, 6, 1, False, 64), (2, 12, 1, True, 40)),
    _hybrid("lone", 1, (2, 6, 1, True, 100)),
    _hybrid("double", 2, (2, 6, 1, False, 72), (0, 4, 1, True, 64), (0, 12, 1, False, 100)),
    _hybrid("long", 1, (0, 12, 1, False, 64), (2, 6, 1, True, 40), (1, 24, 1, False, 40), chunk_tokens=24),
    _hybrid("tails", 2, (0, 12, 1, True, 40), (1, 12, 1, False, 56)),
    _hybrid("ends", 2, (1, 24, 1, False, 36), (0, 24, 1, True, 40), chunk_tokens=24),
)
TAILED = tuple(model for model in HYBRIDS if model.has_tails)
