"""Messages between client and server, and their encoding. Nothing here reads or writes a socket.

Used by client/socket.py and core/connections.py. One frame per message in both directions, in msgpack
(https://msgpack.org), never pickle:

    request   [id: 8 bytes][body]             body = one of `Request`, tagged by its name
    reply     [id: 8 bytes][boot: 8 bytes][body]   body = `Answer`, `Placement` or `Failure`

The client chooses the id, and the reply repeats it; it precedes the body, so a request whose body cannot be decoded
still gets a reply. `boot` identifies one run of the server: if it changes, the server has restarted and does not know
the client. Every request gets exactly one reply. The first messages of a client are `Hello` and `Prove`;
protocol/handshake.py explains them, and how frames are sealed where a man in the middle is possible.

Hashes are one byte string, 32 bytes per chunk.

No message carries KV bytes or block ids. A client copies its KV to and from the arena itself: `Store`, `Retrieve` and
`Compare` are answered with a `Placement`, which says where the bytes are or belong; the client copies, and `Complete`
ends the operation. The small loads of a lookup's answer (`Places`) need neither.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvdepot import errors
from kvdepot.protocol.layout import BlockFormat
from kvdepot.protocol.leases import HINT_S, NORMAL
from kvdepot.protocol.quotas import Quota
from kvdepot.protocol.status import AnswersStatus

VERSION = 13
ID_BYTES = 8
BOOT_BYTES = 8
MAX_REQUEST_ID = 4096
"""Characters in a request id or a model name; longer ones are refused."""
MAX_CHUNKS = 1 << 16
"""Chunks that one request may name."""
MAX_PLACES, MAX_PLACED_BYTES = 64, 32 << 20
"""The answer to a lookup says where at most this many of the last chunks are, and of these bytes on each rank."""
MAX_WRITER_RUNS = 16
"""An answer names the writers of at most this many runs of chunks; who has stored the chunks behind is not known."""
MAX_TAILS = 64
"""Tails that one lookup may name."""
MAX_PLACE = 1 << 31
"""Places in a queue (`Lookup.place`) are from minus this to this."""
MAX_GROUPS = 64
"""KV cache groups of one model."""
MAX_CHUNK_TOKENS = 1 << 20
MAX_FACTS = 64
"""Facts of one engine."""
MAX_CLIENT_NAME = 256
"""Characters in the name of an engine, or of a liveness file."""
MAX_TOPIC = 1024
"""Bytes of a topic for KV events."""
MAX_ERROR = 1000
"""Characters of an error's message that are sent; the rest is cut off."""


class _Shown(msgspec.Struct, frozen=True):
    def __repr__(self) -> str:
        """Bytes are shown by their number: nonces and proofs are not for logs."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (f"{name}={f'{len(each)} bytes' if isinstance(each, bytes) else repr(each)}" for name, each in values)
        return f"{type(self).__name__}({', '.join(shown)})"


class _Message(_Shown, tag=True, array_like=True, frozen=True, gc=False):
    pass


class Hello(_Message, frozen=True):
    """The first message. Answer: the fields of `Proof`. The version is the first field in every protocol version.

    liveness: the name of the client's liveness file (memory/shm.py). nonce: fresh random bytes. sealed: whether
    messages after `Prove` are sealed. engine, host, pid: for log, journal and status only; all clients of an engine
    give the same name.
    """

    version: int
    liveness: str
    nonce: bytes = b""
    sealed: bool = False
    engine: str = ""
    host: str = ""
    pid: int = 0


class Prove(_Message, frozen=True):
    """The second message: proves that the client can read the arena and its liveness file. Answer: the fields of
    `Welcome`."""

    mac: bytes


class Group(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A KV cache group of a model, as one rank registers it.

    reach: chunks before a boundary that the engine needs of this group to resume there: 0 means all from the prompt's
    start (full attention, MLA), n the last n (a sliding window), 1 the last one (a state). size: bytes of one chunk on
    this rank. fingerprint: of this rank's layout of the group; each group's is different.
    """

    reach: int
    blocks_in_chunk: int
    size: int
    fingerprint: bytes


class Register(_Message, frozen=True):
    """Name the paged KV tensors of one KV cache group `instance`. Answer: None. The server maps nothing.

    model to chunk_tokens: empty if the caller does not know them, so that the first store states them; chunk_tokens 0
    stands for the server's. groups: all KV cache groups of the model, of which these tensors are number `group`; empty
    for a single group that resuming needs whole. topic: of the engine's KV events for routers; empty for none.
    writer: a name of the engine, which marks the chunks that it stores; engines of one name compute the same KV. facts:
    of the engine, to be shown beside another's whose KV differs. fault: why this worker can neither store nor load, for
    the status, such as a self-test that failed; then all its copies are refused. Empty: it can.
    """

    instance: int
    layout: BlockFormat
    model: str = ""
    world_size: int = 0
    rank: int = 0
    blocks_in_chunk: int = 0
    chunk_tokens: int = 0
    group: int = 0
    groups: list[Group] = []
    topic: str = ""
    writer: str = ""
    facts: dict[str, str] = {}
    fault: str = ""


class Unregister(_Message, frozen=True):
    """Forget an instance. Answer: None. The client ends its copies of these tensors itself."""

    instance: int


class Tail(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A chunk with fewer tokens than others: the end of a prompt, or of an answer. It has its blocks' bytes, but only
    the first tokens count. chunks: whole chunks before it."""

    chunks: int
    key: bytes


class WriterRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Who has stored consecutive chunks: `writer` (as in Register; empty: it is not known) a part of each, from the end
    of the run before up to chunk `end`, counted from the prompt's start. Runs with one end are of the same chunks."""

    end: int
    writer: str


class Lookup(_Message, frozen=True):
    """Find the longest cached prefix of `hashes`, and pin its chunks for `request`. Answer: the fields of `Hit`.

    The prefix ends where every KV cache group of the model can be resumed, on every rank. The answer may take half a
    second while chunks of the prompt are being stored, and with tiers `Welcome.lookup_s` more.

    readers: retrieves expected per chunk (one per rank), after which the pin ends by itself; 0 if no engine asks, so
        that no chunk is retrieved and the lookup is not counted.
    blocks_in_chunk: of the first group; 0 if the caller does not know it. chunk_tokens: 0 stands for the server's.
    chained: whether the hashes are a chain from the prompt's start. salt: as in Shards. reports: whether
    `EndSession.asked` will count the tokens, so that they are not counted here. speed: tokens per second that the
    engine computes, which need not be loaded from a slower tier; 0: unknown, so all are. hurries: repeats a lookup that
    has no answer yet, which is counted no more, and answered at once with what is in memory.
    queued: the request only waits in its engine's queue, so the answer may take as long as those before it keep their
    pins. tails: where the prefix may end within a chunk, the longest first.
    pins: whether the chunks are pinned; if not, there is no session to end, and the chunks are the last to be evicted.
    own: leading chunks that the engine's own cache has, which are not counted as asked for. writers: whether the answer
    says who has stored the chunks. layout: the fingerprint of all ranks' tensors, if they load small hits without
    asking again; then the answer has `Places`.
    place: of a queued request in its engine's own queue, from -MAX_PLACE to MAX_PLACE: the lowest goes first, equal
    places in the order of arrival. It orders the lookups of one client among themselves, and of no other client.
    """

    model: str
    world_size: int
    blocks_in_chunk: int
    request: str
    readers: int
    hashes: bytes
    chained: bool = False
    salt: bytes = b""
    chunk_tokens: int = 0
    reports: bool = False
    speed: float = 0.0
    hurries: bool = False
    queued: bool = False
    tails: tuple[Tail, ...] = ()
    pins: bool = True
    own: int = 0
    writers: bool = False
    layout: bytes = b""
    place: int = 0


class Shards(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Consecutive chunks of one request on one rank.

    parent: hash of the chunk before the first (the chain's root for chunk 0); empty for hashes of the engine's own.
    depth: number of chunks before the first, from the prompt's start (with `parent` only). blocks: blocks of a chunk.
    salt: 16 bytes that identify the prompt's cache salt (keys.salt_tag), so that it can be forgotten; empty for none.
    continues: in the store of a `Tail`, the key of a tail that it makes useless; empty: none.
    """

    request: str
    model: str
    world_size: int
    rank: int
    parent: bytes
    depth: int
    hashes: bytes
    blocks: int
    salt: bytes = b""
    continues: bytes = b""


class Store(_Message, frozen=True):
    """Reserve room for the chunks that are missing. Answer: the `Placement` of those; True or False if there is nothing
    to copy, as for `Complete`."""

    instance: int
    shards: list[Shards]


class Retrieve(_Message, frozen=True):
    """Hold the chunks that are there. Answer: their `Placement`; a list of bool, one per chunk, if none is there.

    unpins: whether retrieving a chunk releases its request's pin; false if the engine ends its requests itself.
    writers: if there are any, only chunks that these have stored are placed.
    """

    instance: int
    shards: list[Shards]
    unpins: bool = True
    writers: tuple[str, ...] = ()


class Compare(_Message, frozen=True):
    """Hold the chunks that are there, for the client to compare with its blocks, as numbers (devices/comparison.py).
    Answer: their `Placement`, or the fields of `Comparison` if none is there. Nothing is stored.

    limit: the largest difference of equal KV. is_sample: whether a larger one puts the model into quarantine, which is
    refused where the server samples no hits; otherwise, the client's engine draws the consequences. has_experts:
    whether the model is a mixture of experts; then the limit is for the first chunk of a prompt, and others differ if
    they have nothing in common.
    """

    instance: int
    shards: list[Shards]
    limit: float
    is_sample: bool = False
    has_experts: bool = False


class Complete(_Message, frozen=True):
    """End an operation: its client copies no more. Answer: of a store, bool: whether all its chunks are stored; of a
    retrieve, a list of bool, one per chunk asked for; of a comparison, the fields of `Comparison`.

    operation, boot: from its `Placement`; a later server may use the same number. copied: whether all bytes were
    copied, or compared; else nothing is stored, loaded or compared. sums: one per place, in order: the checksum of the
    bytes in the arena (memory/extents.py) where `Place.is_summed`, else 0; of a comparison only where they differ from
    the blocks. differences: of a comparison, one list per place, as devices/comparison.py gives them.
    """

    operation: int
    boot: bytes
    copied: bool = True
    sums: list[int] = []
    differences: list[list[float]] = []


class Asked(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Prompt tokens that an engine needed when it scheduled requests, for lookups with `reports`.

    tokens: tokens that its own cache lacked. found: tokens of these that the depot had. own: tokens that its own cache
    had, within the chunks that were looked up. compared, computed: tokens of `found` that it computed: to compare them,
    and because that was sooner than loading them.
    """

    tokens: int = 0
    found: int = 0
    own: int = 0
    compared: int = 0
    computed: int = 0


NOTHING_ASKED = Asked()


class EndSession(_Message, frozen=True):
    """Release what `request` still pins. Answer: None.

    saved_tokens, saved_s: tokens that the engine did not have to compute, and the prefill time saved; 0 if the engine
    does not know, or the server takes them from its retrieves. model: the model of these tokens; empty for that of the
    client's last lookup. asked: the sums since the last EndSession. answers: whether the engine stores them; None if
    it does not say. copied, copied_bytes: shards that its workers have copied without asking again (`Places`), and
    their bytes.
    """

    request: str
    saved_tokens: int = 0
    saved_s: float = 0.0
    model: str = ""
    asked: Asked = NOTHING_ASKED
    answers: AnswersStatus | None = None
    copied: int = 0
    copied_bytes: int = 0


class ChunkSize(_Message, frozen=True):
    """Answer: tokens per chunk."""


class Noop(_Message, frozen=True):
    """Answer: "ok"."""


class Clear(_Message, frozen=True):
    """Drop all chunks of one model, or of all (empty), that are neither pinned nor being copied. Answer: None."""

    model: str = ""


class TakeLease(_Message, frozen=True):
    """Keep, or later drop, the longest prefix of `hashes` that is cached or being stored. Answer: its chunks so far.

    A lease belongs to a tenant, not to a client, lasts until it ends or the server does, and grows while more of its
    chunks are stored. It replaces one of the same name.

    kind, priority: see protocol/leases.py. ttl_s: seconds until it ends; 0 = never. drops: whether its chunks are then
    removed, as by `Drop`.
    """

    name: str
    kind: str
    model: str
    world_size: int
    blocks_in_chunk: int
    hashes: bytes
    salt: bytes = b""
    chunk_tokens: int = 0
    ttl_s: int = 0
    priority: int = NORMAL
    drops: bool = False


class EndLease(_Message, frozen=True):
    """End a lease. Answer: bool, whether there was one of that name. drops: whether its chunks are removed now."""

    name: str
    drops: bool = False


class Drop(_Message, frozen=True):
    """Remove a prompt's chunks from memory and tiers, from its end backwards. Answer: chunks removed from memory.

    It ends where another holder has a chunk, or another prompt's chunk follows it; the first `keep` chunks stay.
    """

    model: str
    world_size: int
    blocks_in_chunk: int
    hashes: bytes
    salt: bytes = b""
    chunk_tokens: int = 0
    keep: int = 0


class ListLeases(_Message, frozen=True):
    """List the leases of the client's tenant, or of all if it has none. Answer: a list of leases.LeaseStatus: at most
    1,000, those that hold most first."""


class ForgetChunks(_Message, frozen=True):
    """Remove chunks, also pinned ones, from memory and tiers: of models whose names have this prefix, and of one salt;
    empty means all. writer: only what this writer (as in Register) has stored, under any salt.

    Answer: the fields of `ForgetAnswer`.
    """

    model: str = ""
    salt: bytes = b""
    writer: str = ""


class Count(_Message, frozen=True):
    """Ask what a `ForgetChunks` of the same model and salt would remove from memory, without removing it.

    It is no flag of `ForgetChunks`: a server too old to know the flag would ignore it and forget, and it refuses an
    unknown message. Answer: a `ChunkTotal`.
    """

    model: str = ""
    salt: bytes = b""


class Inspect(_Message, frozen=True):
    """Ask where the chunks with these hashes are.

    Answer: a list of chunks.ChunkStatus of the chunks in memory, of models whose names have this prefix and of the
    client's tenant, if it has one; by namespace, each in the order of the prompt. BadRequest for more than 16 hashes,
    or chunks beyond 2,048.
    """

    model: str = ""
    hashes: bytes = b""


class Why(_Message, frozen=True):
    """Ask for the trail of a request, by its id or the unique beginning of it; empty: the last one that found nothing.

    Answer: a trails.Trail, of the client's tenant if it has one. UnknownRequest if none is kept.
    """

    request: str = ""


class Describe(_Message, frozen=True):
    """The token ids of consecutive chunks, for a server that publishes them (`Welcome.wants_tokens`). Answer: None.

    parent: hash of the chunk before the first; `keys.ROOT` for the first of a prompt. tokens: little-endian uint32,
    chunk_tokens per chunk, and after the last chunk those that its hash covers beyond it. Tokens that do not give the
    hashes are ignored.
    """

    parent: bytes
    hashes: bytes
    tokens: bytes
    chunk_tokens: int


class SetQuota(_Message, frozen=True):
    """Give a tenant, or its requests with a salt (as in Shards), a quota until the server ends; None takes it away.

    Answer: None. It is refused if the client has a tenant.
    """

    tenant: str
    quota: Quota | None
    salt: bytes = b""


class EndQuarantine(_Message, frozen=True):
    """Serve the chunks again that sampled hits have put into quarantine: of models whose names have this prefix, and of
    the client's tenant, if it has one. Answer: their number."""

    model: str = ""


class GetStatus(_Message, frozen=True):
    """Answer: a dict of counts."""


Copying: TypeAlias = Store | Retrieve | Compare
"""Requests that the server answers with a `Placement`, which the client completes."""
_Engines: TypeAlias = Register | Unregister | Lookup | Copying | Complete | EndSession | Describe
_Chunks: TypeAlias = Clear | TakeLease | EndLease | Drop | ListLeases | ForgetChunks | Count | EndQuarantine
Request: TypeAlias = Hello | Prove | ChunkSize | Noop | GetStatus | Inspect | Why | SetQuota | _Engines | _Chunks


class Proof(_Shown, array_like=True, frozen=True):
    """Answer to `Hello`: the server's arena, whose lock shows that it lives, and the proof that it owns it."""

    version: int
    arena: str
    nonce: bytes
    mac: bytes


class ChunkTotal(msgspec.Struct, frozen=True):
    """A number of chunks, and their bytes."""

    chunks: int
    bytes: int


class Comparison(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to a `Compare`. chunks: that were there and were compared. worst: the largest difference. unknown: chunks
    that were there, and whose data types are not known. writers: who has stored some of either, up to which chunk."""

    chunks: int = 0
    worst: float = 0.0
    unknown: int = 0
    writers: tuple[WriterRun, ...] = ()


class Place(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard's bytes in the arena. extents: offset and size, in the order of the bytes. is_summed: whether the client
    is to compute their checksum. checksum: that they must have, in `Places` only; 0: they need not be summed."""

    extents: tuple[tuple[int, int], ...]
    is_summed: bool = False
    checksum: int = 0


class Placement(_Message, frozen=True):
    """Where the bytes of an operation's chunks belong, or are. They stay there until the client completes it or dies.

    arena, boot: the arena, and the boot id of the server that this is true of: a later one may have moved chunks.
    chunks: the positions of the placed chunks among all that the request names, ascending. places: of each of them.
    """

    operation: int
    arena: str
    boot: bytes
    chunks: list[int]
    places: list[Place]


class ForgetAnswer(msgspec.Struct, frozen=True):
    """Answer to a `ForgetChunks`. removed: chunks removed from `memory` and from each tier, by its name; what a writer
    has stored counts 0 in tiers, which remove it when it is read. left: by the same names, or `error`, why chunks may
    remain."""

    removed: dict[str, int]
    left: dict[str, str] = {}


class Places(msgspec.Struct, array_like=True, frozen=True):
    """Where the last chunks of a lookup's answer are in the server's arena, so that engines can load them without
    asking again. They stay there while the request has its session. None: these chunks are loaded by `Retrieve`.

    withdrawals: as the arena's header says; later, the chunks may be forgotten, corrupt or in quarantine. first: number
    of the first of these chunks. size: bytes of a shard. ranks: the places of each rank's shards.
    """

    withdrawals: int
    first: int
    size: int
    ranks: list[list[Place]]


class Hit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to a `Lookup`: what was found and, unless the lookup pins nothing, is pinned. A miss has no chunks.

    chunks: whole chunks. tail: the number of the lookup's tail behind them, which was found, too; None: none. writers:
    who has stored what was found, if the lookup asks. places: where its last chunks are, if the lookup asks.
    """

    chunks: int = 0
    tail: int | None = None
    writers: tuple[WriterRun, ...] = ()
    places: Places | None = None


MISS = Hit()


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """Answer to `Prove`: the chunk size.

    lookup_s: seconds that the server may wait for tiers before it answers a lookup. wants_tokens: whether it publishes
    KV events, for which it needs `Describe`. max_hint_s, max_hint_priority: the longest time and the highest priority
    of leases that requests ask for; with 0 s, requests may neither keep nor remove chunks. has_free_chunks: whether
    engines choose their own chunk size; otherwise their chunks have at least `chunk_size` tokens. verify_hits: the
    share of hits that engines compute and compare.
    """

    version: int
    chunk_size: int
    lookup_s: float = 0.0
    wants_tokens: bool = False
    max_hint_s: int = HINT_S
    max_hint_priority: int = NORMAL
    has_free_chunks: bool = False
    verify_hits: float = 0.0


class Answer(_Message, frozen=True):
    """A result that is no `Placement`."""

    value: object


class Failure(_Message, frozen=True):
    """An error: a code of errors.py and a sentence."""

    code: str
    message: str


_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Answer | Placement | Failure] = msgspec.msgpack.Decoder(Answer | Placement | Failure)
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
        return number, errors.ProtocolError(f"a frame of {len(frame)} bytes is not a message")
    try:
        return number, _requests.decode(memoryview(frame)[ID_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return number, errors.ProtocolError(f"not a message of protocol version {VERSION}: {exc}")


def encode_answer(number: bytes, boot: bytes, value: object) -> bytes:
    """One frame, server to client: the result of request `number`."""
    return number + boot + _encode(value if type(value) is Placement else Answer(value))  # isinstance takes longer


def encode_failure(number: bytes, boot: bytes, error: errors.KVDepotError) -> bytes:
    """One frame, server to client: request `number` failed. Long messages are cut."""
    return number + boot + _encode(Failure(error.code, str(error)[:MAX_ERROR]))


def decode_reply(frame: bytes) -> tuple[int, bytes, object]:
    """Id, boot id, and the value or an error from errors.py (returned, not raised): ProtocolError for a body that is
    none. Raises ProtocolError for a frame too short for a reply."""
    head = ID_BYTES + BOOT_BYTES
    if len(frame) < head:
        raise errors.ProtocolError(f"a frame of {len(frame)} bytes is not a reply")
    number, boot = int.from_bytes(frame[:ID_BYTES], "little"), frame[ID_BYTES:head]
    try:
        body = _replies.decode(memoryview(frame)[head:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return number, boot, errors.ProtocolError(f"not a reply of protocol version {VERSION}: {exc}")
    match body:
        case Answer():
            return number, boot, body.value
        case Placement():
            return number, boot, body
    return number, boot, errors.from_code(body.code, body.message)
