"""Prefix families: counts of all prompts that begin with the same chunk, kept as chunks come and go. Pure.

Used by core/index/index.py, and read by core/prefixes.py. A chunk of an unbounded KV cache group belongs to the family
of its parent, and the first chunk of a prompt begins one; a part of a bounded group belongs to its parent's. Chunks
without a known chain (loose ones) belong to none. Chunks, prompts and tokens are counted in the model's first unbounded
group alone, bytes in all groups.

Chunks do not know their children, so what the prompts of a family share cannot be found from its start. `shared_by`
walks from one end to the start instead: the chunk of this chain that is nearest to the start and has several chunks
behind it is the last one that all share, whichever end the walk began at.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvdepot.core.index.chunk import Chunk, Namespace

__all__ = ["Family", "adopt", "check", "followers", "join", "leave", "shared_by"]

_STEPS = 1024
"""Chunks that `shared_by` passes between two pauses, in a fraction of a millisecond."""


class Family(msgspec.Struct, gc=False):
    """What all prompts that begin with one chunk have in memory."""

    key: bytes
    """Of its first chunk."""
    last: bytes
    """Of its newest chunk; if that has gone, of the chunk before it. Where `shared_by` begins."""
    used: int = 0
    """When a lookup last found some of it, or when it came into memory (after a restart: when it was computed), in
    seconds since 1970; 0 = not known."""
    parts: int = 0
    """Chunks in all KV cache groups."""
    chunks: int = 0
    """Of those, in the first unbounded group."""
    ends: int = 0
    """Of those, without a chunk behind them in that group."""
    bytes: int = 0
    hits: int = 0
    """Lookups that found some of it."""
    hit_chunks: int = 0
    """Chunks that they found."""


def followers(chunk: Chunk) -> int:
    """How many chunks of the same KV cache group are behind a chunk; its bounded parts count as its children, too."""
    groups = chunk.namespace.groups
    if len(groups) == 1 or not chunk.children:
        return chunk.children
    parts = (group.chunks.get(chunk.key) for group in groups if group.reach)
    return chunk.children - sum(part is not None and part.parent is chunk for part in parts)


def join(chunk: Chunk, wall: int) -> None:
    """A chunk is new: it is in its namespace, and its parent counts it."""
    namespace, before = chunk.namespace, chunk.parent
    if before is not None:
        family = before.family
    elif chunk.position == 1:
        family = namespace.families.get(chunk.key)
        if family is None:
            family = namespace.families[chunk.key] = Family(chunk.key, chunk.key, wall)
    else:
        return
    if family is None:
        return
    chunk.family = family
    family.parts += 1
    if namespace.is_lead:
        family.chunks += 1
        family.last = chunk.key
        if before is None or followers(before) > 1:
            family.ends += 1


def leave(chunk: Chunk, before: Chunk | None) -> None:
    """A chunk is gone, and its namespace and `before`, its parent so far, do not count it any more."""
    family = chunk.family
    if family is None:
        return
    chunk.family = None
    family.parts -= 1
    if chunk.namespace.is_lead:
        family.chunks -= 1
        is_end = not followers(chunk)  # chunks behind a failed reservation stay
        is_before_end = before is not None and not before.gone and not followers(before)
        family.ends += is_before_end - is_end
        if family.last == chunk.key:
            family.last = b"" if before is None else before.key
    if not family.parts:
        del chunk.namespace.families[family.key]


def adopt(namespaces: Iterable[Namespace]) -> None:
    """Build the families of namespaces whose chunks are linked already. O(n log n)."""
    for namespace in sorted(namespaces, key=lambda each: each.reach > 0):  # bounded parts belong to others' families
        families = namespace.families
        for chunk in sorted(namespace.chunks.values(), key=lambda each: each.position):  # so parents come first
            before = chunk.parent
            family = before.family if before is not None else None
            if before is None and chunk.position == 1:
                family = families.setdefault(chunk.key, Family(chunk.key, chunk.key, chunk.born))
            if family is None:
                continue
            chunk.family = family
            family.parts += 1
            family.bytes += chunk.bytes
            if namespace.is_lead:
                family.chunks += 1
                if not followers(chunk):
                    family.ends += 1
                    family.last = chunk.key


def shared_by(chunk: Chunk | None) -> Generator[None, None, Chunk | None]:
    """Find the last chunk that all prompts of a family share, from one of its chunks in the first unbounded group.

    Yields after every `_STEPS` chunks, so that the caller can pause; chunks may come and go then. Returns None if it
    cannot be found from this one: that has left memory, or its chain is incomplete, or it is no end and the chunks
    behind it are not known.
    """
    shared = chunk if chunk is not None and followers(chunk) != 1 else None
    steps = 0
    while chunk is not None and not chunk.gone and chunk.position > 1:
        chunk = chunk.parent
        if chunk is not None and followers(chunk) > 1:
            shared = chunk
        steps += 1
        if not steps % _STEPS:
            yield
    return None if chunk is None or chunk.gone or shared is None or shared.gone else shared


def check(namespaces: Iterable[Namespace]) -> None:
    """Raise AssertionError unless families agree with their chunks; O(n)."""
    found: dict[int, Family] = {}
    sums: dict[int, list[int]] = {}
    known: dict[int, Family] = {}
    for namespace in namespaces:
        assert namespace.families is namespace.groups[0].families
        assert sum(each.is_lead for each in namespace.groups) == any(not each.reach for each in namespace.groups)
        for key, each in namespace.families.items():
            assert key == each.key
            known[id(each)] = each
        for chunk in namespace.chunks.values():
            family, before = chunk.family, chunk.parent
            assert before is None or before.gone or before.family is family
            assert chunk.position != 1 or (family is not None and family.key == chunk.key)
            if family is not None:
                assert namespace.families[family.key] is family
                found[id(family)] = family
                lead = namespace.is_lead
                ends = lead and not followers(chunk)
                total = sums.setdefault(id(family), [0, 0, 0, 0])
                for i, value in enumerate((1, lead, ends, chunk.bytes)):
                    total[i] += value
    assert found.keys() == known.keys(), "a family without chunks"
    for number, each in known.items():
        assert [each.parts, each.chunks, each.ends, each.bytes] == sums[number], each
