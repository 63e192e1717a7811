"""What an engine stored, loaded and saved, as one line a minute in which it did.

The connector's scheduler counts, with what its workers report, and asks for the line in every step; an engine without
steps has nothing to tell, and tells the last of it with its next step or its end. No clock: each call says the time.
"""

from __future__ import annotations

from typing import NamedTuple

from kvdepot.client.operation import Operation
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.values import plural

__all__ = ["Minute", "Moved", "moved_by"]

_MINUTE_S = 60.0
_MIB = 1 << 20


class Moved(NamedTuple):
    """What ranks have stored and loaded. Each stores its shard of a chunk, so chunks count once per rank."""

    stored_chunks: int = 0
    stored_bytes: int = 0
    """Stored, or in the depot already."""
    loaded_bytes: int = 0
    dropped_stores: int = 0

    def __add__(self, other: tuple[object, ...]) -> Moved:
        """The sums of both, by field."""
        assert isinstance(other, Moved)
        return Moved(*(one + two for one, two in zip(self, other, strict=True)))


def moved_by(operation: Operation) -> Moved:
    """What a rank's store or retrieve has moved. Its bytes are those of all KV cache groups."""
    if operation.kind == "retrieve":
        return Moved(loaded_bytes=operation.size_bytes)
    is_dropped = operation.done < operation.chunks
    return Moved(len(operation.stored) // HASH_BYTES, operation.size_bytes, dropped_stores=int(is_dropped))


class Minute:
    """The counts since the last line. ranks: all that store each chunk."""

    def __init__(self, chunk_tokens: int, ranks: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._ranks = ranks
        self._begin()

    def _begin(self) -> None:
        self._since: float | None = None  # when counting began: the first step after the last line
        self._requests = self._loaded_tokens = self._failed = self._refused = 0
        self._saved_s = 0.0
        self._moved = Moved()

    def __repr__(self) -> str:
        return f"<Minute {self._requests} requests, {self._moved}>"

    def requested(self) -> None:
        """A request has arrived."""
        self._requests += 1

    def moved(self, what: Moved) -> None:
        """Ranks have stored and loaded this."""
        self._moved += what

    def loaded(self, tokens: int, saved_s: float) -> None:
        """A request's load has ended. saved_s: the time that computing the tokens would have taken; 0.0: unknown."""
        self._loaded_tokens += tokens
        self._saved_s += saved_s

    def failed(self) -> None:
        """A load has failed."""
        self._failed += 1

    def refused(self) -> None:
        """A request is not cached, because of an error."""
        self._refused += 1

    def tell(self, now: float, ends: bool = False) -> str:
        """The line, if something was stored, loaded or refused and a minute has passed since; else empty.

        ends: the engine ends, so do not wait for the minute.
        """
        told = self._tell_moved() + self._tell_lost()
        if self._since is None:
            self._since = now
        if now < self._since + _MINUTE_S and not (ends and told):
            return ""
        line = f"last {now - self._since:,.0f} s: {plural(self._requests, 'request')}; {', '.join(told)}"
        self._begin()
        return line if told else ""

    def _tell_moved(self) -> list[str]:
        told = []
        moved = self._moved
        if moved.stored_chunks:
            tokens = moved.stored_chunks // self._ranks * self._chunk_tokens
            told.append(f"stored (or found stored) {tokens:,} tokens ({moved.stored_bytes / _MIB:,.1f} MiB)")
        if self._loaded_tokens:
            told.append(f"loaded {self._loaded_tokens:,} tokens ({moved.loaded_bytes / _MIB:,.1f} MiB)")
        if self._saved_s:
            told.append(f"saved about {self._saved_s:,.1f} s of prefill")
        return told

    def _tell_lost(self) -> list[str]:
        told = []
        if self._failed:
            told.append(f"{plural(self._failed, 'load')} failed")
        if self._moved.dropped_stores:
            told.append(f"{plural(self._moved.dropped_stores, 'store')} dropped")
        if self._refused:
            told.append(f"{plural(self._refused, 'request')} not cached")
        return told
