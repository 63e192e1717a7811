"""The upper bound of what can be found: the tokens that an infinite cache would have, estimated online.

Called by core/usage.py on the deciding thread. It takes half a MiB and the lookups of a second,
and a fraction of a microsecond per chunk.

An infinite cache misses a chunk exactly once, so it has every chunk of a prompt but those that are looked up for the
first time. Their number is the growth of a HyperLogLog sketch (P. Flajolet et al., 2007) of all chunks, counted as it
happens (HIP; E. Cohen, "All-distances sketches, revisited", 2014). Sketches rotate, because they become less accurate
with the number of chunks: a new one begins each day and is used from its second day on. With ten million chunks seen,
the share among 200,000 chunks is off by about one percentage point. Without `datasketches` there is no upper bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot.protocol.keys import HASH_BYTES

Words = npt.NDArray[np.int64]
"""Eight bytes of the hash of each chunk of a prompt. Hashes are uniform, so these suffice for a sketch."""

_DAY_S = 86400.0
_LOG_REGISTERS = 18
_ALL = 1 << 16
"""The sketches get all of the first chunks up to this number, and then one in _SAMPLED: a prompt of 128k tokens has 512
to 8,192 chunks, and its lookup must not wait for as many updates."""
_SAMPLED = 8
_DUE = 1 << 14
"""The sketches get chunks once a second, or when this many wait: no answer waits for its own chunks, and no request
longer than some 2 ms for those of others."""
_UNREPORTED = 1 << 20
"""Most chunks of one client whose reports have not come, 8 MiB; the oldest lookups beyond that do not count."""
_MOST_LOOKUPS = 1 << 13
"""Most of its lookups: each costs some hundred bytes beside its chunks."""


def words(hashes: bytes) -> Words:
    """The words of a prompt's chunk hashes (32 bytes each)."""
    # Signed, because `update` would take integers from 2**63 up for floating-point numbers.
    return np.frombuffer(hashes, np.int64)[:: HASH_BYTES // 8].copy()


class Unreported:
    """The latest lookup of each request of one client until the client reports what the request lacked."""

    def __init__(self) -> None:
        self._lookups: dict[str, tuple[Words, int]] = {}  # chunks, tokens per chunk; the oldest lookup first
        self._chunks = 0

    def __repr__(self) -> str:
        return f"<Unreported {self._chunks} chunks>"

    def __len__(self) -> int:
        return len(self._lookups)

    def add(self, request: str, chunks: Words, chunk_tokens: int) -> None:
        """Keep a lookup; it replaces the request's older one."""
        self.pop(request)
        self._lookups[request] = chunks, chunk_tokens
        self._chunks += len(chunks)
        while self._chunks > _UNREPORTED or len(self._lookups) > _MOST_LOOKUPS:
            self.pop(next(iter(self._lookups)))

    def pop(self, request: str) -> tuple[Words, int] | None:
        """Remove and return the request's lookup: its chunks, and the tokens per chunk."""
        lookup = self._lookups.pop(request, None)
        if lookup is not None:
            self._chunks -= len(lookup[0])
        return lookup


class InfiniteCache:
    """Estimates how many tokens of looked-up prompts an infinite cache would have had beyond what was found."""

    def __init__(self, now: float) -> None:
        """now: seconds of any clock, the same as for `tick`."""
        self._chunks = 0  # counted so far
        self._missed = 0.0  # estimated tokens; an estimate, so it may fall
        self._most = 0  # its maximum
        self._day_began = now
        self._due: list[tuple[Words, int, int]] = []  # what `count` was given, and the sketches were not yet
        self._due_chunks = 0
        self._sketch = _sketch()  # the one in use
        self._next = _sketch()  # in use after the next rotation

    def __repr__(self) -> str:
        return f"<InfiniteCache {self._chunks} chunks, {self._missed:.0f} tokens missed>"

    @property
    def missed(self) -> int | None:
        """Tokens that were not found although an infinite cache would have had them; never falls.

        None without `datasketches`.
        """
        self._count_due()
        return None if self._sketch is None else self._most

    def count(self, chunks: Words, chunk_tokens: int, held: int) -> None:
        """Count the chunks of a prompt that was looked up.

        chunk_tokens: tokens per chunk. held: tokens of the prefix that the engine or the depot had.
        """
        if self._sketch is None:
            return
        self._due.append((chunks, chunk_tokens, held))
        self._due_chunks += len(chunks)
        if self._due_chunks > _DUE:
            self._count_due()

    def _count_due(self) -> None:
        for each in self._due:
            self._count(*each)
        self._due.clear()
        self._due_chunks = 0

    def _count(self, chunks: Words, chunk_tokens: int, held: int) -> None:
        whole, part = divmod(min(held, len(chunks) * chunk_tokens), chunk_tokens)
        step = 1 if self._chunks < _ALL else _SAMPLED
        self._chunks += len(chunks)
        self._add(chunks[:whole], step)
        if whole == len(chunks):
            return
        if part:
            self._missed += (chunk_tokens - part) * self._add_missed(chunks[whole : whole + 1], step)
            whole += 1
        self._missed += chunk_tokens * self._add_missed(chunks[whole:], step)
        self._most = max(self._most, round(self._missed))

    def _add(self, chunks: Words, step: int) -> int:
        """Add one in `step` chunks to the sketches; returns how many that are."""
        # Sampling is by hash, so that a chunk is always sampled or never.
        some = (chunks if step == 1 else chunks[chunks % step == 0]).tolist()
        for update in (self._sketch.update, self._next.update):
            for word in some:
                update(word)
        return len(some)

    def _add_missed(self, chunks: Words, step: int) -> float:
        """Add chunks that were not found; returns about how many of them were in the sketches before."""
        before = self._sketch.get_estimate()
        added = self._add(chunks, step)
        return float(step * (added - (self._sketch.get_estimate() - before)))

    def tick(self, now: float) -> None:
        """Called once a second: counts what is due, and rotates the sketches after a day."""
        self._count_due()
        if self._sketch is not None and now - self._day_began >= _DAY_S:
            self._day_began = now
            self._sketch, self._next = self._next, _sketch()


def _sketch() -> Any:
    """An empty sketch; None if the library is not installed."""
    try:
        import datasketches  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return None
    return datasketches.hll_sketch(_LOG_REGISTERS, datasketches.tgt_hll_type.HLL_8)
