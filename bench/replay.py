"""Traces of requests replayed through the server's own index and eviction policies, and an upper bound on the hits.

    python bench/replay.py TRACE [CAPACITY ...]

prints hit rates by capacity (blocks of the trace). A trace has one request per line: `timestamp` and `hash_ids`, the
ids of its prompt's blocks, in one of two formats; gzip is read, too.

| format | a line has also | block |
|---|---|---|
| Mooncake | `timestamp` in ms | 512 tokens |
| Bailian | `chat_id`, `timestamp` in s | 16 tokens |

Invariant: two blocks are the same exactly if they and all before them in their prompts are the same, like chunks in the
index. So a block is identified by its id *and* its predecessor. That makes no difference in Mooncake's format, whose
ids depend on the whole prefix; in Bailian's, the same text behind two different beginnings is two blocks, as it is for
an engine. Traces do not contain generated tokens until a later prompt includes them.
"""

from __future__ import annotations

import gzip
import heapq
import sys
import zlib
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvdepot.core.index import matching
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Run
from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol.keys import HASH_BYTES, ROOT
from kvdepot.protocol.wire import Group
from kvdepot.values import fault_of

Request: TypeAlias = tuple[float, Sequence[Hashable]]
"""When it arrived (s), and the ids of its prompt's blocks."""

MOONCAKE_TOKENS = 512
BAILIAN_TOKENS = 16
BOUND = "belady"
"""The name of the upper bound, beside those of policies."""
_ROOT = -1
_PARTS = 64, 16, 4, 2, 1
"""The capacities that are replayed unless others are given: all blocks of the trace, divided by these."""


class Trace:
    """Requests in order of arrival; blocks are numbered from 0, each after the one before it in its prompts."""

    def __init__(self, requests: Iterable[Request], name: str = "") -> None:
        numbers: dict[tuple[int, Hashable], int] = {}
        blocks, ends, times = array("I"), array("q"), array("d")
        for time, ids in requests:
            before = _ROOT
            for block_id in ids:
                before = numbers.setdefault((before, block_id), len(numbers))
                blocks.append(before)
            ends.append(len(blocks))
            times.append(time)
        self.name = name
        self.block_tokens = 0
        """Tokens per block; 0 = not known."""
        self.unique = len(numbers)
        self.blocks: npt.NDArray[np.uint32] = np.array(blocks, np.uint32)
        """uint32[references]: the blocks of all requests, concatenated."""
        self.ends: npt.NDArray[np.int64] = np.array(ends, np.int64)
        """int64[requests]: where each request ends in `blocks`."""
        if (np.diff(times) < 0).any():
            found, order = list(self), np.argsort(times, kind="stable")
            self.blocks = np.concatenate([found[i] for i in order])
            self.ends = np.cumsum([len(found[i]) for i in order])

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[npt.NDArray[np.uint32]]:
        start = 0
        for end in self.ends.tolist():
            yield self.blocks[start:end]
            start = end


class _Entry(msgspec.Struct, gc=False):
    """A line of either format."""

    timestamp: float
    hash_ids: list[int | str]
    chat_id: int | str | None = None


def load(path: str) -> Trace:
    """Read a trace from a file. Raises ConfigError, with file and line, if it cannot be read."""
    sizes: set[int] = set()
    trace = Trace(_requests(Path(path), sizes), path)
    trace.block_tokens = max(sizes, default=0)
    return trace


def _requests(file: Path, sizes: set[int]) -> Iterator[Request]:
    """All requests. sizes: gets the tokens per block."""
    decoder = msgspec.json.Decoder(_Entry)
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, 1):
                if line.isspace():
                    continue
                try:
                    entry = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                    raise ConfigError(f"{file}:{number}: {fault_of(exc)}") from exc
                is_bailian = entry.chat_id is not None
                sizes.add(BAILIAN_TOKENS if is_bailian else MOONCAKE_TOKENS)
                if len(sizes) > 1:
                    raise ConfigError(f"{file}:{number}: a line with chat_id among lines without, or the other way")
                yield entry.timestamp if is_bailian else entry.timestamp / 1000, entry.hash_ids
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigError(f"{file}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc


def _open(file: Path) -> IO[bytes]:
    stream = file.open("rb")
    if stream.peek(2)[:2] != b"\x1f\x8b":
        return stream
    stream.close()
    return gzip.open(file)  # type: ignore[return-value]  # it reads lines like any file


def belady(trace: Trace, capacity_blocks: int) -> int:
    """The maximum hits of a cache of `capacity_blocks` blocks, given the whole trace in advance.

    This is Belady's MIN with bypass (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer",
    1966), reference by reference: of the cached blocks and the new one, it evicts the one whose next use is furthest
    away, and never stores a block without a next use.

    Why no policy exceeds it: whatever a policy stores and evicts for a request could as well happen reference by
    reference, because a request's hits precede its misses; and MIN has the most hits of all such policies. Policies are
    further limited, because they evict only when a request arrives, and pin its hits.

    Why it counts whole prefixes: a block's predecessor in its prompts is always used again earlier than the block
    itself, so MIN never keeps a block longer than its predecessor.
    """
    blocks = trace.blocks
    count = len(blocks)
    following = np.full(count, count, np.int64)  # where each reference's block is used next; `count`: nowhere
    order = np.argsort(blocks, kind="stable")
    again = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][again]] = order[1:][again]

    names = blocks.tolist()
    cached = bytearray(trace.unique)
    furthest: list[int] = []  # -(next use) of cached blocks; entries of past uses sink and never reach the top
    room = capacity_blocks
    hits = 0
    for block, use in zip(names, following.tolist(), strict=True):
        hits += cached[block]
        if use == count:
            room += cached[block]
            cached[block] = 0
        elif cached[block]:
            heapq.heappush(furthest, -use)
        elif room:
            room -= 1
            cached[block] = 1
            heapq.heappush(furthest, -use)
        elif -furthest[0] > use:
            cached[names[-heapq.heapreplace(furthest, -use)]] = 0
            cached[block] = 1
    return hits


@dataclass(frozen=True)
class Result:
    """The hits of one policy, or of the bound, at one capacity."""

    references: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """Hits divided by block references; 0 if there are none."""
        return self.hits / self.references if self.references else 0.0


def replay(trace: Trace, policy: str, capacity_blocks: int) -> Result:
    """Send requests through an index of `capacity_blocks` blocks that evicts by `policy`, or compute the bound.

    policy: a name in eviction.POLICIES, or BOUND.
    """
    if policy == BOUND:
        return Result(len(trace.blocks), belady(trace, capacity_blocks))
    return Result(len(trace.blocks), _hits(trace, Index(Allocator(0, capacity_blocks * PAGE), POLICIES[policy])))


def _hits(trace: Trace, index: Index) -> int:
    """The hits of all requests, each a lookup and a store, as an engine makes them.

    The longest cached prefix of its blocks is a hit and is pinned; the rest is reserved, evicting by the policy, and
    sealed in order; then the pins are released. A block that finds no room is dropped with all behind it. Requests do
    not overlap. A block is one page of an allocator without memory behind it, so the capacity is an exact number.
    """
    (namespace,) = index.namespaces.find_groups("trace", 1, 0, [Group(0, 1, 0, b"")])
    # Keys like those of real chunks, because a policy may tell them apart by 32 bits of a hash.
    noise = blake3(b"kvdepot simulate").digest(length=HASH_BYTES * max(trace.unique, 1))
    keys = np.frombuffer(noise, np.uint64).reshape(-1, HASH_BYTES // 8)
    hits = 0
    for blocks in trace:
        hashes = keys[blocks].tobytes()
        pin = matching.match(namespace, hashes)
        index.hold(pin.chunks)
        index.use(pin.chunks)
        hits += pin.matched
        start = pin.matched * HASH_BYTES
        parent = hashes[start - HASH_BYTES : start] if start else ROOT
        run = Run(hashes[start:], PAGE, parent, pin.matched + 1)
        for chunk in index.reserve(namespace, 0, run, 0).chunks:
            index.seal(chunk, 0)
        index.release(pin.chunks)
        index.events.clear()
    return hits


def main(words: Sequence[str]) -> int:
    """Print the hit rates of a trace; returns the exit code."""
    if not words or not all(word.isdecimal() and int(word) for word in words[1:]):
        print("usage: python bench/replay.py TRACE [CAPACITY ...]", file=sys.stderr)
        return 2
    try:
        trace = load(words[0])
    except ConfigError as exc:
        print(f"replay: {exc}", file=sys.stderr)
        return 2
    names = [*POLICIES, BOUND]
    most = (len(trace.blocks) - trace.unique) / max(1, len(trace.blocks))
    blocks = f"{trace.unique:,} blocks of {trace.block_tokens} tokens"
    print(
        f"{len(trace):,} requests, {len(trace.blocks):,} references to {blocks}; an infinite cache would hit {most:.1%}"
    )
    print("".join(f"{head:>12}" for head in ("blocks", *names)))
    for capacity in map(int, words[1:]) if words[1:] else sorted({max(1, trace.unique // part) for part in _PARTS}):
        print(f"{capacity:>12,}" + "".join(f"{replay(trace, name, capacity).hit_rate:>12.1%}" for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
