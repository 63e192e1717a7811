"""The infinite-cache hit rate: what an infinite cache would have hit, estimated online.

Called by core/depot.py and core/sessions.py on the deciding thread. It is an estimate and must stay cheap: half a MiB,
and a fraction of a microsecond per chunk looked up.

An infinite cache misses a chunk exactly once, so its misses in a window are the chunks looked up for the first time. A
HyperLogLog sketch (P. Flajolet et al., 2007) of all chunks estimates their number by its growth. Growth is counted as
it happens (HIP; E. Cohen, "All-distances sketches, revisited", 2014): for the few new chunks of a minute, this is far
more accurate than the difference between two estimates of the total.

A sketch becomes less accurate with the number of chunks seen, and chunks of last year are of no interest. So sketches
rotate: a new one begins each day and is used from its second day on; at least one day is remembered. With ten million
chunks seen, the rate of a window of 200,000 is off by about one percentage point.

Sketches come from `datasketches` (Apache), which the default install has; without it there is no such rate, and nothing
else changes. Rejected: `datasketch` and `hyperloglog`, pure Python, more than a microsecond per chunk.
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
"""Marks per window. A window begins at a mark."""
_ALL = 1 << 16
"""The sketches get all of the first chunks up to this number, and then one in _SAMPLED: a prompt of 128k tokens has 512
chunks, and its lookup must not wait for a thousand updates."""
_SAMPLED = 8
_BATCH = 1024
"""Chunks passed to the sketches at a time."""


class InfiniteCache:
    """Counts looked-up chunks, and estimates how many of them are looked up for the first time."""

    def __init__(self, now: float) -> None:
        """now: seconds of any clock, the same as for `tick`."""
        self._waiting: list[bytes] = []
        self._waiting_chunks = 0
        self._chunks = 0  # passed to the sketches, or skipped by sampling
        self._new = 0.0  # estimated number of new ones among them
        self._marks = [
            deque([(now, 0, 0.0, 0)]) for _ in WINDOWS_S
        ]  # (when, chunks, new, hits); the first one begins the window
        self._day_began = now
        self._sketch = _sketch()  # the one in use
        self._next = _sketch()  # in use after the next rotation
        self._seen = 0.0  # the estimate of `_sketch`

    def __repr__(self) -> str:
        return f"<Ceiling {self._chunks} chunks, {self._new:.0f} new>"

    def count(self, hashes: bytes) -> None:
        """Count the chunks of a lookup (hashes of 32 bytes each)."""
        if self._sketch is None:
            return
        self._waiting.append(hashes)
        self._waiting_chunks += len(hashes) // HASH_BYTES
        if self._waiting_chunks >= _BATCH:
            self._tell()

    def _tell(self) -> None:
        if not self._waiting:
            return
        # Hashes are uniform, so any eight of their bytes suffice for a sketch. Signed, because `update` would take
        # integers from 2**63 up for floating-point numbers.
        words = np.frombuffer(b"".join(self._waiting), np.int64)[:: HASH_BYTES // 8]
        self._waiting.clear()
        self._waiting_chunks = 0
        # Sampling is by hash, so that a chunk is always sampled or never.
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
        """Advance the windows, and rotate the sketches after a day. hits: chunks that hit since the start."""
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
        """For each window: its length (s), the chunks looked up, the hit rate, and the infinite-cache hit rate.

        hits: chunks that hit since the start. A window is up to a twelfth too long, or begins at the start. The list
        is empty without `datasketches`.
        """
        if self._sketch is None:
            return []
        self._tell()
        rates = []
        for window_s, marks in zip(WINDOWS_S, self._marks, strict=True):
            _, chunks, new, before = marks[0]
            chunks, new = self._chunks - chunks, self._new - new
            rate = (hits - before) / chunks if chunks else 0.0
            # Being an estimate, it may come out slightly below the real hit rate.
            ceiling = min(max(1 - new / chunks, rate), 1.0) if chunks else 0.0
            rates.append((window_s, chunks, rate, ceiling))
        return rates


def _sketch() -> Any:
    """An empty sketch; None if the library is not installed."""
    try:
        import datasketches  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return None
    return datasketches.hll_sketch(_LOG_REGISTERS, datasketches.tgt_hll_type.HLL_8)
