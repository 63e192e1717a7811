"""Stamps: what lets a tier forget at once all that one writer has stored, wherever and however much it is.

A writer (wire.Register) of a model has a stamp in each tier: an object with random bytes. Every object that it saves
has the same bytes in its header, and is used only while the tier has that stamp. To forget the writer, its stamp is
removed: what was saved with it is refused when it is read, by every server and after every restart, and removed then.
The next save draws another stamp.

A list of those that were forgotten would do the reverse: a store that evicts the list would serve what was forgotten,
whereas one that evicts a stamp loses hits. Nor does a clock say what was saved before. A server looks at a stamp again
after `FRESH_S`, so it may use what another server has had a shared tier forget for as long.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from kvdepot.errors import TierError
from kvdepot.memory.copier import checksum
from kvdepot.protocol.model_names import key_of_model
from kvdepot.protocol.wire import MAX_CLIENT_NAME
from kvdepot.tiers import Blob, Enforcing, Tier
from kvdepot.tiers.codec import Codec
from kvdepot.tiers.format import HEADER_BYTES, NO_SALT, NO_STAMP, STAMP_BYTES, Facts, Header

FRESH_S = 60.0
_DIGEST_BYTES = STAMP_BYTES // 2
_KV_BYTES = STAMP_BYTES + 4 * MAX_CLIENT_NAME
"""Bytes of a stamp's object: the stamp, and the writer's name with zeros behind it."""
_MOST = 4096
"""Stamps that are remembered."""


class _Stamp(NamedTuple):
    """A stamp that the tier had at `wall` (seconds since 1970)."""

    stamp: bytes
    writer: str
    wall: float


class Stamps:
    """The stamps of one tier. Any thread; calls block, and raise TierError."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, _Stamp] = OrderedDict()  # by name of the object
        self._removing: OrderedDict[str, None] = OrderedDict()  # names, after a removal that failed

    def for_save(self, tier: Tier, facts: Facts, writer: str, wall: float) -> bytes | None:
        """The stamp for what a writer saves at `wall`, which the tier has then; None if it refuses it. facts: of what
        is saved."""
        if not writer:
            return NO_STAMP
        digest = _digest(writer)
        own, name = _object_of(facts.tenant, facts.model, digest)
        with self._lock:
            seen = self._fresh(name, wall)
            if seen is None:
                seen = self._look(tier, own, digest, wall)
                # A local tier removes what is too old. In a shared one, another server may just have removed a stamp.
                if seen is None or isinstance(tier, Enforcing):
                    seen = seen or _Stamp(digest + os.urandom(STAMP_BYTES - _DIGEST_BYTES), writer, wall)
                    if not self._write(tier, own, seen):
                        self._seen.pop(name, None)
                        return None
                    self._keep(name, seen)
            return seen.stamp

    def writer_of(self, tier: Tier, facts: Facts, stamp: bytes, wall: float) -> str | None:
        """The writer of an object that was read at `wall`; empty: it names none. None: it was forgotten."""
        if stamp == NO_STAMP:
            return ""
        digest = stamp[:_DIGEST_BYTES]
        own, name = _object_of(facts.tenant, facts.model, digest)
        with self._lock:
            seen = self._fresh(name, wall)
            if seen is None or seen.stamp != stamp:
                seen = self._look(tier, own, digest, wall)
            return seen.writer if seen is not None and seen.stamp == stamp else None

    def remove(self, tier: Tier, names: Sequence[str]) -> None:
        """Forget what the writers of these stamps have saved."""
        with self._lock:
            self._removing.update(dict.fromkeys(names))
            while len(self._removing) > _MOST:
                self._removing.popitem(last=False)
            self._remove_all(tier)

    def _remove_all(self, tier: Tier) -> None:
        """Remove stamps, also those whose removal has failed before: until it succeeds, nothing is looked up."""
        for name in self._removing:
            self._seen.pop(name, None)
        if self._removing:
            tier.remove(list(self._removing))
            self._removing.clear()

    def _fresh(self, name: str, wall: float) -> _Stamp | None:
        seen = self._seen.get(name)
        return seen if seen is not None and 0 <= wall - seen.wall < FRESH_S else None

    def _keep(self, name: str, seen: _Stamp) -> None:
        self._seen[name] = seen
        self._seen.move_to_end(name)
        if len(self._seen) > _MOST:
            self._seen.popitem(last=False)

    def _look(self, tier: Tier, own: Facts, digest: bytes, wall: float) -> _Stamp | None:
        """Read a stamp."""
        self._remove_all(tier)
        key = _key(digest)
        name = own.name(NO_SALT, key)
        self._seen.pop(name, None)
        head, kv, rest = bytearray(HEADER_BYTES), bytearray(_KV_BYTES), bytearray(self._codec.slack)
        blob = Blob(name, [memoryview(head), memoryview(kv), memoryview(rest)])
        (size,) = tier.read([blob])
        header = Header.unpack(memoryview(head)) if HEADER_BYTES <= size <= blob.size else None
        if header is None or not header.names(own, NO_SALT, key, _KV_BYTES) or self._codec.why_not(header):
            return None
        if header.coding and not self._codec.decode(header, blob.buffers[1:], [memoryview(kv)]):
            return None
        writer = bytes(kv[STAMP_BYTES:]).rstrip(b"\0").decode(errors="replace")
        if _sum(kv) != header.checksum or bytes(kv[:_DIGEST_BYTES]) != digest or _digest(writer) != digest:
            return None
        seen = _Stamp(bytes(kv[:STAMP_BYTES]), writer, wall)
        self._keep(name, seen)
        return seen

    def _write(self, tier: Tier, own: Facts, seen: _Stamp) -> bool:
        kv = bytearray((seen.stamp + seen.writer.encode()).ljust(_KV_BYTES, b"\0"))
        key = _key(seen.stamp[:_DIGEST_BYTES])
        header = Header(own.digest, key, NO_SALT, _KV_BYTES, _KV_BYTES, _sum(kv), int(seen.wall))
        answers = tier.write([Blob(own.name(NO_SALT, key), self._codec.encode(header, own, [memoryview(kv)]))])
        if len(answers) != 1:
            raise TierError(f"{len(answers)} answers for one object")
        return answers[0]


def stamp_name(tenant: str, model: str, writer: str) -> str:
    """The name of a writer's stamp. model: as engines name it."""
    return _object_of(tenant, key_of_model(model), _digest(writer))[1]


def _object_of(tenant: str, model: str, digest: bytes) -> tuple[Facts, str]:
    """The facts and the name of a writer's stamp, which goes when all of the model is forgotten."""
    own = Facts(tenant, model, 0, 0, 0, 0, b"")
    return own, own.name(NO_SALT, _key(digest))


def _digest(writer: str) -> bytes:
    return blake3(b"kvdepot writer" + writer.encode()).digest(_DIGEST_BYTES)


def _key(digest: bytes) -> bytes:
    return digest.ljust(32, b"\0")


def _sum(data: bytearray) -> int:
    return checksum(np.frombuffer(data, np.uint8), ((0, len(data)),), len(data))
