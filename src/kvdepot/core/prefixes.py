"""Answers Prefixes from the counts that the index keeps of each prefix family. Pure; core/lists.py runs it in steps."""

from __future__ import annotations

import heapq
from collections.abc import Generator

from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.families import Family, followers, shared_by
from kvdepot.core.index.index import Index
from kvdepot.protocol import wire
from kvdepot.protocol.prefixes import Prefix
from kvdepot.protocol.status import MOST_NAME

__all__ = ["prefixes"]


def prefixes(
    index: Index, namespaces: list[Namespace], request: wire.Prefixes, wall: int, step: int
) -> Generator[None, None, list[Prefix]]:
    """The families of these namespaces (first unbounded groups) that the request asks for.

    Pauses after `step` families or chunks. wall: seconds since 1970.
    """
    best: list[tuple[int, int, Namespace, Family]] = []  # a heap; the second number orders equals
    serial = 0
    for namespace in namespaces:
        families = list(namespace.families.values())  # some ten milliseconds for a million
        for start in range(0, len(families), step):
            for family in families[start : start + step]:
                if family.key not in namespace.chunks:  # not to be shown, and not worth a search
                    continue
                serial -= 1
                item = _rank(namespace, family, request.sort), serial, namespace, family
                if len(best) < request.most:
                    heapq.heappush(best, item)
                elif item > best[0]:
                    heapq.heapreplace(best, item)
            yield
    best.sort(reverse=True)
    shared: dict[int, Chunk] = {}  # by id() of a family
    for _, _, namespace, family in best:
        yield from _share(family, namespace.chunks.get(family.last), shared)
    yield from _search([item[2:] for item in best if id(item[3]) not in shared], shared, step)
    answer = []
    for _, _, namespace, family in best:
        prefix = _prefix(index, namespace, family, shared.get(id(family)), wall)
        if prefix is not None:
            answer.append(prefix)
    return answer


def _share(family: Family, begin: Chunk | None, shared: dict[int, Chunk]) -> Generator[None, None, None]:
    """Note the last chunk that all of a family share, if it can be found from the chunk `begin`."""
    found = yield from shared_by(begin)
    yield
    if found is not None and found.family is family:
        shared[id(family)] = found


def _search(lost: list[tuple[Namespace, Family]], shared: dict[int, Chunk], step: int) -> Generator[None, None, None]:
    """The same for families whose newest chunk has gone: look for an end of their chains among all chunks."""
    wanted = {id(family): namespace for namespace, family in lost}
    for namespace in dict.fromkeys(wanted.values()):
        chunks = list(namespace.chunks.values())
        for start in range(0, len(chunks), step):
            for chunk in chunks[start : start + step]:
                family = chunk.family
                if family is None or id(family) not in wanted or id(family) in shared or followers(chunk):
                    continue
                yield from _share(family, chunk, shared)
                if id(family) in shared:
                    family.last = chunk.key
            yield
            if all(each in shared for each in wanted):
                return


def _prefix(index: Index, namespace: Namespace, family: Family, shared: Chunk | None, wall: int) -> Prefix | None:
    """None if no lookup can find any of the family any more."""
    first = namespace.chunks.get(family.key)
    if first is None or shared is None or index.is_hidden(first):
        return None
    tokens = namespace.chunk_tokens
    return Prefix(
        tenant=namespace.tenant,
        model=namespace.model[:MOST_NAME],
        id=family.key.hex(),
        hash=shared.key.hex(),
        shared_tokens=shared.position * tokens,
        tokens=family.chunks * tokens,
        prompts=family.ends,
        bytes=family.bytes,
        hits=family.hits,
        hit_tokens=family.hit_chunks * tokens,
        age_s=float(max(0, wall - first.born)) if first.born else 0.0,
        idle_s=float(max(0, wall - (family.used or first.born or wall))),
    )


def _rank(namespace: Namespace, family: Family, sort: str) -> int:
    """What a family is sorted by, the highest first."""
    match sort:
        case "bytes":
            return family.bytes
        case "tokens":
            return family.chunks * namespace.chunk_tokens
        case "idle":
            return -family.used
    return family.hits
