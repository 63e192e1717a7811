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
"""The most characters in a request id or a model name; longer ones are refused."""
MAX_CHUNKS = 1 << 16
"""The most chunks that one request may name."""
MAX_PLACES, MAX_PLACED_BYTES = 64, 32 << 20
"""The most last chunks whose places the answer to a lookup gives, and the most bytes of them on each rank."""
MAX_WRITER_RUNS = 16
"""The most runs of chunks whose writers an answer names; the writers of the chunks behind these runs stay unknown."""
MAX_TAILS = 64
"""The most tails that one lookup may name."""
MAX_PLACE = 1 << 31
"""The highest place in a queue (`Lookup.place`); the lowest is its negative."""
MAX_GROUPS = 64
"""The most KV cache groups of one model."""
MAX_CHUNK_TOKENS = 1 << 20
MAX_FACTS = 64
"""The most facts of one engine."""
MAX_CLIENT_NAME = 256
"""The most characters in the name of an engine or of a liveness file."""
MAX_TOPIC = 1024
"""The most bytes of a topic for KV events."""
MAX_ERROR = 1000
"""The most characters of an error's message that are sent; the rest is cut off."""


class _Shown(msgspec.Struct, frozen=True):
    def __repr__(self) -> str:
        """Show only the number of bytes in a byte string, because nonces and proofs must not be in logs."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (f"{name}={f'{len(each)} bytes' if isinstance(each, bytes) else repr(each)}" for name, each in values)
        return f"{type(self).__name__}({', '.join(shown)})"


class _Message(_Shown, tag=True, array_like=True, frozen=True, gc=False):
    pass


class Hello(_Message, frozen=True):
    """The first message. Answer: the fields of `Proof`. The version is the first field in every protocol version.

    liveness: the name of the client's liveness file (memory/shm.py). nonce: fresh random bytes. sealed: whether
    messages after `Prove` are sealed. engine, host, pid: only for log, journal and status; all clients of an engine
    give the same `engine`.
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

    reach: the number of the group's chunks before a boundary that the engine needs to resume there. 0: all from the
    prompt's start (full attention, MLA); n: the last n (a sliding window); 1: the last one (a state). size: bytes of
    one chunk on this rank. fingerprint: the fingerprint of this rank's layout of the group; each group has another
    one.
    """

    reach: int
    blocks_in_chunk: int
    size: int
    fingerprint: bytes


class Register(_Message, frozen=True):
    """Name the paged KV tensors of one KV cache group `instance`. Answer: None. The server maps nothing.

    model to chunk_tokens: empty if the caller does not know them; then the first store gives them. chunk_tokens: 0: the
    server's chunk size. groups: all KV cache groups of the model, of which these tensors are number `group`; empty for
    a single group that resuming needs whole. topic: the topic of the engine's KV events for routers; empty: none.
    writer: a name of the engine, which marks the chunks that it stores; engines with one name compute the same KV.
    facts: shown beside the facts of another engine whose KV differs. fault: why this worker can neither store nor load,
    such as a failed self-test; then all its copies are refused. Empty: it can.
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
    """A chunk with fewer tokens than others: the end of a prompt or of an answer. It has all bytes of its blocks, but
    only its first tokens count. chunks: the number of whole chunks before it."""

    chunks: int
    key: bytes


class WriterRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A run of chunks of which `writer` (see Register; empty: not known) has stored parts: from the end of the run
    before to chunk `end`, counted from the prompt's start. Runs with the same end have the same chunks."""

    end: int
    writer: str


class Lookup(_Message, frozen=True):
    """Find the longest cached prefix of `hashes`, and pin its chunks for `request`. Answer: the fields of `Hit`.

    The prefix ends where every KV cache group of the model can be resumed, on every rank. The answer may take half a
    second while chunks of the prompt are being stored, and with tiers `Welcome.lookup_s` more.

    readers: retrieves expected per chunk (one per rank), after which its pin ends; 0: no engine asks, so that no chunk
        is retrieved and the lookup is not counted.
    blocks_in_chunk: blocks in a chunk of the first group; 0: not known. chunk_tokens: tokens per chunk; 0: the server's
    chunk size. chained: whether the hashes are a chain from the prompt's start. salt: see Shards. reports: whether
    `EndSession.asked` will count the tokens, so that this lookup does not. speed: tokens per second that the engine
    computes; chunks that it computes faster than a tier loads them are not loaded; 0: not known, so all are loaded.
    hurries: repeats a lookup that has no answer yet; it is not counted again, and answered at once from memory.
    queued: the request waits in its engine's queue, so the answer may wait until requests before it end their pins.
    tails: the ends within a chunk that the prefix may have, the longest first.
    pins: whether the chunks are pinned; if not, there is no session to end, and the chunks are the last to be evicted.
    own: leading chunks in the engine's own cache, which do not count as asked for. writers: whether the answer says who
    has stored the chunks. layout: the fingerprint of all ranks' tensors, if they load small hits without asking again;
    the answer then has `Places`.
    place: the place of a queued request in its engine's queue, from -MAX_PLACE to MAX_PLACE: the lowest is first, and
    equal places are in the order of arrival. Places order the lookups of one client only.
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

    parent: hash of the chunk before the first (the chain's root for chunk 0); empty if the hashes are the engine's own.
    depth: number of chunks before the first, from the prompt's start (only with `parent`). blocks: the number of blocks
    of a chunk. salt: 16 bytes that identify the prompt's cache salt (keys.salt_tag), so that it can be forgotten;
    empty: none. continues: in the store of a `Tail`, the key of an earlier tail that the new one makes useless; empty:
    none.
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
    """Reserve room for the missing chunks. Answer: their `Placement`; if there is nothing to copy, True or False as in
    the answer to `Complete`."""

    instance: int
    shards: list[Shards]


class Retrieve(_Message, frozen=True):
    """Hold the chunks that memory has. Answer: their `Placement`; if it has none, a list of bool, one per chunk.

    unpins: whether retrieving a chunk releases its request's pin; false if the engine ends its requests itself.
    writers: only chunks that these have stored are placed; empty: chunks of all writers.
    """

    instance: int
    shards: list[Shards]
    unpins: bool = True
    writers: tuple[str, ...] = ()


class Compare(_Message, frozen=True):
    """Hold the chunks that memory has, for the client to compare with its blocks, as numbers (devices/comparison.py).
    Answer: their `Placement`, or the fields of `Comparison` if memory has none. Nothing is stored.

    limit: the largest difference of equal KV. is_sample: whether a larger difference puts the model into quarantine;
    refused by a server that samples no hits. If false, the client's engine draws the consequences. has_experts: whether
    the model is a mixture of experts; then the limit holds for the first chunk of a prompt, and other chunks differ
    only if they have nothing in common.
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
    copied, or compared; if not, nothing is stored, loaded or compared. sums: one per place, in order: the checksum of
    the bytes in the arena (memory/extents.py) if `Place.is_summed`, else 0; in a comparison only if the bytes differ
    from the blocks. differences: of a comparison, one list per place, as devices/comparison.py returns them.
    """

    operation: int
    boot: bytes
    copied: bool = True
    sums: list[int] = []
    differences: list[list[float]] = []


class Asked(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Prompt tokens that an engine needed when it scheduled requests, for lookups with `reports`.

    tokens: tokens that the engine's own cache lacked. found: tokens of these that the depot had. own: tokens of the
    looked-up chunks that its own cache had. compared: tokens of `found` that it computed to compare them. computed:
    tokens of `found` that it computed because loading them would have taken longer.
    """

    tokens: int = 0
    found: int = 0
    own: int = 0
    compared: int = 0
    computed: int = 0


NOTHING_ASKED = Asked()


class EndSession(_Message, frozen=True):
    """Release the chunks that `request` still pins. Answer: None.

    saved_tokens, saved_s: tokens that the engine did not have to compute, and the prefill time saved; 0 if the engine
    does not know, or the server takes them from its retrieves. model: the model of these tokens; empty: the model of
    the client's last lookup. asked: the sums since the last EndSession. answers: whether the engine stores decoded
    tokens; None: it does not say. copied, copied_bytes: shards that its workers have copied without asking again
    (`Places`), and their bytes.
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
    """Drop all chunks of a model (empty: of all models) that are neither pinned nor being copied. Answer: None."""

    model: str = ""


class TakeLease(_Message, frozen=True):
    """Keep, or later drop, the longest prefix of `hashes` that is cached or being stored. Answer: its present chunks.

    A lease belongs to a tenant, not to a client. It lasts until its end or the server's, grows while more of its chunks
    are stored, and replaces the tenant's lease of the same name.

    kind, priority: see protocol/leases.py. ttl_s: seconds until it ends; 0: never. drops: whether its chunks are
    removed at its end, as by `Drop`.
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
    """Remove a prompt's chunks from memory and tiers, from its end backwards. Answer: number removed from memory.

    It ends at a chunk that somebody else holds, or that another prompt's chunk follows. The first `keep` chunks
    stay.
    """

    model: str
    world_size: int
    blocks_in_chunk: int
    hashes: bytes
    salt: bytes = b""
    chunk_tokens: int = 0
    keep: int = 0


class ListLeases(_Message, frozen=True):
    """List the leases of the client's tenant; without a tenant, of all. Answer: a list of at most 1,000
    leases.LeaseStatus, those that hold the most bytes first."""


class ForgetChunks(_Message, frozen=True):
    """Remove chunks, also pinned ones, from memory and tiers. model: a prefix of the names of their models; empty: all.
    salt: their salt; empty: any. writer: only chunks that this writer (see Register) has stored, under any salt.

    Answer: the fields of `ForgetAnswer`.
    """

    model: str = ""
    salt: bytes = b""
    writer: str = ""


class Count(_Message, frozen=True):
    """Ask how many chunks a `ForgetChunks` of the same model and salt would remove from memory, and remove none.

    This is no flag of `ForgetChunks`, because an old server would ignore the flag and forget, but it refuses an unknown
    message. Answer: a `ChunkTotal`.
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
    """Ask for the trail of a request. request: its id, or a unique prefix; empty: the last one that found nothing.

    Answer: a trails.Trail, only of the client's tenant if it has one. UnknownRequest if the server has no such
    trail.
    """

    request: str = ""


class Describe(_Message, frozen=True):
    """The token ids of consecutive chunks, for a server that publishes them (`Welcome.wants_tokens`). Answer: None.

    parent: hash of the chunk before the first; `keys.ROOT` for the first of a prompt. tokens: little-endian uint32,
    chunk_tokens per chunk, followed by the tokens after the last chunk that its hash also covers. Tokens that do not
    give the hashes are ignored.
    """

    parent: bytes
    hashes: bytes
    tokens: bytes
    chunk_tokens: int


class SetQuota(_Message, frozen=True):
    """Give a tenant, or its requests with a salt (see Shards), a quota until the server ends; None removes the quota.

    Answer: None. The request is refused if the client has a tenant.
    """

    tenant: str
    quota: Quota | None
    salt: bytes = b""


class EndQuarantine(_Message, frozen=True):
    """End the quarantine of models whose names have this prefix; only of the client's tenant, if it has one. Answer:
    the number of these models."""

    model: str = ""


class GetStatus(_Message, frozen=True):
    """Answer: a dict of counts."""


Copying: TypeAlias = Store | Retrieve | Compare
"""Requests that the server answers with a `Placement`, which the client completes."""
_Engines: TypeAlias = Register | Unregister | Lookup | Copying | Complete | EndSession | Describe
_Chunks: TypeAlias = Clear | TakeLease | EndLease | Drop | ListLeases | ForgetChunks | Count | EndQuarantine
Request: TypeAlias = Hello | Prove | ChunkSize | Noop | GetStatus | Inspect | Why | SetQuota | _Engines | _Chunks


class Proof(_Shown, array_like=True, frozen=True):
    """Answer to `Hello`: the server's arena, whose lock shows that the server lives, and the proof that it owns it."""

    version: int
    arena: str
    nonce: bytes
    mac: bytes


class ChunkTotal(msgspec.Struct, frozen=True):
    """A number of chunks, and their bytes."""

    chunks: int
    bytes: int


class Comparison(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to a `Compare`. chunks: number of compared chunks. worst: their largest difference. unknown: number of
    chunks in memory whose data types are not known. writers: who has stored these, up to which chunk."""

    chunks: int = 0
    worst: float = 0.0
    unknown: int = 0
    writers: tuple[WriterRun, ...] = ()


class Place(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard's bytes in the arena. extents: offset and size, in the order of the bytes. is_summed: whether the client
    must compute their checksum. checksum: the one that they must have, in `Places` only; 0: unknown."""

    extents: tuple[tuple[int, int], ...]
    is_summed: bool = False
    checksum: int = 0


class Placement(_Message, frozen=True):
    """Where the bytes of an operation's chunks belong, or are. They stay there until the operation ends.

    arena, boot: the arena's name, and the server's boot id; a later server may have moved chunks. chunks: the positions
    of the placed chunks among those of the request, ascending. places: the place of each of these chunks.
    """

    operation: int
    arena: str
    boot: bytes
    chunks: list[int]
    places: list[Place]


class ForgetAnswer(msgspec.Struct, frozen=True):
    """Answer to a `Forget`. removed: numbers of chunks removed, by `memory` and the names of tiers. A writer's chunks
    count 0 in tiers, which remove them when they are read. left: why chunks may remain, by the same names or
    `error`."""

    removed: dict[str, int]
    left: dict[str, str] = {}


class Places(msgspec.Struct, array_like=True, frozen=True):
    """Where the last chunks of a lookup's answer are in the server's arena, so that engines can load them without
    asking again. They stay there while the request has its session.

    withdrawals: the count in the arena's header; once it changes, the chunks may be forgotten, corrupt or in
    quarantine. first: number of the first of these chunks. size: bytes of a shard. ranks: the places of each rank's
    shards.
    """

    withdrawals: int
    first: int
    size: int
    ranks: list[list[Place]]


class Hit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to a `Lookup`: the chunks that were found and, if the lookup pins, are pinned now. A miss has no chunks.

    chunks: the number of whole chunks. tail: the place in `Lookup.tails` of the tail found behind them; None: no tail.
    writers: who has stored them, if the lookup asks. places: where the last chunks are, if it asks; None: `Retrieve`
    loads them.
    """

    chunks: int = 0
    tail: int | None = None
    writers: tuple[WriterRun, ...] = ()
    places: Places | None = None


MISS = Hit()


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """Answer to `Prove`: what a client must know of the server's settings.

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
    """A result that is not a `Placement`."""

    value: object


class Failure(_Message, frozen=True):
    """An error: a code of errors.py and a sentence."""

    code: str
    message: str


_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Answer | Placement | Failure] = msgspec.msgpack.Decoder(Answer | Placement | Failure)
_encode = msgspec.msgpack.Encoder().encode


def encode_request(number: int, request: Request) -> bytes:
    try:
        return number.to_bytes(ID_BYTES, "little") + _encode(request)
    except (TypeError, ValueError, OverflowError) as exc:
        raise errors.BadRequest(f"{type(request).__name__} cannot be sent: {exc}") from exc


def number_of(frame: bytes) -> bytes:
    """The id in a request's frame; zeros if the frame is too short."""
    return frame[:ID_BYTES] if len(frame) >= ID_BYTES else bytes(ID_BYTES)


def decode_request(frame: bytes) -> tuple[bytes, Request | errors.ProtocolError]:
    """The id in a request's frame, and the request or the error of its decoding."""
    number = number_of(frame)
    if len(frame) < ID_BYTES:
        return number, errors.ProtocolError(f"a frame of {len(frame)} bytes is not a message")
    try:
        return number, _requests.decode(memoryview(frame)[ID_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return number, errors.ProtocolError(f"not a message of protocol version {VERSION}: {exc}")


def encode_answer(number: bytes, boot: bytes, value: object) -> bytes:
    return number + boot + _encode(value if type(value) is Placement else Answer(value))  # isinstance takes longer


def encode_failure(number: bytes, boot: bytes, error: errors.KVDepotError) -> bytes:
    """The frame of the error of request `number`. Long messages are cut."""
    return number + boot + _encode(Failure(error.code, str(error)[:MAX_ERROR]))


def decode_reply(frame: bytes) -> tuple[int, bytes, object]:
    """The id, the boot id, and the value or an error from errors.py (returned, not raised; ProtocolError if the body
    cannot be decoded). Raises ProtocolError if the frame is too short for a reply."""
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
