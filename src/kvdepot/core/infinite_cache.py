"""What an infinite cache would have hit: the online upper bound beside a server's own hit rate.

Called by core/depot.py on the deciding thread. The one law: it may be off by a little, it may not cost much: half a
MiB, and a fraction of a microsecond a chunk that is looked up.

An infinite cache misses a chunk exactly once, so in any window its misses are the chunks that are looked up for the
first time. How many those are says a HyperLogLog sketch (P. Flajolet et al., 2007) that is told of every chunk: as many
as its count grew by. Growth is counted as it happens (HIP; E. Cohen, "All-distances sketches, revisited", 2014), which
is far nearer for the little that is new in a minute than the difference of two estimates of everything.

A sketch gets coarser the more it has seen, and who asks for the ceiling has no use for a cache that remembers last
year. So sketches take turns: one begins each day and counts from its second day on; what is remembered is at least a
day. With ten million chunks seen, the ceiling of a window of 200,000 is off by about a point.

Sketches come from `datasketches` (Apache), the extra `ceiling`; without it there is no ceiling and nothing else
changes. Rejected: `datasketch` and `hyperloglog`, pure Python, more than a microsecond a chunk.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from kvdepot.protocol.keys import HASH_BYTES

__all__ = ["WINDOWS_S", "InfiniteCache"]

WINDOWS_S = (60.0, 600.0, 3600.0, 86400.0)
_DAY_S = 86400.0
_LOG_REGISTERS = 18
_STEPS = 12
"""Marks in a window: it begins at one of them."""
_ALL = 1 << 16
"""So many chunks are all told to the sketches, of those that follow one in _SAMPLED: a prompt of 128k tokens has 512
chunks, and a lookup of it must not wait for a thousand updates."""
_SAMPLED = 8
_BATCH = 1024
"""Chunks that are told to the sketches together."""


class InfiniteCache:
    """Counts chunks of lookups, and which of them are looked up for the first time."""

    def __init__(self, now: float) -> None:
        """now: as in `tick`, in seconds of any clock."""
        self._waiting: list[bytes] = []
        self._waiting_chunks = 0
        self._chunks = 0  # told to the sketches
        self._new = 0.0  # of them, those that were new
        self._marks = [
            deque([(now, 0, 0.0, 0)]) for _ in WINDOWS_S
        ]  # (when, chunks, new, hits), first: where it begins
        self._day_began = now
        self._sketch = _sketch()  # the one that counts
        self._next = _sketch()
        self._seen = 0.0  # what `_sketch` estimates

    def __repr__(self) -> str:
        return f"<Ceiling {self._chunks} chunks, {self._new:.0f} new>"

    def count(self, hashes: bytes) -> None:
        """A lookup asks for these chunks (32 bytes each)."""
        if self._sketch is None:
            return
        self._waiting.append(hashes)
        self._waiting_chunks += len(hashes) // HASH_BYTES
        if self._waiting_chunks >= _BATCH:
            self._tell()

    def _tell(self) -> None:
        if not self._waiting:
            return
        # Hashes are evenly spread: any eight of their bytes say as much as a sketch can take in. Signed: what lies
        # above 2**63 would be taken for a floating-point number.
        words = np.frombuffer(b"".join(self._waiting), np.int64)[:: HASH_BYTES // 8]
        self._waiting.clear()
        self._waiting_chunks = 0
        # Once there are many, one hash in so many stands for all: always the same ones.
        told = words if self._chunks < _ALL else words[words % _SAMPLED == 0]
        some = told.tolist()
        for update in (self._sketch.update, self._next.update):
            for word in some:
                update(word)
        self._chunks += len(words)
        seen = self._sketch.get_estimate()
        if some:
            self._new += (seen - self._seen) * len(words) / len(some)
        self._seen = seen

    def tick(self, now: float, hits: int = 0) -> None:
        """Let time pass: windows move on, and after a day a sketch retires. hits: chunks that hit since the start."""
        if self._sketch is None:
            return
        self._tell()
        for window_s, marks in zip(WINDOWS_S, self._marks, strict=True):
            if now - marks[-1][0] >= window_s / _STEPS:
                marks.append((now, self._chunks, self._new, hits))
            while len(marks) > 1 and now - marks[1][0] >= window_s:
                marks.popleft()
        if now - self._day_began >= _DAY_S:
            self._day_began = now
            self._sketch, self._next = self._next, _sketch()
            self._seen = self._sketch.get_estimate()

    def rates(self, hits: int = 0) -> list[tuple[float, int, float, float]]:
        """For each window: its length (s), the chunks looked up in it, the share that hit, that of an infinite cache.

        hits: chunks that hit since the start.
        A window reaches back its length and up to a twelfth more, or to the start. Empty without `datasketches`.
        """
        if self._sketch is None:
            return []
        self._tell()
        rates = []
        for window_s, marks in zip(WINDOWS_S, self._marks, strict=True):
            _, chunks, new, before = marks[0]
            chunks, new = self._chunks - chunks, self._new - new
            rate = (hits - before) / chunks if chunks else 0.0
            # An estimate: it may come out a little below what did hit.
            ceiling = min(max(1 - new / chunks, rate), 1.0) if chunks else 0.0
            rates.append((window_s, chunks, rate, ceiling))
        return rates


def _sketch() -> Any:
    """An empty sketch; None where the library is missing."""
    try:
        import datasketches  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return None
    return datasketches.hll_sketch(_LOG_REGISTERS, datasketches.tgt_hll_type.HLL_8)
