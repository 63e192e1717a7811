"""Stamps, by which a tier forgets at once all objects of one writer, wherever they are and however many.

A server that saves for a writer (wire.Register) of a model draws a stamp every `PERIOD_S` and puts it into the tier, as
an object with the writer's name. The headers of the objects that it saves have the stamp, and an object is used only
while the tier has that stamp. To forget the writer, its stamps are removed: every server, also after a restart, refuses
objects with these stamps when it reads them, and removes them then.

A list of forgotten writers would be worse: a store that drops the list would serve forgotten objects, whereas a store
that drops a stamp, by eviction or age, loses the hits of one period. Nor do the clocks of hosts tell which object was
saved first. A server looks at a stamp again after `FRESH_S`. Until then, it may use objects that another server has
made a shared tier forget, and objects that the other server saves for that writer in the same period are refused.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from blake3 import blake3

from kvdepot.errors import TierError
from kvdepot.memory.extents import checksum
from kvdepot.protocol.model_names import key_of_model
from kvdepot.protocol.wire import MAX_CLIENT_NAME
from kvdepot.tiers import Blob, Tier
from kvdepot.tiers.codec import Codec
from kvdepot.tiers.format import HEADER_BYTES, NO_SALT, NO_STAMP, STAMP_BYTES, Header, ShardFacts

PERIOD_S = 600.0
FRESH_S = 60.0
_DIGEST_BYTES = STAMP_BYTES // 2
"""Bytes of a stamp that identify its writer; the others are random."""
_KV_BYTES = 4 * MAX_CLIENT_NAME
"""Bytes of a stamp's object: the writer's name, with zeros behind it."""
_MOST = 4096
"""The most facts that are remembered of each kind."""


_T = TypeVar("_T")
_Known: TypeAlias = "OrderedDict[str, tuple[_T, float]]"
"""Facts by name, each with the time at which it was true (seconds since 1970)."""


class Stamps:
    """The stamps of one tier. Any thread; calls block, and raise TierError."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._drawn: _Known[bytes] = OrderedDict()  # the writer's latest stamp, by space
        self._seen: _Known[str] = OrderedDict()  # writers of stamps that the tier has, by name
        self._removing: dict[str, None] = {}  # spaces whose removal has not succeeded yet
        self._removals = 0  # removals that have begun or ended

    def for_save(self, tier: Tier, facts: ShardFacts, writer: str, wall: float) -> bytes | None:
        """The stamp, which the tier has, for a shard with these facts that a writer saves at `wall`; None if the tier
        refuses the stamp."""
        if not writer:
            return NO_STAMP
        digest = _digest(writer)
        own = _facts_of(facts.tenant, facts.model, digest)
        removals = self._removals
        if (known := self._recall(self._drawn, own.space, wall, PERIOD_S)) is not None:
            return known
        stamp = digest + os.urandom(STAMP_BYTES - _DIGEST_BYTES)
        if not self._write(tier, own, stamp, writer, int(wall)):
            return None
        self._keep(self._drawn, own.space, (stamp, wall), removals)
        return stamp

    def writer_of(self, tier: Tier, facts: ShardFacts, stamp: bytes, wall: float) -> str | None:
        """The writer of an object that was read at `wall`: empty if the object names none, None if the writer was
        forgotten."""
        if stamp == NO_STAMP:
            return ""
        own = _facts_of(facts.tenant, facts.model, stamp[:_DIGEST_BYTES])
        if own.space in self._removing:
            self.remove(tier, [own.space])
        name = own.name(NO_SALT, stamp)
        removals = self._removals
        if (known := self._recall(self._seen, name, wall, FRESH_S)) is not None:
            return known
        writer = self._read(tier, own, stamp)
        if writer is not None:
            self._keep(self._seen, name, (writer, wall), removals)
        return writer

    def remove(self, tier: Tier, spaces: Sequence[str]) -> None:
        """Forget objects of writers, by the spaces of their stamps (`space_of`). A removal that fails is tried again
        before any of these objects is used."""
        with self._lock:
            self._removals += 1
            for space in spaces:
                self._removing[space] = None
                self._drawn.pop(space, None)
                for name in [name for name in self._seen if name.startswith(space, len(NO_SALT.hex()) + 1)]:
                    del self._seen[name]
            while len(self._removing) > _MOST:
                del self._removing[next(iter(self._removing))]
        for space in spaces:
            tier.forget(NO_SALT.hex(), space)
        with self._lock:
            self._removals += 1
            for space in spaces:
                self._removing.pop(space, None)

    def _recall(self, known: _Known[_T], name: str, wall: float, for_s: float) -> _T | None:
        """The fact of this name that was true less than `for_s` before `wall`."""
        with self._lock:
            found = known.get(name)
            return found[0] if found and 0 <= wall - found[1] < for_s else None

    def _keep(self, known: _Known[_T], name: str, value: tuple[_T, float], removals: int) -> None:
        """Remember something, unless a removal has begun or ended since it was looked at."""
        with self._lock:
            if self._removals == removals:
                known[name] = value
                known.move_to_end(name)
                if len(known) > _MOST:
                    known.popitem(last=False)

    def _read(self, tier: Tier, own: ShardFacts, stamp: bytes) -> str | None:
        """The writer whose stamp this is, if the tier has the stamp."""
        head, kv, rest = bytearray(HEADER_BYTES), bytearray(_KV_BYTES), bytearray(self._codec.slack)
        blob = Blob(own.name(NO_SALT, stamp), [memoryview(head), memoryview(kv), memoryview(rest)])
        (size,) = tier.read([blob])
        header = Header.unpack(memoryview(head)) if HEADER_BYTES <= (size or 0) <= blob.size else None
        if header is None or not header.names(own, NO_SALT, stamp, _KV_BYTES) or self._codec.why_not(header):
            return None
        if header.coding and not self._codec.decode(header, blob.buffers[1:], [memoryview(kv)]):
            return None
        writer = bytes(kv).rstrip(b"\0").decode(errors="replace")
        return writer if _sum(kv) == header.checksum and _digest(writer) == own.layout else None

    def _write(self, tier: Tier, own: ShardFacts, stamp: bytes, writer: str, born: int) -> bool:
        kv = bytearray(writer.encode().ljust(_KV_BYTES, b"\0"))
        header = Header(own.digest, stamp, NO_SALT, _KV_BYTES, _KV_BYTES, _sum(kv), born)
        answers = tier.write([Blob(own.name(NO_SALT, stamp), self._codec.encode(header, own, [memoryview(kv)]))])
        if len(answers) != 1:
            raise TierError(f"{len(answers)} answers for one object")
        return answers[0]


def space_of(tenant: str, model: str, writer: str) -> str:
    """The second part of the names of a writer's stamps. model: as engines name it."""
    return _facts_of(tenant, key_of_model(model), _digest(writer)).space


def _facts_of(tenant: str, model: str, digest: bytes) -> ShardFacts:
    """The facts of a writer's stamps, by which they are removed when the whole model is forgotten."""
    return ShardFacts(tenant, model, 0, 0, 0, 0, digest)


def _digest(writer: str) -> bytes:
    return blake3(b"kvdepot writer" + writer.encode()).digest(_DIGEST_BYTES)


def _sum(data: bytearray) -> int:
    return checksum(np.frombuffer(data, np.uint8), ((0, len(data)),), len(data))
