"""Codes a shard's bytes between arena and tier: lossless compression, then encryption, each optional.

Called by worker.py on a tier's threads; one codec serves them all at once. All work that grows with the bytes is done
without the GIL. Invariant: bytes from a tier are not trusted. Whatever they say, only `out` is written, and no more
memory is allocated than the object's own size and a few blocks.

To compress KV, it is cut into blocks, and each block into planes (byte shuffle: the first bytes of all elements, the
second bytes, and so on). Each plane is stored as a zstd frame, or uncompressed if the frame would be longer. The
exponents of bf16 shrink to a third that way, its mantissas not at all. After the header follow

    offset 0             uint32[blocks, width]   bytes of each plane
    offset 4 * count     the planes, block by block

An encrypted object has all these bytes encrypted by AES-256-GCM, with a tag of 16 bytes at the end. The header
(`Header.bound`) is authenticated with it: no writer without the key can pass one object's bytes off as another's, or an
older layout's as a newer one's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvdepot import install
from kvdepot.errors import ConfigError
from kvdepot.protocol.curve import read_secret
from kvdepot.tiers import Options
from kvdepot.tiers.format import Header, ShardFacts

if TYPE_CHECKING:
    import zstandard

Bytes = npt.NDArray[np.uint8]

SLACK = 64
"""Maximum bytes of an object beyond its header and its KV."""
BLOCK_BYTES = 256 << 10
"""KV that is compressed at a time: its planes of bf16 have the size of a zstd block. Part of the format."""
KEY_BYTES = 32
_TAG_BYTES = 16
_NONCE_BYTES = 12
_WIDTHS = (2, 4)
"""Bytes of an element. A layout does not say them, so the width that shrinks the first block most is used. Elements of
one byte shrink as well in two planes as in one, so 1 is only for odd sizes."""
_LEAST_GAIN = 32
"""Compressed bytes are used if they save at least 1/32 of the size."""

# Header.coding: these bits and, for encrypted objects, 24 bits of the key's digest from bit 8 on.
_ZSTD = 1
_ENCRYPTED = 2
_WIDTH_BIT = 2  # two bits from here: log2 of the element's bytes
_SHUFFLED = _ZSTD | 3 << _WIDTH_BIT
_MARK = 0xFFFFFF00


class Codec:
    """Writes with the coding of its options; reads all codings for which it has the key and the library."""

    slack = _TAG_BYTES
    """An object has at most this many bytes beyond its header and its KV; a read needs memory for them."""

    def __init__(self, compress: bool = False, key: bytes | None = None) -> None:
        """key: 32 bytes. Raises ConfigError if a library is missing."""
        self._compress = compress
        self._key = key
        self.has_logged = False
        """Whether an unreadable object has been logged. Used by the tier worker."""
        self._coding = 0  # the bits of encrypted objects; no others are decrypted
        if compress and not _can_compress():
            raise ConfigError(f"compress=zstd needs zstandard; {install.advice('compress')}")
        if key is not None:
            assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
            if not _can_encrypt():
                raise ConfigError(f"key_file needs cryptography; {install.advice('encrypt')}")
            mark = blake3(key, derive_key_context="kvdepot tiers: which key").digest()[:3]
            self._coding = _ENCRYPTED | int.from_bytes(mark, "little") << 8

    def encode(self, header: Header, facts: ShardFacts, parts: Sequence[memoryview]) -> list[memoryview]:
        """The object: its header with `stored`, `coding` and `nonce` set, and the bytes after it. Blocks.

        parts: `header.size` bytes of KV. Uncoded, these very buffers follow the header.
        """
        assert sum(map(len, parts)) == header.size, f"{sum(map(len, parts))} bytes, the header says {header.size}"
        coding, pieces = self._coding, list(parts)
        if self._compress and (shrunk := _compress(parts, header.size)) is not None:
            width, body = shrunk
            coding |= _ZSTD | (width.bit_length() - 1) << _WIDTH_BIT
            pieces = [body.data]
        header = msgspec.structs.replace(header, stored=sum(map(len, pieces)), coding=coding)
        if self._key is not None:
            stored = header.stored + _TAG_BYTES
            header = msgspec.structs.replace(header, stored=stored, nonce=os.urandom(_NONCE_BYTES))
            pieces = [_encrypt(self._key, header, pieces)]
        return [memoryview(header.pack(facts)), *pieces]

    def why_not(self, header: Header) -> str:
        """The reason why `decode` cannot read an object that was written with other options; empty if it can."""
        rest = header.coding & ~_SHUFFLED
        shuffled = header.coding & _SHUFFLED
        if rest & ~_MARK not in (0, _ENCRYPTED) or (shuffled and not shuffled & _ZSTD) or _width(header) > max(_WIDTHS):
            return "its encoding is unknown to this version"
        if rest and not self._coding:
            return "it is encrypted, and this tier has no key_file"
        if rest != self._coding:  # anybody could have written an unencrypted object
            return "it is encrypted with another key" if rest else "it is not encrypted, and this tier has a key_file"
        if shuffled and not _can_compress():
            return f"it is compressed, and zstandard is missing; {install.advice('compress')}"
        return ""

    def decode(self, header: Header, stored: Sequence[memoryview], out: Sequence[memoryview]) -> bool:
        """Undo `encode` into `out`. Returns whether the bytes match the header. Blocks.

        stored: the bytes after the header, in pieces; there may be more than `header.stored`, and they may lie in
        `out`. After False, the contents of `out` are undefined. The KV's checksum is not compared.
        """
        size = sum(map(len, out))
        if self.why_not(header) or header.size != size or header.stored > size + self.slack:
            return False
        if sum(map(len, stored)) < header.stored:
            return False
        if self._key is None:
            body = np.empty(header.stored, np.uint8)  # a copy: `stored` may lie in `out`
            fill([body.data], stored)
        elif (opened := _decrypt(self._key, header, stored)) is not None:
            body = opened
        else:
            return False
        if header.coding & _ZSTD:
            return _expand(body, _width(header), size, out)
        if len(body) != size:
            return False
        fill(out, [body.data])
        return True


def make_codec(options: Options) -> Codec:
    key = None
    if options.key_file:
        path = Path(options.key_file)
        text = read_secret(path).strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{64}", text):
            raise ConfigError(f"{path} is not a 32-byte key in hex: create one with `openssl rand -hex 32`")
        key = bytes.fromhex(text.decode())
    return Codec(options.compress == "zstd", key)


@functools.cache
def _can_compress() -> bool:
    """Whether zstandard can be imported; one that is installed may lack its native part."""
    with contextlib.suppress(ImportError):
        return bool(import_module("zstandard"))
    return False


@functools.cache
def _can_encrypt() -> bool:
    with contextlib.suppress(ImportError):
        return bool(import_module("cryptography.hazmat.primitives.ciphers"))
    return False


def _width(header: Header) -> int:
    return 1 << (header.coding >> _WIDTH_BIT & 3)


# -- pieces of memory


def fill(buffers: Sequence[memoryview], parts: Iterable[bytes | memoryview]) -> int:
    """Copy `parts` one after the other into `buffers`, as far as these suffice. Returns the bytes of all parts. numpy
    releases the GIL."""
    total = 0
    rest: list[memoryview | Bytes] = [buffer for buffer in reversed(buffers) if len(buffer)]
    for part in parts:
        total += len(part)
        data = np.frombuffer(part, np.uint8) if len(part) else np.empty(0, np.uint8)
        while len(data) and rest:
            room = np.frombuffer(rest.pop(), np.uint8)
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            if count < len(room):
                rest.append(room[count:])
    return total


def _blocks(pieces: Sequence[memoryview], step: int) -> Iterator[list[Bytes]]:
    """The bytes of all pieces, `step` at a time (the last are fewer), as the arrays in which they lie."""
    run: list[Bytes] = []
    left = step
    for piece in pieces:
        view = np.frombuffer(piece, np.uint8) if len(piece) else np.empty(0, np.uint8)
        while len(view):
            run.append(view[:left])
            view = view[left:]
            left -= len(run[-1])
            if not left:
                yield run
                run, left = [], step
    if run:
        yield run


# -- compression


def _compressor() -> zstandard.ZstdCompressor:
    """zstd with almost no search for matches: a plane of KV hardly repeats itself, and chance matches make zstd's
    fastest level half as fast, and its frames 3 % longer."""
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, source_size=BLOCK_BYTES, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _compress(parts: Sequence[memoryview], size: int) -> tuple[int, Bytes] | None:
    """The width of the elements, and the compressed bytes; None if compression saves too little."""
    zstd = _compressor()
    width = 0
    most = size - size // _LEAST_GAIN
    body = np.empty(most, np.uint8)
    lengths: list[int] = []
    at = 0
    for run in _blocks(parts, BLOCK_BYTES):
        block = run[0] if len(run) == 1 else np.concatenate(run)
        if not width:
            fitting = [each for each in _WIDTHS if size % each == 0] or [1]
            width = min(fitting, key=lambda each: sum(map(len, _shrink(zstd, block, each))))
            at = -(-size // BLOCK_BYTES) * width * 4
        for plane in _shrink(zstd, block, width):
            if at + len(plane) > most:
                return None
            body[at : at + len(plane)] = plane
            lengths.append(len(plane))
            at += len(plane)
    if not lengths:
        return None
    table = np.array(lengths, "<u4").view(np.uint8)
    body[: len(table)] = table
    return width, body[:at]


def _shrink(zstd: zstandard.ZstdCompressor, block: Bytes, width: int) -> list[Bytes]:
    """The planes of a block of elements, each compressed if that is shorter: `_expand` takes a whole length as is."""
    elements = block.view(f"<u{width}")
    planes = [(elements >> (8 * number)).astype(np.uint8) for number in range(width)]
    return [min(plane, np.frombuffer(zstd.compress(plane.data), np.uint8), key=len) for plane in planes]


def _expand(body: Bytes, width: int, size: int, out: Sequence[memoryview]) -> bool:
    """Undo `_compress` into `out`. Returns whether `body` decodes to `size` bytes."""
    import zstandard

    table_bytes = -(-size // BLOCK_BYTES) * width * 4
    if size % width or len(body) < table_bytes:
        return False
    lengths = iter(body[:table_bytes].view("<u4").tolist())
    if table_bytes + body[:table_bytes].view("<u4").sum(dtype=np.int64) != len(body):
        return False
    # The size that a frame claims is compared before memory is allocated for it.
    zstd = zstandard.ZstdDecompressor(max_window_size=2 * BLOCK_BYTES)
    at = table_bytes
    for run in _blocks(out, BLOCK_BYTES):
        plane_bytes = sum(map(len, run)) // width
        planes: list[Bytes] = []
        for length in itertools.islice(lengths, width):
            packed = body[at : at + length]
            at += length
            if length != plane_bytes:
                try:
                    if zstandard.frame_content_size(packed.data) != plane_bytes:
                        return False
                    packed = np.frombuffer(zstd.decompress(packed.data), np.uint8)
                except zstandard.ZstdError:
                    return False
                if len(packed) != plane_bytes:
                    return False
            planes.append(packed)
        elements = planes[-1].astype(f"<u{width}")
        for plane in reversed(planes[:-1]):
            elements <<= 8
            elements |= plane
        fill([part.data for part in run], [elements.view(np.uint8).data])
    return True


# -- encryption


def _object_key(key: bytes, header: Header) -> bytes:
    """The AES key of one object. Each has its own, so that two equal random nonces are never used with one key."""
    return blake3(header.bound(), key=key).digest()


def _encrypt(key: bytes, header: Header, pieces: Sequence[memoryview]) -> memoryview:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    sealed = memoryview(np.empty(header.stored, np.uint8).data)
    cipher = Cipher(algorithms.AES(_object_key(key, header)), modes.GCM(header.nonce)).encryptor()
    cipher.authenticate_additional_data(header.bound())
    at = 0
    for piece in pieces:
        at += cipher.update_into(piece, sealed[at : at + len(piece)])
    cipher.finalize()
    sealed[at:] = cipher.tag
    return sealed


def _decrypt(key: bytes, header: Header, pieces: Sequence[memoryview]) -> Bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    size = header.stored - _TAG_BYTES
    if size < 0:
        return None
    opened = np.empty(size, np.uint8)
    cipher = Cipher(algorithms.AES(_object_key(key, header)), modes.GCM(header.nonce)).decryptor()
    cipher.authenticate_additional_data(header.bound())
    at, tag = 0, b""
    for piece in pieces:
        taken = piece[: size - at]
        if len(taken):
            at += cipher.update_into(taken, opened[at : at + len(taken)].data)
        tag += bytes(piece[len(taken) : len(taken) + _TAG_BYTES - len(tag)])
    try:
        cipher.finalize_with_tag(tag)
    except InvalidTag:
        return None
    return opened
