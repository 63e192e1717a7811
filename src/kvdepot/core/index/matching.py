"""Finds the prefix of a prompt that memory has, and the store in progress that would make it longer. Queries only.

A KV cache group's reach is the number of its chunks before a boundary that the engine needs to resume there. It is all
(full attention), the last n (a sliding window, or a local chunk), or one (a state). A prefix ends at a boundary for
which every KV cache group has what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvdepot.core.index import states
from kvdepot.core.index.chunk import Chunk, Namespace, Pin, is_forgotten, is_hidden, is_there
from kvdepot.core.index.namespaces import Namespaces
from kvdepot.core.index.runs import is_free_to_write
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES

G = TypeVar("G")


class Match(NamedTuple):
    """The longest prefix of a prompt. namespaces: the first groups of its model's namespaces. pins: the prefix in each
    of them. chunks: the number of whole chunks that all have. tail: the place in the lookup's `tails` of the tail
    behind them; None: no tail."""

    namespaces: list[Namespace]
    pins: list[Pin]
    chunks: int
    tail: int | None = None

    def tail_key(self, tails: Sequence[wire.Tail]) -> bytes:
        """The key of the match's tail, or empty if it has none. tails: the tails of the lookup."""
        return b"" if self.tail is None else tails[self.tail].key


def match_prompt(
    known: Namespaces,
    tenant: str,
    request: wire.Lookup | wire.TakeLease,
    hashes: bytes,
    tails: Sequence[wire.Tail] = (),
) -> Match:
    """The longest prefix of `hashes` (32 bytes per chunk), with one of `tails` if possible, that all of the model's
    namespaces have."""
    namespaces = for_lookup(
        known, (tenant, request.model, request.world_size), request.blocks_in_chunk, request.chunk_tokens
    )
    if any(each.is_quarantined for each in namespaces):
        return Match([], [], 0)
    pins = [match(namespace, hashes) for namespace in namespaces]
    matched = min((pin.matched for pin in pins), default=0)
    while any(pin.matched != matched for pin in pins):
        # Engines with one model name but different layouts: only what every namespace has is certainly a hit.
        pins = [match(namespace, hashes[: matched * HASH_BYTES]) for namespace in namespaces]
        matched = min(pin.matched for pin in pins)
    for number, (chunks, key) in enumerate((tail.chunks, tail.key) for tail in tails):
        if chunks < matched or not namespaces:
            break
        if all(key in namespace.chunks for namespace in namespaces):
            longer = [match(namespace, hashes[: chunks * HASH_BYTES] + key) for namespace in namespaces]
            if all(pin.matched > chunks for pin in longer):
                return Match(namespaces, longer, chunks, number)
    return Match(namespaces, pins, matched)


def for_lookup(
    known: Namespaces, model: tuple[str, str, int], blocks_in_chunk: int = 0, chunk_tokens: int = 0
) -> list[Namespace]:
    """The namespaces that a lookup, which names no layout, may mean: those of registered engines, else the newest one.

    model: tenant, name, and number of ranks. A model with several KV cache groups gives its first group's namespace.
    """
    namespaces = [
        namespace
        for namespace in known.known.get(model, ())
        if (not blocks_in_chunk or namespace.blocks_in_chunk == blocks_in_chunk)
        and (not chunk_tokens or namespace.chunk_tokens == chunk_tokens)
    ]
    return [namespace for namespace in namespaces if namespace.live] or namespaces[-1:]


def match(namespace: Namespace, hashes: bytes) -> Pin:
    """The longest prefix of `hashes` (32 bytes per chunk) that can be resumed. namespace: the model's first group."""
    if namespace.is_simple:
        return _chain(namespace, hashes)
    groups, end = namespace.groups, len(hashes) // HASH_BYTES
    for group in groups:
        if not group.reach:
            end = _chain(group, hashes[: end * HASH_BYTES]).matched
    bounded = [(group, group.reach) for group in groups if group.reach]
    end = deepest_boundary(
        bounded, end, lambda group, i: (part := _part(group, hashes, i)) is not None and is_there(part)
    )
    found: list[Chunk] = []
    parts = 0
    for group in groups:
        needed = needed_parts(group.reach, end)
        parts += len(needed)
        if group.reach:
            found += [group.chunks[hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]] for i in needed]
        else:
            found += _chain(group, hashes[: end * HASH_BYTES]).chunks
    return Pin(found, end, parts)


def stored_by(match: Match, keys: bytes, withdrawals: int) -> tuple[wire.WriterRun, ...]:
    """The writers of a match's chunks, from the prompt's start on. keys: the chunks' keys, and that of the tail.

    withdrawals: the count of `Namespaces`; until it changes, no shard of a match gets another writer.
    """
    groups = [group for namespace in match.namespaces for group in namespace.groups]
    found: list[list[wire.WriterRun]] = []
    at = len(keys) // HASH_BYTES
    while at:
        end, writers, known = at, _writers(parts := _parts(groups, keys, at - 1)), 0
        while at and not known and _writers(others := _parts(groups, keys, at - 1)) == writers:
            known = others[0].run if len(groups) == len(others) == 1 and others[0].run_as_of == withdrawals else 0
            at -= known or 1
        for part in parts:
            part.run, part.run_as_of = end - at, withdrawals
        found.append([wire.WriterRun(end, writer) for writer in sorted(writers)])
    runs: list[wire.WriterRun] = []
    for run in reversed(found):
        if len(runs) + len(run) > wire.MAX_WRITER_RUNS:
            break
        runs += run
    return tuple(runs)


def _parts(groups: Sequence[Namespace], keys: bytes, i: int) -> list[Chunk]:
    return [part for group in groups if (part := _part(group, keys, i)) is not None]


def _writers(parts: Sequence[Chunk]) -> set[str]:
    return {shard.writer for part in parts for shard in part.shards.values()}


def _part(namespace: Namespace, hashes: bytes, i: int) -> Chunk | None:
    return namespace.chunks.get(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES])


def _chain(namespace: Namespace, hashes: bytes) -> Pin:
    """The longest prefix of `hashes` in an unbounded group: its chain by bisection, then loose chunks one by one."""
    chunks = namespace.chunks
    low, high = 0, len(hashes) // HASH_BYTES
    total = high
    deepest: Chunk | None = None
    probe = high  # a hit of the whole prompt is the common case, so try the last chunk first
    while low < high:
        chunk = chunks.get(hashes[(probe - 1) * HASH_BYTES : probe * HASH_BYTES])
        if chunk is not None and chunk.state is states.CHAINED and chunk.position == probe:
            low, deepest = probe, chunk
        else:
            high = probe - 1
        probe = (low + high + 1) // 2
    if deepest is not None and (namespace.broken or namespace.hiding):
        low, deepest = _unbroken(deepest)
    loose: list[Chunk] = []
    while low < total:
        chunk = chunks.get(hashes[low * HASH_BYTES : (low + 1) * HASH_BYTES])
        if chunk is None or not is_there(chunk):
            break
        low += 1
        loose.append(chunk)
    return Pin(loose if deepest is None else [deepest, *loose], low, low)


def _unbroken(deepest: Chunk) -> tuple[int, Chunk | None]:
    """The part of a chain before its first gap: its length and its last chunk. O(depth)."""
    found: Chunk | None = deepest
    chunk: Chunk | None = deepest
    while chunk is not None:
        if chunk.state is not states.CHAINED or is_forgotten(chunk):
            found = chunk.parent
        chunk = chunk.parent
    return (0, None) if found is None else (found.depth, found)


def find(namespace: Namespace, rank: int, hashes: bytes) -> list[Chunk | None]:
    """The chunk of each of `hashes` (32 bytes each) if this rank's shard of it is sealed and may be used."""
    found: list[Chunk | None] = []
    for start in range(0, len(hashes), HASH_BYTES):
        chunk = namespace.chunks.get(hashes[start : start + HASH_BYTES])
        shard = chunk.shards.get(rank) if chunk is not None else None
        is_usable = chunk is not None and shard is not None and shard.state is states.SEALED and not is_forgotten(chunk)
        found.append(chunk if is_usable else None)
    return found


def is_missing(namespace: Namespace, rank: int, key: bytes) -> bool:
    """Whether this rank's shard can be reserved: it does not exist, or is corrupt and nothing holds its bytes.

    A chunk that a removal in progress hides counts as gone if nothing holds it: reserving it first removes it.
    """
    chunk = namespace.chunks.get(key)
    shard = chunk.shards.get(rank) if chunk is not None else None
    if chunk is None or shard is None:
        return True
    if is_forgotten(chunk):
        return not shard.is_open and not chunk.holds
    return shard.state is states.CORRUPT and is_free_to_write(chunk)


# -- boundaries


def deepest_boundary(bounded: Sequence[tuple[G, int]], end: int, has: Callable[[G, int], bool]) -> int:
    """The largest boundary d <= `end` for which each bounded group has the parts of its last `reach` chunks before d.

    bounded: groups with their reaches. has(group, i): whether the group has its part of chunk i, counted from 0.
    """
    agreed = 0  # groups in a row that have what the boundary needs
    number = 0
    while end and agreed < len(bounded):
        group, reach = bounded[number]
        at, agreed = end, agreed + 1
        while at > max(0, end - reach):
            at -= 1
            if not has(group, at):
                end, agreed = at, 1  # every boundary whose window contains this chunk lacks it
        number = (number + 1) % len(bounded)
    return end


def needed_parts(reach: int, end: int) -> range:
    """The places of the chunks whose parts a group needs at the boundary `end`. reach, end: in chunks."""
    return range(max(0, end - reach) if reach else 0, end)


# -- stores in progress


def coming_part(namespace: Namespace, hashes: bytes, matched: int) -> Chunk | None:
    """A part being stored that can make the prefix of `hashes` longer than `matched` chunks, or None."""
    end = len(hashes) // HASH_BYTES
    if namespace.is_simple:
        chunk = _part(namespace, hashes, matched)
        return chunk if chunk is not None and _is_coming(chunk) else None
    groups = namespace.groups

    def can_be_had(group: Namespace, i: int) -> bool:
        chunk = _part(group, hashes, i)
        return chunk is not None and (is_there(chunk) or _is_coming(chunk))

    boundary = matched
    unbounded = [group for group in groups if not group.reach]
    while boundary < end and all(can_be_had(group, boundary) for group in unbounded):
        boundary += 1
    bounded = [(group, group.reach) for group in groups if group.reach]
    boundary = deepest_boundary(bounded, boundary, can_be_had)
    if boundary <= matched:
        return None
    for group in groups:
        for i in needed_parts(group.reach, boundary) if group.reach else range(matched, boundary):
            chunk = _part(group, hashes, i)
            if chunk is not None and not is_there(chunk):
                return chunk
    return None


def coming_tail(namespace: Namespace, tails: Sequence[wire.Tail], match: Match) -> Chunk | None:
    """A part of a tail behind `match` that is being stored, or None."""
    for tail in tails[: match.tail]:
        parts = [group.chunks.get(tail.key) for group in namespace.groups if tail.chunks >= match.chunks]
        coming = [part for part in parts if part is not None and not is_there(part) and _is_coming(part)]
        if coming:
            return coming[0]
    return None


def _is_coming(chunk: Chunk) -> bool:
    """Whether a store is writing a shard of a chunk, and a lookup may find the chunk after that."""
    return chunk.is_being_stored and not is_hidden(chunk)
