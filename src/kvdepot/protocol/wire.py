"""What travels between client and server: messages, and nothing that reads or writes a socket.

Used by client/socket.py and server/loop.py. One frame a message, both ways, in msgpack (https://msgpack.org), never
pickle:

    request   [id: 8 bytes][body]             body = one of `Request`, tagged by its name
    reply     [id: 8 bytes][boot: 8 bytes][body]   body = `Answer` or `Failure`

The id is the client's and comes back as it was; it stands outside the body so that a body nobody can decode
still gets its reply. `boot` names one run of the server: a client that sees another one knows that
the server has forgotten it. Every request gets exactly one reply. The first messages of a client are `Hello` and
`Prove`; protocol/handshake.py says why, and how frames are sealed where others could stand in between.

Hashes travel as one byte string, 32 bytes a chunk; block ids as little-endian uint32.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from kvdepot import errors
from kvdepot.protocol.layout import Layout

__all__ = [
    "VERSION",
    "Answer",
    "ChunkSize",
    "Clear",
    "Count",
    "EndSession",
    "Failure",
    "Forget",
    "Hello",
    "Lookup",
    "Noop",
    "Pin",
    "Proof",
    "Prove",
    "Register",
    "Request",
    "Retrieve",
    "Shards",
    "Status",
    "Store",
    "Unpin",
    "Unregister",
    "Welcome",
    "decode_reply",
    "decode_request",
    "encode_answer",
    "encode_failure",
    "encode_request",
]

VERSION = 4
ID_BYTES = 8
BOOT_BYTES = 8
MAX_REQUEST_ID = 4096
"""Characters in a request id or a model name; longer ones are refused."""
MAX_CHUNKS = 1 << 16
"""Chunks that one request may name."""
MAX_ERROR = 1000
"""Characters of an error's message that travel."""


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    pass


class Hello(_Message, frozen=True):
    """First message. `lease` is the client's liveness file (see memory/shm.py), `nonce` fresh random bytes.

    sealed: whether messages after `Welcome` are sealed. Answer: `Proof` fields as a list. The version stays the
    first field in every version of the protocol.
    """

    version: int
    lease: str
    nonce: bytes = b""
    sealed: bool = False

    def __repr__(self) -> str:
        return f"Hello(version={self.version}, lease={self.lease!r}, sealed={self.sealed})"


class Prove(_Message, frozen=True):
    """Second message: the client proves that it can read arena and lease. Answer: `Welcome` fields as a list."""

    mac: bytes

    def __repr__(self) -> str:
        return "Prove()"


class Register(_Message, frozen=True):
    """Share paged KV tensors under `instance`. Answer: None, once the server has mapped them.

    Where the caller knows for whom it registers, `model` and the shape say so; empty model: the first store tells.
    """

    instance: int
    layout: Layout
    model: str = ""
    world_size: int = 0
    rank: int = 0
    blocks_in_chunk: int = 0


class Unregister(_Message, frozen=True):
    """Forget an instance. Answer: None, once no copy touches its tensors."""

    instance: int


class Lookup(_Message, frozen=True):
    """Longest cached prefix of `hashes`. Answer: chunks in it; they are pinned for `request`.

    readers: keys that will be retrieved per chunk (ranks); after that many the pin is gone by itself. 0: nobody will
        retrieve them; a person asks, no engine, and it counts as no lookup.
    blocks_in_chunk: 0 where the caller does not know it. chained: each hash names the one before it, from the prompt's
    start. salt: as in Shards. The answer may take up to `Welcome.lookup_s` where there are tiers.
    """

    model: str
    world_size: int
    blocks_in_chunk: int
    request: str
    readers: int
    hashes: bytes
    chained: bool = False
    salt: bytes = b""


class Shards(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request's consecutive chunks on one rank, and the blocks they lie in.

    parent: hash of the chunk before the first (the chain's root before chunk 0), empty where the
        hashes are an engine's own and nobody knows how they chain.
    depth: chunks before the first, from the prompt's start (with `parent` only).
    skip_blocks: leading blocks of the first chunk that a retrieve must not write.
    salt: 16 bytes that stand for the prompt's cache salt (keys.salt_tag), so that it can be forgotten; empty: none.
    """

    request: str
    model: str
    world_size: int
    rank: int
    parent: bytes
    depth: int
    hashes: bytes
    block_ids: bytes
    skip_blocks: int = 0
    salt: bytes = b""


class Store(_Message, frozen=True):
    """Copy blocks into the depot. `ticket` is the client's running number (see memory/shm.py). Answer: bool."""

    instance: int
    ticket: int
    shards: list[Shards]


class Retrieve(_Message, frozen=True):
    """Copy chunks into blocks. Answer: list of bool, one a chunk.

    unpins: whether pins of the requests go as their chunks are retrieved; not where their engine ends them itself.
    """

    instance: int
    shards: list[Shards]
    unpins: bool = True


class EndSession(_Message, frozen=True):
    """Release what `request` still pins. Answer: None.

    saved_tokens, saved_s: what its engine did not have to compute, and how long that would have taken; 0 where the
    engine does not know, or its retrieves say it.
    """

    request: str
    saved_tokens: int = 0
    saved_s: float = 0.0


class ChunkSize(_Message, frozen=True):
    """Answer: tokens a chunk."""


class Noop(_Message, frozen=True):
    """Answer: "ok"."""


class Clear(_Message, frozen=True):
    """Drop every chunk that nothing pins or copies, of one model or of all (empty). Answer: None."""

    model: str = ""


class Pin(_Message, frozen=True):
    """Keep the longest cached prefix of `hashes` under a name, whoever comes and goes. Answer: chunks in it.

    A name that is known is pinned anew. ttl_s: seconds; 0 = until it is unpinned or the server ends.
    """

    name: str
    model: str
    world_size: int
    blocks_in_chunk: int
    hashes: bytes
    salt: bytes = b""
    ttl_s: int = 0


class Unpin(_Message, frozen=True):
    """Give up a Pin. Answer: bool, whether there was one of that name."""

    name: str


class Forget(_Message, frozen=True):
    """Remove chunks, from memory and tiers, of models whose name begins so, of one salt or of all (empty).

    Whoever has them pinned gets them no more. Answer: a dict: chunks removed from `memory`, and by each tier's name how
    many it removed. What is no number says what may still be there, and why: by a tier's name, or by `error`.
    """

    model: str = ""
    salt: bytes = b""


class Count(_Message, frozen=True):
    """Ask what a Forget of the same model and salt would remove from memory; it removes nothing.

    A message of its own, not a flag of Forget: a server too old to know it refuses it, where it would ignore the flag
    and forget. Answer: chunks, and their bytes, as a list.
    """

    model: str = ""
    salt: bytes = b""


class Status(_Message, frozen=True):
    """Answer: a dict of counts."""


Request: TypeAlias = (
    Hello
    | Prove
    | Register
    | Unregister
    | Lookup
    | Store
    | Retrieve
    | EndSession
    | ChunkSize
    | Noop
    | Clear
    | Pin
    | Unpin
    | Forget
    | Count
    | Status
)


class Proof(msgspec.Struct, array_like=True, frozen=True):
    """Answer to `Hello`: the server's arena, whose lock says that it lives, and the proof that it owns it."""

    version: int
    arena: str
    nonce: bytes
    mac: bytes

    def __repr__(self) -> str:
        return f"Proof(version={self.version}, arena={self.arena!r})"


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """Answer to `Prove`: the chunk size.

    lookup_s: so long the server may look behind memory before it answers a lookup.
    """

    version: int
    chunk_size: int
    lookup_s: float = 0.0


class Answer(_Message, frozen=True):
    """A result."""

    value: Any


class Failure(_Message, frozen=True):
    """An error: a code of errors.py and a sentence."""

    code: str
    message: str


_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Answer | Failure] = msgspec.msgpack.Decoder(Answer | Failure)
_encode = msgspec.msgpack.Encoder().encode


def encode_request(number: int, request: Request) -> bytes:
    """One frame, client to server."""
    try:
        return number.to_bytes(ID_BYTES, "little") + _encode(request)
    except (TypeError, ValueError, OverflowError) as exc:
        raise errors.BadRequest(f"{type(request).__name__} cannot be sent: {exc}") from exc


def number_of(frame: bytes) -> bytes:
    """A request's id; zero of a frame too short for one."""
    return frame[:ID_BYTES] if len(frame) >= ID_BYTES else bytes(ID_BYTES)


def decode_request(frame: bytes) -> tuple[bytes, Request | errors.ProtocolError]:
    """The id, and the request or what is wrong with it."""
    number = number_of(frame)
    if len(frame) < ID_BYTES:
        return number, errors.ProtocolError(f"a frame of {len(frame)} bytes is no message")
    try:
        return number, _requests.decode(memoryview(frame)[ID_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return number, errors.ProtocolError(f"not a message of protocol version {VERSION}: {exc}")


def encode_answer(number: bytes, boot: bytes, value: Any) -> bytes:
    """One frame, server to client: the result of request `number`."""
    return number + boot + _encode(Answer(value))


def encode_failure(number: bytes, boot: bytes, error: errors.KVDepotError) -> bytes:
    """One frame, server to client: request `number` failed. What it quotes of the request is cut off somewhere."""
    return number + boot + _encode(Failure(error.code, str(error)[:MAX_ERROR]))


def decode_reply(frame: bytes) -> tuple[int, bytes, Any]:
    """Id, boot id, and the value or an error from errors.py (returned, not raised).

    Raises ProtocolError for a frame that is no reply.
    """
    head = ID_BYTES + BOOT_BYTES
    if len(frame) < head:
        raise errors.ProtocolError(f"a frame of {len(frame)} bytes is not a reply")
    try:
        body = _replies.decode(memoryview(frame)[head:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise errors.ProtocolError(f"not a reply of protocol version {VERSION}: {exc}") from exc
    number = int.from_bytes(frame[:ID_BYTES], "little")
    boot = frame[ID_BYTES:head]
    if isinstance(body, Failure):
        return number, boot, errors.from_code(body.code, body.message)
    return number, boot, body.value
