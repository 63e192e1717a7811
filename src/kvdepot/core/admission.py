"""Checks of requests, made before anything is done for them. Pure functions; used on the deciding thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvdepot.errors import BadRequest
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, tenant_salt
from kvdepot.tiers.format import SALT_BYTES

_MOST_SAVED, _MOST_COPIED = 1 << 32, 1 << 50
"""The most tokens, seconds or shards, and the most bytes, that one request may report."""
_SAMPLED = 16
"""With `verify = "sampled"`, one chunk in this many is checksummed."""
_MOST_BLOCKS = 1 << 20
"""The most blocks of a chunk."""
_MOST_MODE = 16
"""The most characters of an engine's `save_decode`."""


def summed_below(verify: str) -> int:
    """A chunk is checksummed if the first byte of its key is below this, so that store and retrieve agree."""
    return {"always": 256, "sampled": 256 // _SAMPLED}.get(verify, 0)


def check(request: wire.Request) -> int:
    """The number of chunks that a request names; 0 if its work does not depend on a list of chunks. Raises BadRequest
    unless what a lookup, copy or registration says is within bounds."""
    match request:
        case wire.Lookup():
            check_lookup(request)
        case wire.Store() | wire.Retrieve() | wire.Compare():
            chunks = sum(len(part.hashes) // HASH_BYTES or 1 for part in request.shards)
            for part in request.shards if chunks <= wire.MAX_CHUNKS else ():  # the caller refuses more
                check_shards(part)
            return chunks
        case wire.Register():
            check_facts(request)
    hashes: bytes = getattr(request, "hashes", b"")
    return len(hashes) // HASH_BYTES


def check_hashes(hashes: bytes) -> None:
    if not hashes or len(hashes) % HASH_BYTES:
        raise BadRequest(f"{len(hashes)} bytes are not a list of {HASH_BYTES}-byte hashes")


def check_prompt(name: str, request: wire.Lookup | wire.TakeLease | wire.Drop) -> None:
    """Raise BadRequest unless a prompt is within bounds. name: the name of the request or of the lease."""
    if request.hashes or not getattr(request, "tails", ()):
        check_hashes(request.hashes)
    check_names(name, request.model)
    check_salt(request.salt)
    check_chunk_tokens(request.chunk_tokens)


def check_lookup(request: wire.Lookup) -> None:
    """Raise BadRequest unless a lookup is within bounds, and its tails follow its chunks."""
    check_prompt(request.request, request)
    if not 0.0 <= request.speed < float("inf"):
        raise BadRequest(f"{request.speed} tokens per second")
    if not 0 <= request.own <= len(request.hashes) // HASH_BYTES:
        raise BadRequest(f"{request.own} chunks of the engine's own among {len(request.hashes) // HASH_BYTES}")
    if not -wire.MAX_PLACE <= request.place <= wire.MAX_PLACE:
        raise BadRequest(f"place {request.place} in a queue is not between {-wire.MAX_PLACE} and {wire.MAX_PLACE}")
    if not request.tails:
        return
    if len(request.tails) > wire.MAX_TAILS:
        raise BadRequest(f"{len(request.tails)} tails are more than {wire.MAX_TAILS}")
    chunks = len(request.hashes) // HASH_BYTES
    if any(len(tail.key) != HASH_BYTES or not 0 <= tail.chunks <= chunks for tail in request.tails):
        raise BadRequest(f"a tail has no hash of {HASH_BYTES} bytes, or does not follow one of {chunks} chunks")


def check_names(request: str, model: str) -> None:
    for what, name in (("request id", request), ("model name", model)):
        if len(name) > wire.MAX_REQUEST_ID:
            raise BadRequest(f"a {what} of {len(name)} characters is longer than {wire.MAX_REQUEST_ID}")


def check_hello(hello: wire.Hello) -> None:
    for what, name in (("liveness file", hello.liveness), ("engine", hello.engine), ("host", hello.host)):
        if len(name) > wire.MAX_CLIENT_NAME:
            raise BadRequest(f"the {what}'s name of {len(name)} characters is longer than {wire.MAX_CLIENT_NAME}")


def check_report(request: wire.EndSession) -> None:
    """Raise BadRequest unless what an engine reports about a request is within bounds."""
    check_names("", request.model)
    if not (0 <= request.saved_tokens <= _MOST_SAVED and 0.0 <= request.saved_s <= _MOST_SAVED):
        raise BadRequest(f"saved_tokens {request.saved_tokens} or saved_s {request.saved_s} is out of range")
    if not (0 <= request.copied <= _MOST_SAVED and 0 <= request.copied_bytes <= _MOST_COPIED):
        raise BadRequest(f"{request.copied} shards of {request.copied_bytes} bytes are out of range")
    asked = request.asked
    is_whole = min(asked.compared, asked.computed) >= 0 and asked.compared + asked.computed <= asked.found
    if not (is_whole and asked.found <= asked.tokens <= _MOST_SAVED and 0 <= asked.own <= _MOST_SAVED):
        raise BadRequest(f"{asked} is out of range")
    said = request.answers
    if said is not None and not (len(said.mode) <= _MOST_MODE and 0.0 <= (said.share or 0.0) <= 1.0):
        raise BadRequest(f"a mode of {len(said.mode)} characters, or the share {said.share}, is out of range")


def check_salt(salt: bytes) -> None:
    if len(salt) not in (0, SALT_BYTES):
        raise BadRequest(f"a salt has {len(salt)} bytes instead of {SALT_BYTES}")


def stored_salts(ttls_s: Mapping[bytes, int], tenants: Iterable[str]) -> dict[bytes, int]:
    """Limits of age in seconds by the salts that chunks are stored under. ttls_s: the same by salts that clients
    name."""
    return {tenant_salt(tenant, salt): ttl_s for tenant in ("", *tenants) for salt, ttl_s in ttls_s.items()}


def check_shape(world_size: int, rank: int) -> None:
    if not 1 <= world_size <= 1 << 16 or not 0 <= rank < world_size:
        raise BadRequest(f"rank {rank} of world size {world_size}")


def check_chunk_tokens(chunk_tokens: int) -> None:
    if not 0 <= chunk_tokens <= wire.MAX_CHUNK_TOKENS:
        raise BadRequest(f"a chunk of {chunk_tokens} tokens; the limit is {wire.MAX_CHUNK_TOKENS}")


def check_topic(topic: str) -> None:
    size = len(topic.encode())
    if size > wire.MAX_TOPIC:
        raise BadRequest(f"a topic of {size} bytes is longer than {wire.MAX_TOPIC}")


def check_facts(request: wire.Register) -> None:
    """Raise BadRequest unless the facts in a registration are within bounds."""
    facts = request.facts
    longest = max(map(len, [request.writer, *facts, *facts.values()]))
    if len(facts) > wire.MAX_FACTS or longest > wire.MAX_CLIENT_NAME:
        raise BadRequest(
            f"{len(facts)} facts of up to {longest} characters; the limits are {wire.MAX_FACTS} and "
            f"{wire.MAX_CLIENT_NAME}"
        )


def check_description(request: wire.Describe) -> None:
    """Raise BadRequest unless there are tokens for every chunk, and for at most one more that the last hash covers."""
    check_hashes(request.hashes)
    check_chunk_tokens(request.chunk_tokens)
    chunks, tokens = len(request.hashes) // HASH_BYTES, len(request.tokens) / 4
    if not request.chunk_tokens or not 0 <= tokens / request.chunk_tokens - chunks <= 1 or len(request.tokens) % 4:
        raise BadRequest(f"{tokens:g} token ids for {chunks} chunks of {request.chunk_tokens} tokens")
    if len(request.parent) != HASH_BYTES:
        raise BadRequest(f"parent is not a hash of {HASH_BYTES} bytes")


def check_groups(request: wire.Register) -> None:
    """Raise BadRequest unless a registration's KV cache groups agree with its layout, and differ from each other."""
    groups, number = request.groups, request.group
    check_chunk_tokens(request.chunk_tokens)
    if not groups and not number:
        return
    if not request.model:
        raise BadRequest("KV cache groups without a model")
    if not 0 <= number < len(groups) <= wire.MAX_GROUPS:
        raise BadRequest(f"KV cache group {number} of {len(groups)}; the limit is {wire.MAX_GROUPS}")
    for i, group in enumerate(groups):
        if not 0 <= group.reach <= wire.MAX_CHUNKS or group.blocks_in_chunk < 1 or len(group.fingerprint) != 32:
            raise BadRequest(
                f"KV cache group {i}: {group.reach} chunks of reach, {group.blocks_in_chunk} blocks a chunk"
            )
        if group.size < 1:
            raise BadRequest(f"KV cache group {i}: a chunk of {group.size} bytes")
    if len({group.fingerprint for group in groups}) != len(groups):
        raise BadRequest("two KV cache groups have the same layout")
    mine, layout = groups[number], request.layout
    if mine.blocks_in_chunk != request.blocks_in_chunk or mine.fingerprint != layout.fingerprint:
        raise BadRequest(f"KV cache group {number} is not the registered layout")
    if mine.size != layout.block_bytes * mine.blocks_in_chunk:
        raise BadRequest(
            f"KV cache group {number}: {mine.blocks_in_chunk} blocks of {layout.block_bytes} bytes are not {mine.size}"
        )


def check_shards(part: wire.Shards) -> None:
    """Raise BadRequest unless a part names whole chunks of possible size, place and owner."""
    check_hashes(part.hashes)
    check_names(part.request, part.model)
    check_shape(part.world_size, part.rank)
    if not 1 <= part.blocks <= _MOST_BLOCKS:
        raise BadRequest(f"a chunk of {part.blocks} blocks; the limit is {_MOST_BLOCKS}")
    if part.parent and (len(part.parent) != HASH_BYTES or part.depth < 0):
        raise BadRequest(f"parent is not a hash of {HASH_BYTES} bytes, or depth {part.depth} is negative")
    check_salt(part.salt)


def check_completion(request: wire.Complete, placement: wire.Placement, asked: wire.Request) -> None:
    """Raise BadRequest unless a client reports about each place what the placement asks for.

    asked: the request that the placement answers.
    """
    is_comparison = isinstance(asked, wire.Compare)
    summed, differences = [place.is_summed for place in placement.places], request.differences
    if len(request.sums) != len(summed) or len(differences) != len(summed) * is_comparison:
        raise BadRequest(f"{len(request.sums)} checksums, {len(differences)} differences for {len(summed)} chunks")
    for found, is_summed in zip(request.sums, summed, strict=True):
        is_right = (found > 0) == is_summed or (is_comparison and not found)
        if not (is_right and 0 <= found < 1 << 64):
            raise BadRequest(f"the checksum {found} of a chunk that is {'to be' if is_summed else 'not'} summed")
    if not all(each and not any(found < 0.0 for found in each) for each in differences):
        raise BadRequest("a difference is missing, or negative")
