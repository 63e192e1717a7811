"""Names and headers of a tier's objects. Pure; used by worker.py and core/tiering/.

Invariant: an object's bytes are used only if its header matches all facts that the name stands for, and the checksum
matches. An object is a header of HEADER_BYTES and then one shard's KV, as in the arena or coded by codec.py:

    offset  0, 8 bytes    magic
            8, uint32     format version
           12, uint32     CRC-32 of the header with zeros here
           16, uint64     bytes of KV
           24, uint64     bytes after the header
           32, uint64     XXH3 of the KV (extents.checksum)
           40, uint64     when the chunk was computed, seconds since 1970
           48, uint32     coding of the bytes (0: none; the bits are codec.py's)
           52, uint32     bytes of the facts' text
           56, 32 bytes   digest of the facts
           88, 32 bytes   key
          120, 16 bytes   salt
          136, 12 bytes   nonce, if they are encrypted
          148             the facts as msgpack, for people, truncated or padded with zeros
          992, 32 bytes   stamp of the writer (stamps.py); zeros, or bytes of a longer text: none
"""

from __future__ import annotations

import struct
from functools import cached_property
from zlib import crc32

import msgspec
from blake3 import blake3

MAGIC = b"kvd-tier"
VERSION = 1
HEADER_BYTES = 1024
SALT_BYTES = 16
NO_SALT = bytes(SALT_BYTES)
STAMP_BYTES = 32
NO_STAMP = bytes(STAMP_BYTES)
_HEADER = struct.Struct("<8sIIQQQQII32s32s16s12s")
_TEXT_BYTES = HEADER_BYTES - _HEADER.size - STAMP_BYTES
_encode = msgspec.msgpack.Encoder().encode


class ShardFacts(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Everything beside the key that determines a shard's bytes and its place in shared stores."""

    tenant: str
    model: str
    world_size: int
    rank: int
    blocks_in_chunk: int
    chunk_tokens: int
    layout: bytes

    @cached_property
    def digest(self) -> bytes:
        return bytes(blake3(b"kvdepot facts" + VERSION.to_bytes(4, "little") + _encode(self)).digest())

    @cached_property
    def space(self) -> str:
        """The second part of names: 8 characters for the tenant, 8 for the model, 16 for all facts."""
        return model_prefix(self.tenant, self.model) + self.digest.hex()[:16]

    def name(self, salt: bytes, key: bytes) -> str:
        """The name of one shard's object. salt: may be empty."""
        return f"{(salt or NO_SALT).hex()}/{self.space}/{key.hex()}.{self.rank:x}"


def tenant_prefix(tenant: str) -> str:
    """The beginning of the second part of every name of a tenant."""
    return str(blake3(b"kvdepot tenant" + _encode(tenant)).hexdigest()[:8])


def model_prefix(tenant: str, model: str) -> str:
    """The beginning of the second part of every name of a tenant's model."""
    return tenant_prefix(tenant) + str(blake3(b"kvdepot model" + _encode([tenant, model])).hexdigest()[:8])


class Header(msgspec.Struct, frozen=True):
    facts: bytes
    """Digest."""
    key: bytes
    salt: bytes
    size: int
    stored: int
    """Bytes after the header."""
    checksum: int
    born: int
    coding: int = 0
    nonce: bytes = bytes(12)
    stamp: bytes = NO_STAMP
    writer: str = ""
    """The writer whose stamp the header has, once the tier was asked; not in the header's bytes."""

    def pack(self, facts: ShardFacts) -> bytes:
        text = _encode(facts)[:_TEXT_BYTES]
        rest = text.ljust(_TEXT_BYTES, b"\0") + self.stamp
        crc = crc32(self._pack(0, len(text)) + rest)
        return self._pack(crc, len(text)) + rest

    def bound(self) -> bytes:
        """The header without CRC and text: what encryption authenticates together with the bytes."""
        return self._pack(0, 0) + (self.stamp if self.stamp != NO_STAMP else b"")

    def _pack(self, crc: int, text_bytes: int) -> bytes:
        return _HEADER.pack(
            MAGIC, VERSION, crc, self.size, self.stored, self.checksum, self.born, self.coding, text_bytes,
            self.facts, self.key, self.salt, self.nonce,
        )  # fmt: skip

    def names(self, facts: ShardFacts, salt: bytes, key: bytes, size: int) -> bool:
        """Whether this is the header of this shard: the header has in full the facts that a name abbreviates."""
        return (self.facts, self.salt, self.key, self.size) == (facts.digest, salt, key, size)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header | None:
        """The header in `data`; None if it is not a complete header of this format."""
        if len(data) < HEADER_BYTES:
            return None
        magic, version, crc, size, stored, checksum, born, coding, text_bytes, facts, key, salt, nonce = (
            _HEADER.unpack_from(data)
        )
        plain = bytearray(data[:HEADER_BYTES])
        plain[12:16] = bytes(4)
        if magic != MAGIC or version != VERSION or crc != crc32(plain):
            return None
        stamp = bytes(data[HEADER_BYTES - STAMP_BYTES : HEADER_BYTES]) if text_bytes <= _TEXT_BYTES else NO_STAMP
        return cls(facts, key, salt, size, stored, checksum, born, coding, nonce, stamp)
