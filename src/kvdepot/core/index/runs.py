"""A reservation: the run of chunks that is asked for, the case of each chunk, and the outcome. Queries and plain data.

`Index.reserve` asks and then acts: `classify` finds the case of each chunk and changes nothing, then space is made, and
then the plan is carried out, which cannot fail.

There are cases because a run meets chunks in all states: other engines store the same prompts, tiers load them, and
removals hide them. A slow load must not block an engine that has computed the same bytes, so a store takes its place
(LATE). A run ends at the first chunk without space, and at a MISFIT: no lookup would find the chunks behind it.

Doubts: a load is given up even if it is nearly done, because nobody knows that here. KNOWN covers several reasons,
because nothing is done about any of them.
"""

from __future__ import annotations

from enum import Enum
from math import inf

import msgspec

from kvdepot.core.index import states
from kvdepot.core.index.chains import link
from kvdepot.core.index.chunk import Account, Chunk, Namespace
from kvdepot.memory.allocator import Allocator
from kvdepot.protocol.keys import HASH_BYTES


class Run(msgspec.Struct, frozen=True, gc=False):
    """Consecutive chunks of one prompt, of which one rank's shards are to be reserved."""

    hashes: bytes  # 32 bytes per chunk
    size: int  # bytes of one shard
    parent: bytes = b""  # the hash of the chunk before the first one; empty: unknown, so that all of them are loose
    position: int = 0  # place of the first chunk in its prompt, counted from 1
    salt: bytes = b""  # the salt that the chunks are stored under
    continues: bytes = b""  # the key of a tail that these chunks make useless, so that the tail is evicted first
    depth: float = inf
    """The depth (wants.py) of the request that these chunks are loaded for; infinity: they are not loaded for one."""


class Refusal(Enum):
    """Why the rest of a run was not reserved."""

    NO_ROOM = "nothing more can be evicted for it"
    OVER_CAP = "its account would exceed its cap, and nothing of that account can be evicted now"
    WANTED = "requests that wait in their engines' queues are going to read what could be evicted for it"
    OTHER_SIZE = "memory has the shard in another size, which the new bytes do not fit"


class ChunkCase(Enum):
    """The case of one chunk of a run: the step that a reservation takes about it. The first three need space."""

    NEW = "the index does not have it: it is inserted, with this rank's shard"
    LACKING = "it lacks this rank's shard, which it gets"
    LATE = "a tier is loading this rank's shard: the load is given up, but without space, it goes on"
    SPOILED = "this rank's shard is corrupt, and nobody uses its bytes: it is written again, in its place"
    OUTDATED = "it is pending removal as it was too old, and its bytes were computed again: it is renewed"
    KNOWN = "it is there, or others write or read it, or it is another account's: nothing is done"
    MISFIT = "this rank's shard is there in another size, and not sealed: the run ends before it"


NEW, LACKING, LATE, SPOILED, OUTDATED, KNOWN, MISFIT = ChunkCase  # attributes of an enum are slow to get


class Plan(msgspec.Struct, gc=False):
    """The case of each chunk of a run, with its key, and the chunk if it exists: what a reservation is going to do.

    wall: when the bytes were computed (seconds since 1970); None: they come from a tier. taken: bytes of the arena that
    one shard takes. count: the number of chunks that need space.
    """

    namespace: Namespace
    rank: int
    run: Run
    wall: int | None
    account: Account
    taken: int
    keys: list[bytes]
    steps: list[tuple[bytes, Chunk | None, ChunkCase]] = []
    count: int = 0


def classify(namespace: Namespace, rank: int, run: Run, wall: int | None, account: Account) -> Plan:
    """Find the case of each chunk of a run. account: the account that pays for the chunks. wall: see `Plan`."""
    hashes, chunks = run.hashes, namespace.chunks
    keys = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    plan = Plan(namespace, rank, run, wall, account, Allocator.rounded(run.size), keys)
    steps = [(key, chunk := chunks.get(key), NEW if chunk is None else _case_of(chunk, plan)) for key in keys]
    if len(set(keys)) < len(keys):  # the second time that a run names a chunk, the first has reserved it
        first = {key: at for at, key in reversed(list(enumerate(keys)))}
        steps = [step if first[step[0]] == at else (*step[:2], KNOWN) for at, step in enumerate(steps)]
    cases = [case for _, _, case in steps]
    plan.steps, plan.count = steps, sum(map(cases.count, (NEW, LACKING, LATE)))
    return plan


def needed(plan: Plan) -> list[Chunk]:
    """The chunks that must stay until a plan is carried out: those of its run, and the parents of its new chunks."""
    run, chunks = plan.run, [chunk for _, chunk, _ in plan.steps if chunk is not None]
    new = [key for key, chunk, _ in plan.steps if chunk is None]
    if not plan.namespace.reach:
        new = new[:1] if new[:1] == plan.keys[:1] else []  # the parents of the others are in the run
    return chunks + [
        before
        for key in new
        if (before := link(plan.namespace, key, run.parent, run.position, run.salt)[0]) is not None
    ]


def _case_of(chunk: Chunk, plan: Plan) -> ChunkCase:
    shard, is_own, is_load = chunk.shards.get(plan.rank), chunk.account is plan.account, plan.wall is None
    is_pending = chunk.state is states.PENDING_REMOVAL
    if shard is None:
        return LACKING if is_own else KNOWN
    if shard.state is states.SEALED:
        return OUTDATED if is_pending and is_own and not is_load else KNOWN
    if shard.size != plan.run.size:
        return MISFIT
    if is_own and shard.state is states.CORRUPT and is_free_to_write(chunk, is_load):
        return SPOILED
    if is_own and shard.state is states.LOADING:
        # A renewed chunk must not get shards that others began to write before the renewal.
        others = any(each.is_open for each in chunk.shards.values() if each is not shard)
        return KNOWN if is_pending and others else LATE
    return KNOWN


def is_free_to_write(chunk: Chunk, is_load: bool = False) -> bool:
    """Whether a corrupt shard of a chunk can be rewritten: nobody reads the bytes of its other shards.

    A store that renews a chunk pending removal must not get shards that an earlier reservation still writes.
    """
    if chunk.state is states.PENDING_REMOVAL and not is_load:
        return not chunk.holds
    return chunk.holds == sum(shard.is_open for shard in chunk.shards.values())


class Reservation(msgspec.Struct, gc=False):
    """The result of reserving a run. The shards of `chunks` may be written; `seal` or `discard` ends their hold."""

    chunks: list[Chunk]
    places: list[int]  # the places of `chunks` in the run
    known: int = 0  # chunks that exist, or that others write or still read
    refusal: Refusal | None = None
    refused: int = 0  # the first refused chunk and all behind it, which are useless without it
