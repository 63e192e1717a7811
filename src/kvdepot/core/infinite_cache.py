"""The upper bound of what can be found: the tokens that an infinite cache would have, estimated online.

Called by core/usage.py on the deciding thread. It is an estimate and must stay cheap: half a MiB,
and a fraction of a microsecond per chunk looked up.

An infinite cache misses a chunk exactly once, so it has all chunks looked up but those looked up for the first time. A
HyperLogLog sketch (P. Flajolet et al., 2007) of all chunks estimates their number by its growth. Growth is counted as
it happens (HIP; E. Cohen, "All-distances sketches, revisited", 2014): for the few new chunks of a minute, this is far
more accurate than the difference between two estimates of the total. What engines have in their own caches they do not
ask for, so it is subtracted.

A sketch becomes less accurate with the number of chunks seen, and chunks of last year are of no interest. So sketches
rotate: a new one begins each day and is used from its second day on; at least one day is remembered. With ten million
chunks seen, the share among 200,000 chunks is off by about one percentage point.

Sketches come from `datasketches` (Apache), which the default install has; without it there is no upper bound, and
nothing else changes. Rejected: `datasketch` and `hyperloglog`, pure Python, more than a microsecond per chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvdepot.protocol.keys import HASH_BYTES

__all__ = ["InfiniteCache"]

_DAY_S = 86400.0
_LOG_REGISTERS = 18
_ALL = 1 << 16
"""The sketches get all of the first chunks up to this number, and then one in _SAMPLED: a prompt of 128k tokens has 512
chunks, and its lookup must not wait for a thousand updates."""
_SAMPLED = 8
_BATCH = 1024
"""Chunks passed to the sketches at a time."""


class InfiniteCache:
    """Counts the tokens of looked-up chunks, and estimates how many of them are looked up for the first time."""

    def __init__(self, now: float) -> None:
        """now: seconds of any clock, the same as for `tick`."""
        self._waiting: dict[int, list[bytes]] = {}  # by tokens per chunk
        self._waiting_chunks = 0
        self._chunks = 0  # passed to the sketches, or skipped by sampling
        self._tokens = 0  # of these
        self._new = 0.0  # of these, estimated tokens of new chunks
        self._own = 0  # in engines' own caches
        self._bound = 0  # what was last returned
        self._day_began = now
        self._sketch = _sketch()  # the one in use
        self._next = _sketch()  # in use after the next rotation
        self._seen = 0.0  # the estimate of `_sketch`

    def __repr__(self) -> str:
        return f"<InfiniteCache {self._tokens} tokens, {self._new:.0f} new>"

    def count(self, hashes: bytes, chunk_tokens: int) -> None:
        """Count the chunks of a lookup (hashes of 32 bytes each), of so many tokens each."""
        if self._sketch is None:
            return
        self._waiting.setdefault(chunk_tokens, []).append(hashes)
        self._waiting_chunks += len(hashes) // HASH_BYTES
        if self._waiting_chunks >= _BATCH:
            self._tell()

    def subtract(self, tokens: int) -> None:
        """So many tokens were in an engine's own cache; the caller checks that lookups named so many."""
        self._own += tokens

    def bound(self, found: int) -> int | None:
        """Tokens beyond engines' own caches that an infinite cache would have had; it never falls.

        found: what the depot had of them; being an estimate, the bound may come out slightly below. None without
        `datasketches`.
        """
        if self._sketch is None:
            return None
        self._tell()
        self._bound = max(self._bound, found, round(self._tokens - self._new) - self._own)
        return self._bound

    def _tell(self) -> None:
        for chunk_tokens, waiting in self._waiting.items():
            self._tell_of(b"".join(waiting), chunk_tokens)
        self._waiting.clear()
        self._waiting_chunks = 0

    def _tell_of(self, hashes: bytes, chunk_tokens: int) -> None:
        # Hashes are uniform, so any eight of their bytes suffice for a sketch. Signed, because `update` would take
        # integers from 2**63 up for floating-point numbers.
        words = np.frombuffer(hashes, np.int64)[:: HASH_BYTES // 8]
        # Sampling is by hash, so that a chunk is always sampled or never.
        told = words if self._chunks < _ALL else words[words % _SAMPLED == 0]
        some = told.tolist()
        for update in (self._sketch.update, self._next.update):
            for word in some:
                update(word)
        self._chunks += len(words)
        self._tokens += len(words) * chunk_tokens
        seen = self._sketch.get_estimate()
        if some:
            self._new += (seen - self._seen) * len(words) / len(some) * chunk_tokens
        self._seen = seen

    def tick(self, now: float) -> None:
        """Called once a second: rotates the sketches after a day."""
        if self._sketch is None:
            return
        self._tell()
        if now - self._day_began >= _DAY_S:
            self._day_began = now
            self._sketch, self._next = self._next, _sketch()
            self._seen = self._sketch.get_estimate()


def _sketch() -> Any:
    """An empty sketch; None if the library is not installed."""
    try:
        import datasketches  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return None
    return datasketches.hll_sketch(_LOG_REGISTERS, datasketches.tgt_hll_type.HLL_8)
