"""Warming, leasing and forgetting chunks by hand (`kvdepot warm`, `lease`, `forget`), and resetting an engine's cache.

Called by cli/, web/, library/ and integrations/. Functions that take a client block until the server has answered, 30 s
at most, and raise the server's error, or ProtocolError for an answer of another version.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvdepot.client.calls import ANSWER_S, OwnClient, answer, ask
from kvdepot.client.socket import CONNECT_S, Client
from kvdepot.client.transfer import LeaseTerms, PromptChunks, ShardSpec
from kvdepot.errors import BadRequest, ConfigError, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.chunks import MOST_HASHES, ChunkStatus
from kvdepot.protocol.keys import HASH_BYTES, ChunkChain, derive_root, salt_tag
from kvdepot.protocol.leases import LeaseStatus
from kvdepot.protocol.quotas import Quota
from kvdepot.protocol.status import MOST_NAME, Status, read
from kvdepot.protocol.trails import Trail

log = logging.getLogger(__name__)

_RETAINED = LeaseTerms()

msgspec.convert([], list[ChunkStatus])  # at import, since msgspec crashes if two threads are the first to decode a type


@contextmanager
def connect(url: str, key: str = "", timeout_s: float = CONNECT_S, arena_dir: str = "") -> Iterator[Client]:
    """A client that has been welcomed; arguments as for Client. Raises Unavailable without a server, ConfigError for a
    bad key file, ArenaError for a bad folder."""
    client = OwnClient(url, key, arena_dir=arena_dir)
    try:
        client.learn_chunk_size(timeout_s)
        yield client
    finally:
        client.close()


def read_prompt(client: Client, tokens: str | None, hashes: str | None, model: str, salt: str) -> PromptChunks:
    """The chunks of the prompt in a file: token ids (JSON, or separated numbers), or chunk hashes in hex; `-`: stdin.

    model: a name that the server lists, or the beginning of exactly one; empty: the only one. Raises ConfigError.
    """
    file = tokens or hashes or "-"
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror}") from exc
    words = re.findall(r"[^\s,\[\]\"]+", text)
    form, fault = ("[0-9]{1,20}", "a number") if tokens else (f"[0-9a-fA-F]{{{2 * HASH_BYTES}}}", "one")
    if wrong := next((word for word in words if not re.fullmatch(form, word)), ""):
        wanted = "token ids, such as [1, 2, 3]" if tokens else f"chunk hashes of {2 * HASH_BYTES} hexadecimal digits"
        raise ConfigError(f"{file}: not a list of {wanted}: {wrong[:80]!r} is not {fault}")
    ids, chunks = (list(map(int, words)), b"") if tokens else ([], bytes.fromhex("".join(words)))
    return make_prompt(client, ids, chunks, model, salt)


def make_prompt(client: Client, ids: Sequence[int], hashes: bytes, model: str, salt: str) -> PromptChunks:
    """The chunks with these hashes or, if there are none, those of these token ids. model: see `read_prompt`. Raises
    ConfigError."""
    spec = _spec_named(client, model)
    if not hashes:
        chain = ChunkChain(spec.chunk_tokens, derive_root(*([("salt", salt)] if salt else [])))
        chain.extend(ids)
        hashes = bytes(chain.hashes)
    if not hashes:
        raise ConfigError(f"{len(ids)} tokens are less than a chunk of {spec.chunk_tokens}; only whole chunks are kept")
    return PromptChunks(spec, hashes, salt_tag(salt))


def _spec_named(client: Client, model: str) -> ShardSpec:
    """The shards of the one model whose name is or begins with `model`. Raises ConfigError unless there is exactly one.

    If the server lists only some of its namespaces, a full name means the listed shape of the model, which is the one
    with the most bytes.
    """
    found = status(client)
    namespaces, unlisted = found.namespaces, found.namespace_count - len(found.namespaces)
    known = [each for each in namespaces if each.model == model]
    is_whole = bool(known)
    known = known or [each for each in namespaces if each.model.startswith(model[:MOST_NAME])]
    known = [each for each in known if each.engines] or known  # the others may have chunks of an earlier size
    shapes = {
        (each.model, each.world_size, 0, each.chunk_tokens or client.chunk_size, each.blocks_in_chunk) for each in known
    }
    if not namespaces and unlisted <= 0:
        raise ConfigError("no engine has registered yet, so the server knows no model")
    if is_whole and len(shapes) > 1:
        raise ConfigError(f"model {model!r} is registered in {len(shapes)} shapes: only its engines can name a prompt")
    if len(shapes) != 1:
        names = ", ".join(sorted({each.model for each in namespaces}))
        more = f", and {unlisted} smaller ones that it does not list" if unlisted > 0 else ""
        if not shapes:
            raise ConfigError(f"no model of this server matches {model!r}; models: {names}{more}")
        what = f"{model!r} matches {len(shapes)} models" if model else f"the server has {len(shapes)} models"
        raise ConfigError(f"{what}; give the full name of one: {names}{more}")
    (shape,) = shapes
    if len(shape[0]) >= MOST_NAME:
        raise ConfigError(
            f"model {model[:80]!r}: the server reports {MOST_NAME} characters of a name, and this one may be longer: "
            f"only its engines can load and pin its chunks"
        )
    if unlisted > 0 and not is_whole:
        raise ConfigError(
            f"model {model!r} may also match other models than {shape[0]}: the server does not list its {unlisted} "
            f"smallest models and shapes; give the full name"
        )
    return ShardSpec(*shape)


def warm(client: Client, prompt: PromptChunks, progress: Callable[[int], None] = lambda chunks: None) -> int:
    """Load a prompt's chunks from the tiers into memory. Blocks until no more arrive; returns how many of its first
    chunks are in memory. progress: called with that number as it grows.
    """
    request = f"warm {os.urandom(8).hex()}"
    lookup = prompt.lookup(request)
    reached = -1
    while True:
        matched = answer(client, lookup, wire.Hit, ANSWER_S + 60.0).chunks
        progress(matched)
        if matched == len(prompt) or matched <= reached:
            client.ask(wire.EndSession(request), deadline_s=None).result(ANSWER_S)
            return matched
        reached = matched  # the lookup's deadline passed; chunks that arrived later are in memory by now


def lease(
    client: Client,
    name: str,
    prompt: PromptChunks,
    terms: LeaseTerms = _RETAINED,
    progress: Callable[[int], None] = lambda chunks: None,
) -> int:
    """Begin a lease of a prompt's chunks, in place of an earlier lease of the same name; see wire.TakeLease.

    Returns how many chunks are leased so far; unless the kind of the lease is expire, this first loads them from the
    tiers, and blocks until no more arrive. progress: see `warm`. Raises BadRequest, or Busy if the lease exceeds its
    tenant's budget.
    """
    if terms.kind != "expire":
        warm(client, prompt, progress)
    return ask(client, prompt.lease(name, terms), int).result(ANSWER_S + 60.0)


def end_lease(client: Client, name: str, drops: bool = False) -> None:
    """End a lease. drops: also remove its chunks, see wire.Drop; does not wait for that. Raises BadRequest if there is
    no lease of that name."""
    if not answer(client, wire.EndLease(name, drops), bool):
        raise BadRequest(f"there is no lease {name!r}; `kvdepot lease` lists them")


def drop(client: Client, prompt: PromptChunks, keep: int = 0) -> int:
    """Remove a prompt's chunks except the first `keep`; see wire.Drop. Returns how many were removed from memory."""
    return answer(client, prompt.drop(keep), int)


def leases(client: Client) -> list[LeaseStatus]:
    """The leases that this client may see; see wire.ListLeases."""
    return answer(client, wire.ListLeases(), list[LeaseStatus])


def inspect(client: Client, model: str, hashes: bytes, timeout_s: float = ANSWER_S) -> list[ChunkStatus]:
    """Where the chunks with these hashes are, in memory; see wire.Inspect. Raises Busy beyond `max_rate`."""
    step, found = MOST_HASHES * HASH_BYTES, list[ChunkStatus]()
    for at in range(0, len(hashes), step):  # one after the other, so that the server answers others in between
        found += answer(client, wire.Inspect(model, hashes[at : at + step]), list[ChunkStatus], timeout_s)
    return found


def end_quarantine(client: Client, model: str) -> int:
    """Serve the chunks of models again that are in quarantine; see wire.EndQuarantine. Returns their number."""
    return answer(client, wire.EndQuarantine(model), int)


def why(client: Client, request: str = "") -> Trail:
    """The trail of a request; see wire.Why. Raises UnknownRequest, and BadRequest for a beginning of several ids."""
    return answer(client, wire.Why(request), Trail)


class Preview(msgspec.Struct, frozen=True):
    """The chunks and bytes that `forget` would remove from memory. tiers: all that each tier holds (None: not known),
    as a tier cannot count by model or salt."""

    memory: wire.ChunkTotal
    tiers: dict[str, TierPreview]


class TierPreview(msgspec.Struct, frozen=True):
    objects_at_most: int | None
    bytes_at_most: int | None


def preview(client: Client, model: str, salt: str) -> Preview:
    found = answer(client, wire.Count(model, salt_tag(salt)), wire.ChunkTotal)
    return Preview(found, {tier.name: TierPreview(tier.objects, tier.bytes) for tier in status(client).tiers})


def unknown_model(client: Client, model: str) -> str:
    """A message for people that no model's name begins with `model`, with the names there are; empty if one does."""
    found = status(client)
    names = sorted({each.model for each in found.namespaces})
    unlisted = found.namespace_count - len(found.namespaces)
    if not model or unlisted > 0 or any(name.startswith(model[:MOST_NAME]) for name in names):
        return ""
    return f"no model of this server has a name that begins with {model!r}; models: {', '.join(names) or 'none'}"


def forget(client: Client, model: str, salt: str, timeout_s: float = ANSWER_S) -> wire.ForgetAnswer:
    """Remove chunks of models whose names begin with `model`, and of one salt (empty: all), from memory and tiers."""
    return answer(client, wire.ForgetChunks(model, salt_tag(salt)), wire.ForgetAnswer, timeout_s)


def status(client: Client, timeout_s: float = ANSWER_S) -> Status:
    return read(client.ask(wire.GetStatus(), deadline_s=timeout_s).result(timeout_s))


def set_quota(client: Client, tenant: str, quota: Quota | None, salt: str = "") -> None:
    """Give a tenant a quota until the server ends. quota: None takes the tenant's quota away.

    salt: the quota is for the tenant's requests with this cache salt, not for the tenant; only the salt's tag is sent.
    """
    client.ask(wire.SetQuota(tenant, quota, salt_tag(salt))).result(ANSWER_S)


def reset(client: Client, model: str, timeout_s: float = ANSWER_S) -> bool:
    """Forget all chunks of a model. False, with a warning, if some may remain; raises nothing."""
    try:
        left = forget(client, model, "", timeout_s).left
    except KVDepotError as exc:
        left = {"kvdepot": str(exc)}
    for place, why in left.items():
        log.warning("chunks of %s may remain stored: %s: %s", model, place, why)
    return not left
