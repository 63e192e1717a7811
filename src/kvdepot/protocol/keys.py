"""Names of chunks: a chained hash of the tokens and of everything else that changes the KV bytes.

Called by the client (adapters, connector). Tokens do not leave the engine's process, unless the engine describes its
chunks to a server that publishes KV events; only for those does the server compare tokens with hashes. Invariant: equal
keys mean equal bytes. So the hash covers everything that changes the KV of a chunk: the tokens of the chunk and of all
chunks before it, and the salt, LoRA adapter and multimodal items of the request. The facts that are fixed for an engine
(model, weights, dtype, parallel shape) form the namespace, and the server keeps namespaces apart.

The chain is BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), 32 bytes, over the parent's hash and the token ids as
little-endian uint32. It uses no seed of the process, so it is equal on every host and after every restart.

A drafter's KV at a position may also depend on the tokens after it (EAGLE, MTP): the **lookahead**. The hash of each
chunk then also covers that many tokens after the chunk, so a chunk has a hash only once these tokens are known.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence

from blake3 import blake3

from kvdepot.errors import BadRequest

__all__ = ["HASH_BYTES", "ROOT", "ChunkChain", "derive_root", "engine_hash", "salt_tag", "split_tokens", "tenant_salt"]

HASH_BYTES = 32
ROOT = blake3(b"kvdepot chunk chain 1").digest()
"""Parent of the first chunk of a prompt whose KV depends on its tokens alone."""

_ENGINE_ROOT = blake3(b"kvdepot engine hash 1").digest()
_SALTS = blake3(b"kvdepot salt 1").digest()


def derive_root(*parts: tuple[str, str]) -> bytes:
    """Parent of the first chunk of a prompt whose KV also depends on `parts`, e.g. ("salt", "tenant-7"); without
    any, `ROOT`. Lengths are hashed with the text, in BLAKE3's key derivation mode, so no two lists, and no tokens,
    collide."""
    root: bytes = ROOT
    for name, value in parts:
        for text in (name.encode(), value.encode()):
            root = _derive(root, len(text).to_bytes(8, "little") + text)
    return root


def salt_tag(salt: str) -> bytes:
    """16 bytes that identify a cache salt, so that its chunks can be forgotten; empty for no salt."""
    return bytes(_derive(_SALTS, salt.encode())[:16]) if salt else b""


def tenant_salt(tenant: str, tag: bytes) -> bytes:
    """The salt that a tenant's chunks are stored under, given a salt's tag; each tenant has another one for the same
    tag."""
    if not tenant or not tag:
        return tag
    return bytes(
        blake3(b"kvdepot tenant salt" + len(tenant).to_bytes(4, "little") + tenant.encode() + tag).digest()[:16]
    )


def _derive(parent: bytes, text: bytes) -> bytes:
    """Hash bytes that are no tokens, in BLAKE3's key derivation mode, so that no sequence of tokens collides with
    them."""
    return blake3(parent + text, derive_key_context="kvdepot 2026-11 chunk chain").digest()


def engine_hash(chunk_hash: bytes) -> bytes:
    """The 32-byte key for a hash of any length that the engine computed itself (hash mode).

    Its root is another one, so it never equals a hash of a `ChunkChain`. Raises BadRequest if the hash is not bytes.
    """
    if not isinstance(chunk_hash, bytes):
        raise BadRequest(f"a block hash must be bytes, not {type(chunk_hash).__name__}")
    return blake3(_ENGINE_ROOT + chunk_hash).digest()


class _End:
    """The last item of a chain's tokens, which records that a comparison of two lists has reached it."""

    is_reached = False
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        self.is_reached = True
        return False

    def __lt__(self, other: object) -> bool:
        return False


class ChunkChain:
    """The chunk hashes of one growing prompt; every token is hashed once.

    `hashes` is the concatenation of the 32-byte hashes of all full chunks so far that have `lookahead` tokens after
    them. Not thread-safe.
    """

    __slots__ = ("_end", "_tokens", "chunk_size", "hashes", "lookahead", "root")

    def __init__(self, chunk_size: int, root: bytes = ROOT, lookahead: int = 0) -> None:
        self.chunk_size = chunk_size
        self.lookahead = lookahead
        self.root = root
        self.hashes = bytearray()
        self._end = _End()
        self._tokens: list[int | _End] = [self._end]  # the tokens hashed so far, and the end

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def covered(self) -> int:
        return len(self) * self.chunk_size + self.lookahead if self.hashes else 0

    def parent(self, chunk: int) -> bytes:
        """Hash of the chunk before chunk number `chunk`; the root for the first."""
        if chunk == 0:
            return self.root
        return bytes(self.hashes[(chunk - 1) * HASH_BYTES : chunk * HASH_BYTES])

    def slice(self, first: int, end: int) -> bytes:
        return bytes(self.hashes[first * HASH_BYTES : end * HASH_BYTES])

    def extend(self, token_ids: Sequence[int], extras: Sequence[tuple[int, bytes]] = ()) -> None:
        """Make `hashes` those of the full chunks of `token_ids`; the tail is ignored.

        token_ids: the prompt from its start, ids in `[0, 2**32)`. If it starts with the tokens hashed before, only the
            new ones are hashed, otherwise all.
        extras: `(token position, bytes)` in order: what else the KV at a position depends on, such as the hash of an
            image; hashed into the chunk that contains the position, and into one whose lookahead contains it.
        Raises BadRequest for anything that is not a token id.
        """
        covered = self.covered
        if covered and not self._is_prefix(token_ids):
            self.hashes.clear()
            del self._tokens[:-1]
            covered = 0
        self.grow(token_ids, extras)
        self._tokens[-1:-1] = token_ids[covered : self.covered]

    def _is_prefix(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens begin with those hashed before: one pass in C, without a copy of 128k tokens."""
        given = token_ids if isinstance(token_ids, list) else list(token_ids)
        if len(given) == len(self._tokens) - 1:
            return given == self._tokens[:-1]
        self._end.is_reached = False
        with contextlib.suppress(TypeError):  # values that are no token ids cannot be compared
            _ = self._tokens < given
        return self._end.is_reached

    def grow(self, token_ids: Sequence[int], extras: Sequence[tuple[int, bytes]] = ()) -> None:
        """Like `extend`, but the tokens hashed before are not compared, so it takes time for new tokens only."""
        size, first, end = self.chunk_size, len(self), (len(token_ids) - self.lookahead) // self.chunk_size
        if end <= first:
            return
        reach = end * size + self.lookahead
        data = memoryview(pack_ids(token_ids[first * size : reach], "token ids"))
        digest = self.parent(first)
        by_chunk = self._by_chunk(extras) if extras else {}
        for chunk in range(first, end):
            offset = 4 * size * (chunk - first)
            hasher = blake3(digest)
            hasher.update(data[offset : offset + 4 * (size + self.lookahead)])
            digest = hasher.digest()
            for extra in by_chunk.get(chunk, ()):
                digest = _derive(digest, extra)
            self.hashes += digest

    def tail(self, token_ids: Sequence[int], end: int, extras: Sequence[tuple[int, bytes]] = ()) -> bytes:
        """The key of the tokens after the last whole chunk, up to the first `end` tokens; it equals no whole chunk's.

        token_ids, extras: see `extend`; they may go beyond `end`. Needs a chain without lookahead whose hashes reach to
        the tail.
        """
        first = end // self.chunk_size
        start = first * self.chunk_size
        key: bytes = _derive(self.parent(first), b"tail" + pack_ids(token_ids[start:end], "token ids"))
        for position, extra in extras:
            if start <= position < end:
                key = _derive(key, (position - start).to_bytes(4, "little") + extra)
        return key

    def _by_chunk(self, extras: Sequence[tuple[int, bytes]]) -> dict[int, list[bytes]]:
        """The extras hashed into each chunk besides tokens, each after its position from the chunk's start."""
        size, found = self.chunk_size, dict[int, list[bytes]]()
        for position, extra in extras:
            for chunk in range(max(0, position - self.lookahead) // size, position // size + 1):
                found.setdefault(chunk, []).append((position - chunk * size).to_bytes(4, "little") + extra)
        return found


def split_tokens(parent: bytes, hashes: bytes, tokens: bytes, chunk_size: int) -> list[tuple[bytes, bytes]]:
    """The hash and the token ids of each chunk, up to the first whose tokens do not give its hash.

    parent: hash before the first. tokens: little-endian uint32 of all the chunks, and of the lookahead after the last.
    """
    found = []
    data, chunk_bytes = memoryview(tokens), 4 * chunk_size
    lookahead_bytes = len(tokens) - len(hashes) // HASH_BYTES * chunk_bytes
    for start in range(0, len(hashes), HASH_BYTES):
        key, first = hashes[start : start + HASH_BYTES], start // HASH_BYTES * chunk_bytes
        end = first + chunk_bytes
        if lookahead_bytes < 0 or blake3(parent).update(data[first : end + lookahead_bytes]).digest() != key:
            break
        found.append((key, bytes(data[first:end])))
        parent = key
    return found


def pack_ids(ids: Sequence[int], what: str) -> bytes:
    """Pack ids as little-endian uint32. Raises BadRequest, which calls them `what`, for anything else."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as exc:
        raise BadRequest(f"{what} must be integers in [0, 2**32): {exc}") from exc
    return packed.tobytes()
